"""Decide which layers of a GGUF model run on which device of which worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.backends.llamacpp.devices import layer_bytes
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.layer_split import split_layers
from edgespec.errors import MemoryBudgetError
from edgespec.files import format_bytes

__all__ = ["LayerPlacement", "place_layers"]


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The devices of a model's layers.

    Attributes:
        local: Number of layers on this machine, which are the first ones.
        remote: Number of layers on each device of the workers, in the order of the workers.
        remote_weight_bytes: Weights on the workers.
        remote_cache_bytes: KV cache on the workers.
    """

    local: int
    remote: tuple[int, ...]
    remote_weight_bytes: int
    remote_cache_bytes: int


def place_layers(
    path: str, name: str, workers: ConnectedWorkers, cache_bytes: int, compute_bytes: int
) -> LayerPlacement:
    """Divide the layers among this machine and the workers, in proportion to their memory.

    Args:
        path: The model file.
        name: The model's name, for messages.
        workers: The workers.
        cache_bytes: The KV cache of all layers.
        compute_bytes: The compute buffer. Each device has its own, which is at most this large.

    Raises:
        MemoryBudgetError: The layers do not fit.
        ModelFileError: A file cannot be read.
    """
    weights = layer_bytes(path)
    cache_per_layer = -(-cache_bytes // max(1, len(weights)))
    capacities = [workers.local_bytes, *(room - compute_bytes for room in _device_rooms(workers))]
    counts = split_layers([size + cache_per_layer for size in weights], capacities)
    if counts is None:
        needed = sum(weights) + cache_bytes + compute_bytes * (len(capacities) - 1)
        offered = workers.local_bytes + sum(link.memory_bytes for link in workers.links)
        raise MemoryBudgetError(
            f"the layers of {name} need {format_bytes(needed)}, but the machines in --workers offer"
            f" {format_bytes(offered)}",
            "add workers, ask for more memory, or use a smaller --context or quantisation",
        )
    local, *remote = counts
    return LayerPlacement(
        local, tuple(remote), sum(weights[local:]), cache_per_layer * (len(weights) - local)
    )


def _device_rooms(workers: ConnectedWorkers) -> Sequence[int]:
    """Return the memory to use on each device. A worker's devices share its limit by their free memory."""
    rooms = []
    for link in workers.links:
        free = [device.free_bytes for device in link.status.devices]
        rooms += [min(each, link.memory_bytes * each // max(1, sum(free))) for each in free]
    return rooms
