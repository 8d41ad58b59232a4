"""Decide which layers of a GGUF model run on which device of which worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from edgespec.backends.llamacpp.devices import layer_bytes, output_bytes, read_bytes
from edgespec.cluster.layer_split import split_layers
from edgespec.cluster.link import Link
from edgespec.errors import MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.model.memory_estimate import MachineShare
from edgespec.system.files import format_bytes

__all__ = ["LayerPlacement", "place_layers"]


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The assignment of a model's layers to this machine and the workers.

    Attributes:
        local: Number of layers on this machine. These are the first layers of the model.
        remote: Number of layers on each worker device, in the order of the workers.
        workers: The layers and memory of each worker.
        local_fraction: The share of the weight bytes read by a pass that is on this machine, from 0 to 1.
    """

    local: int
    remote: tuple[int, ...]
    workers: tuple[MachineShare, ...]
    local_fraction: float

    @property
    def remote_weight_bytes(self) -> int:
        """Size of the weights on the workers, in bytes."""
        return sum(share.weight_bytes for share in self.workers)

    @property
    def remote_cache_bytes(self) -> int:
        """Size of the KV cache on the workers, in bytes."""
        return sum(share.cache_bytes for share in self.workers)

    @property
    def has_remote_output(self) -> bool:
        """Whether the output layer is on a worker."""
        return any(share.has_output for share in self.workers)


def place_layers(
    path: str, name: str, options: LoadOptions, cache_bytes: int, compute_bytes: int, logits_bytes: int
) -> LayerPlacement:
    """Divide the layers between this machine and the workers, in proportion to their memory.

    Args:
        path: The model file.
        name: The model's name, for messages.
        options: The load options, with workers.
        cache_bytes: Size of the KV cache of all layers, in bytes.
        compute_bytes: Maximum size of the compute buffer of a device without the output layer, in bytes.
        logits_bytes: Additional size of the compute buffer on the device with the output layer, in bytes.

    Raises:
        MemoryBudgetError: The layers do not fit.
        ModelFileError: A file cannot be read.
    """
    workers, weights = options.workers, layer_bytes(path)
    assert workers is not None
    cache_per_layer = -(-cache_bytes // max(1, len(weights)))
    layers = [size + cache_per_layer for size in weights]
    rooms = [[room - compute_bytes for room in _device_rooms(link)] for link in workers.links]
    capacities = [workers.local_bytes, *chain.from_iterable(rooms)]
    output = output_bytes(path) if options.output_on_worker else 0
    if not output:
        logits_bytes = 0
    counts = split_layers(_with_output(layers, output + logits_bytes), capacities)
    if counts is None or not sum(counts[-len(rooms[-1]) :]):
        output = logits_bytes = 0
        counts = split_layers(layers, capacities)
    if counts is None:
        needed = sum(weights) + cache_bytes + compute_bytes * (len(capacities) - 1)
        offered = workers.local_bytes + sum(link.memory_bytes for link in workers.links)
        raise MemoryBudgetError(
            f"the layers of {name} need {format_bytes(needed)}, but the machines in --workers offer"
            f" {format_bytes(offered)}",
            "add workers, ask for more memory, or use a smaller --context or quantisation",
        )
    local, *remote = counts
    shares, first, device, read = [], local, 0, max(1, read_bytes(path))
    for link, capacity in zip(workers.links, rooms, strict=True):
        own = remote[device : device + len(capacity)]
        own_output, own_logits = (output, logits_bytes) if link is workers.links[-1] else (0, 0)
        layers_size = sum(weights[first : first + sum(own)])
        shares.append(
            MachineShare(
                str(link.address),
                sum(own),
                layers_size + own_output,
                cache_per_layer * sum(own),
                compute_bytes * sum(map(bool, own)) + own_logits,
                layers_size / read,
                can_hold_all=split_layers(_with_output(layers, own_output + own_logits), capacity)
                is not None,
                has_output=own_output > 0,
            )
        )
        first, device = first + sum(own), device + len(capacity)
    return LayerPlacement(local, tuple(remote), tuple(shares), sum(weights[:local]) / read)


def _with_output(layers: Sequence[int], output: int) -> list[int]:
    """Return the memory of each layer, with the output layer counted as part of the last one.

    Args:
        layers: The memory of each layer.
        output: The memory of the output layer and of its logits.
    """
    return [*layers[:-1], *(size + output for size in layers[-1:])]


def _device_rooms(link: Link) -> Sequence[int]:
    """Return how many bytes to use on each of a worker's devices, in proportion to their free memory."""
    free = [device.free_bytes for device in link.status.devices]
    return [min(each, link.memory_bytes * each // max(1, sum(free))) for each in free]
