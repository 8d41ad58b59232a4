"""List the GPUs that llama.cpp can use, and decide which weights of a model are on which device.

The experts of a mixture-of-experts model can stay in main memory while its other weights are on the GPU.
Each token uses only a few experts per layer, so the CPU reads only a small part of their weights. Attention,
shared weights and KV caches are used for every token, so they benefit the most from GPU memory.
"""

from __future__ import annotations

import ctypes
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from edgespec.backends.llamacpp.mtp_files import unloaded_bytes
from edgespec.backends.llamacpp.native import DeviceProperties, ggml, library
from edgespec.backends.llamacpp.weight_layouts import amx_added_bytes
from edgespec.cluster.connected import Link
from edgespec.cluster.machines import split_layers
from edgespec.errors import MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import GgufTensor, read_header
from edgespec.model.formats.gguf_metadata import tensor_bytes
from edgespec.model.memory_estimate import ExpertShares, MachineShare
from edgespec.system.files import file_state, format_bytes

__all__ = [
    "Gpu",
    "LayerPlacement",
    "Paths",
    "amx_bytes",
    "cards",
    "device_split",
    "expert_bytes",
    "expert_shares",
    "experts_per_part",
    "gpus",
    "has_own_memory",
    "in_main_memory",
    "keep_experts_in_memory",
    "model_files",
    "mtp_layer_count",
    "offloaded_bytes",
    "on_cpu",
    "output_bytes",
    "place_layers",
    "unusable_bytes",
]

# A GGUF file, the first file of a multi-part model, or a list of all its files if their names are
# unconventional.
Paths: TypeAlias = str | Sequence[str]

# Values of `enum ggml_backend_dev_type`.
_GPU, _INTEGRATED_GPU = 1, 2
_LAYER = re.compile(r"blk\.(\d+)\.")
# Matches the names of expert weights and biases, except those of shared experts (`_shexp`), which every token
# uses.
_EXPERT_NAMES = r"ffn_(?:up|gate|down|gate_up)_(?:ch)?exps\."
_EXPERT = re.compile(rf"blk\.(\d+)\.{_EXPERT_NAMES}")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that llama.cpp can use.

    Attributes:
        name: llama.cpp's name for it, such as `Vulkan0`.
        description: Product name.
        free_bytes: Free memory in bytes. Some drivers report total memory instead.
        total_bytes: Total memory in bytes.
        has_own_memory: Whether the GPU has dedicated memory, separate from main memory.
        pci_address: PCI address, such as `0000:01:00.0`. Empty if it is unknown or the GPU is not on PCI.
    """

    name: str
    description: str
    free_bytes: int
    total_bytes: int
    has_own_memory: bool
    pci_address: str = ""


def on_cpu(options: LoadOptions) -> bool:
    """Return whether a model loaded with these options runs entirely on the CPU."""
    return options.gpu_layers == 0 or not library().llama_supports_gpu_offload()


def in_main_memory(options: LoadOptions) -> bool:
    """Return whether a model stays entirely in main memory, which is always the case on a Mac."""
    return sys.platform == "darwin" or on_cpu(options)


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that llama.cpp can use. Raises BackendMissingError if llama.cpp is not installed."""
    if not library().llama_supports_gpu_offload():
        return ()
    backend = ggml()
    found = []
    for i in range(backend.ggml_backend_dev_count()):
        device = backend.ggml_backend_dev_get(i)
        kind = backend.ggml_backend_dev_type(device)
        if kind not in (_GPU, _INTEGRATED_GPU):
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        backend.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name, description = (
            text(device).decode("utf-8", "replace")
            for text in (backend.ggml_backend_dev_name, backend.ggml_backend_dev_description)
        )
        # On a Mac, the GPU shares main memory, regardless of the type that ggml reports.
        own = kind == _GPU and sys.platform != "darwin"
        properties = DeviceProperties()
        backend.ggml_backend_dev_get_props(device, ctypes.byref(properties))
        address = (properties.device_id or b"").decode("utf-8", "replace")
        found.append(Gpu(name, description, free.value, total.value, own, address))
    return tuple(found)


def cards() -> tuple[Gpu, ...]:
    """Return the GPUs with dedicated memory that llama.cpp can use. On a Mac, there are none.

    Raises:
        BackendMissingError: llama.cpp is not installed.
    """
    return tuple(gpu for gpu in gpus() if gpu.has_own_memory)


def has_own_memory() -> bool:
    """Return whether llama.cpp can use a GPU with dedicated memory."""
    return bool(cards())


def device_split(
    paths: Paths, layers: int, gpu_layers: int | None, experts: int = 0
) -> tuple[int, float, int]:
    """Return how much of a model is in GPU memory when `gpu_layers` layers are offloaded.

    llama.cpp offloads the output layer first, then the other layers from last to first. The last ones are the
    multi-token prediction layers, which llama.cpp counts even if it does not load them. It keeps the token
    embedding in main memory, and copies it to the GPU if it is also the output layer.

    Args:
        paths: The model file, or all files of the model.
        layers: The number of layers, excluding the output layer and multi-token prediction layers.
        gpu_layers: The number of offloaded layers, including the output layer and multi-token prediction
            layers. None means all.
        experts: The number of layers whose experts stay in main memory. See `LoadOptions.experts`.

    Returns:
        A tuple of the weight bytes on the GPU, the fraction of the KV cache on the GPU, and the weight bytes
        that are both on the GPU and in main memory. All are 0 if nothing is offloaded.

    Raises:
        ModelFileError: A file cannot be read or is truncated.
    """
    if not layers or gpu_layers == 0:
        return 0, 0.0, 0
    sizes = offloaded_bytes(paths, layers, gpu_layers, experts)
    tensors = _weights(paths).tensor_bytes
    tied_bytes = 0 if "output.weight" in tensors else tensors.get("token_embd.weight", 0)
    return sum(sizes), (layers - _first_offloaded(paths, layers, gpu_layers)) / layers, tied_bytes


def offloaded_bytes(paths: Paths, layers: int, gpu_layers: int | None, experts: int = 0) -> list[int]:
    """Return the weight bytes on the GPUs of each offloaded layer, with the output layer last.

    Multi-token prediction layers count as empty, because their weights belong to the head. The arguments and
    errors are the same as for `device_split`.
    """
    if not layers or gpu_layers == 0:
        return []
    first = _first_offloaded(paths, layers, gpu_layers)
    tensors = _weights(paths).tensor_bytes
    output = ("output",) if "output.weight" in tensors else ("output", "token_embd.weight")
    mtp_layers = mtp_layer_count(paths)
    sizes = [0] * (layers - first + min(mtp_layers, mtp_layers if gpu_layers is None else gpu_layers - 1) + 1)
    for name, size_bytes in tensors.items():
        if match := _LAYER.match(name):
            # Multi-token prediction layers have higher indices.
            if first <= (layer := int(match[1])) < layers:
                sizes[layer - first] += size_bytes
        elif name.startswith(output):
            sizes[-1] += size_bytes
    for layer, size_bytes in list(expert_bytes(paths).items())[:experts] if experts else ():
        if first <= layer < layers:
            sizes[layer - first] -= size_bytes
    return sizes


def _first_offloaded(paths: Paths, layers: int, gpu_layers: int | None) -> int:
    """Return the index of the first offloaded layer, or `layers` if none is. See `device_split`."""
    if gpu_layers is None:
        return 0
    # llama.cpp offloads the output layer and the multi-token prediction layers first.
    return min(layers, max(0, layers + mtp_layer_count(paths) + 1 - gpu_layers))


def mtp_layer_count(paths: Paths) -> int:
    """Return the number of multi-token prediction layers in a model's files, which follow all other layers.

    llama.cpp includes them when it counts offloaded layers, even if it does not load them.

    Raises:
        ModelFileError: A file cannot be read.
    """
    return _weights(paths).mtp_layers


def unusable_bytes(layer_bytes: Sequence[int], compute: Mapping[str, int]) -> int:
    """Return how much memory is left on the other GPUs once one GPU is full.

    llama.cpp divides the offloaded layers between the GPUs in proportion to their free memory. It cannot
    split a layer, the last GPU also gets the output layer, and each GPU needs a compute buffer of its own. A
    plan that counts these bytes as used fits on every GPU if it fits in the sum of their memory.

    Args:
        layer_bytes: Size of each offloaded layer, including its KV cache. The output layer is the last one.
        compute: Size of each compute buffer, keyed by the name of its device.
    """
    found = cards()
    free_bytes = sum(card.free_bytes for card in found)
    if len(found) < 2 or not free_bytes or not layer_bytes:
        return 0
    ends = list(accumulate(card.free_bytes / free_bytes for card in found))
    used = [compute.get(card.name, 0) for card in found]
    for number, size_bytes in enumerate(layer_bytes):
        used[min(bisect_right(ends, number / len(layer_bytes)), len(used) - 1)] += size_bytes
    needed = max(
        -(-free_bytes * size_bytes // card.free_bytes)
        for card, size_bytes in zip(found, used, strict=True)
        if card.free_bytes
    )
    return needed - sum(used)


def amx_bytes(paths: Paths, layers: int, gpu_layers: int | None, *, own_head: bool) -> int:
    """Return how many bytes more than in a file a model's weights in main memory take in AMX's layout.

    Multi-token prediction layers count only if they are loaded (`own_head`). See `device_split` for the other
    arguments.

    Raises:
        ModelFileError: A file cannot be read.
    """
    weights, block_count = _weights(paths), _weights(paths).block_count
    is_offloaded = layers > 0 and gpu_layers != 0
    first_offloaded = _first_offloaded(paths, layers, gpu_layers) if is_offloaded else block_count
    first_drafting = block_count - weights.mtp_layers
    total_bytes = 0
    for name, tensor in weights.tensors.items():
        added_bytes = amx_added_bytes(tensor)
        if name == "token_embd.weight" and added_bytes is not None:
            # If the token embedding is also the output layer, llama.cpp loads it twice: as in the file to
            # look up rows, and in AMX's layout to compute logits.
            is_tied = "output.weight" not in weights.tensors
            added_bytes = weights.tensor_bytes[name] + added_bytes if is_tied else None
        layer = int(match[1]) if (match := _LAYER.match(name)) else block_count
        is_loaded = own_head or not first_drafting <= layer < block_count
        if added_bytes is not None and is_loaded and (layer < first_offloaded or not is_offloaded):
            total_bytes += added_bytes
    return total_bytes


class _Override(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`: where to load tensors whose names match a pattern."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def expert_bytes(paths: Paths) -> dict[int, int]:
    """Return the size in bytes of each layer's experts, keyed by layer.

    Layers without experts are omitted.

    Raises:
        ModelFileError: A file cannot be read or is truncated.
    """
    found: dict[int, int] = {}
    for name, size_bytes in _weights(paths).tensor_bytes.items():
        if match := _EXPERT.match(name):
            found[int(match[1])] = found.get(int(match[1]), 0) + size_bytes
    return dict(sorted(found.items()))


def experts_per_part(parts: Sequence[Paths], count: int | None) -> list[int]:
    """Divide the layers whose experts stay in main memory among the parts of a split model.

    These are the model's first layers with experts.

    Args:
        parts: The files of each part, in the order of the layers.
        count: Number of layers in the whole model whose experts stay in main memory. None means 0.

    Returns:
        The number of such layers in each part.
    """
    left, counts = count or 0, []
    for part in parts if left else ():
        counts.append(min(left, len(expert_bytes(part))))
        left -= counts[-1]
    return counts or [0] * len(parts)


def keep_experts_in_memory(params: Any, paths: Paths, count: int) -> None:
    """Make llama.cpp load the experts of the first `count` layers that have experts into main memory.

    `params` are llama.cpp's parameters for loading a model.
    """
    if count and (layers := tuple(expert_bytes(paths))[:count]):
        params.tensor_buft_overrides = ctypes.cast(_overrides(layers), ctypes.c_void_p)


@cache  # The arrays are never freed, because llama.cpp does not copy them.
def _overrides(layers: tuple[int, ...]) -> Any:
    numbers = "|".join(map(str, layers))
    pattern = rf"^blk\.(?:{numbers})\.{_EXPERT_NAMES}".encode()
    # A NULL pattern marks the end of the array.
    return (_Override * 2)(_Override(pattern, ggml().ggml_backend_cpu_buffer_type()))


def expert_shares(paths: Paths, layers: int, gpu_layers: int | None, experts: int) -> ExpertShares:
    """Return how a model's experts are divided between the GPU and main memory.

    The arguments are the same as for `device_split`.

    Raises:
        ModelFileError: A file cannot be read or is truncated.
    """
    every = expert_bytes(paths) if layers and gpu_layers != 0 else {}
    sizes = {layer: size_bytes for layer, size_bytes in every.items() if layer < layers}
    first = _first_offloaded(paths, layers, gpu_layers) if sizes else 0
    in_memory = {
        layer: size_bytes
        for number, (layer, size_bytes) in enumerate(sizes.items())
        if number < experts or layer < first
    }
    memory_bytes = sum(in_memory.values())
    return ExpertShares(len(sizes), len(in_memory), memory_bytes, sum(sizes.values()) - memory_bytes)


def _layer_bytes(path: str) -> list[int]:
    """Return the weight bytes of each layer, excluding the token embedding and the output layer.

    Multi-token prediction layers are excluded too, because llama.cpp does not load them on workers.
    """
    sizes: dict[int, int] = {}
    for name, size_bytes in _loaded_tensor_bytes(path).items():
        if match := _LAYER.match(name):
            sizes[int(match[1])] = sizes.get(int(match[1]), 0) + size_bytes
    return [sizes.get(layer, 0) for layer in range(max(sizes, default=-1) + 1)]


def output_bytes(path: str) -> int:
    """Return the weight bytes of the output layer, or 0 if it uses the token embedding's weights.

    Raises:
        ModelFileError: A file cannot be read or is truncated.
    """
    return _weights(path).tensor_bytes.get("output.weight", 0)


def _read_bytes(path: str) -> int:
    """Return the weight bytes that a pass reads, excluding an untied token embedding."""
    tensors = _loaded_tensor_bytes(path)
    unread = tensors.get("token_embd.weight", 0) if "output.weight" in tensors else 0
    return sum(tensors.values()) - unread


def _loaded_tensor_bytes(path: str) -> Mapping[str, int]:
    weights = _weights(path)
    if not unloaded_bytes(Path(path)):
        return weights.tensor_bytes
    layers = weights.block_count - weights.mtp_layers
    return {
        name: size_bytes
        for name, size_bytes in weights.tensor_bytes.items()
        if not (match := _LAYER.match(name)) or int(match[1]) < layers
    }


class _Weights(NamedTuple):
    """The weights in a model's files.

    Attributes:
        tensors: The header entry of each tensor, by name.
        tensor_bytes: The size of each tensor in its file, by name.
        block_count: Number of layers, including multi-token prediction layers.
        mtp_layers: Number of multi-token prediction layers.
    """

    tensors: Mapping[str, GgufTensor]
    tensor_bytes: Mapping[str, int]
    block_count: int
    mtp_layers: int


def model_files(paths: Paths) -> tuple[Path, ...]:
    """Return all files of a model. Raises ModelFileError if a part is missing."""
    return tuple(gguf_files(Path(paths)) if isinstance(paths, str) else map(Path, paths))


def _weights(paths: Paths) -> _Weights:
    files = model_files(paths)
    return _read_weights(files, tuple(map(file_state, files)))


@lru_cache(maxsize=64)  # Large headers are slow to read, so read each version of a file only once.
def _read_weights(files: tuple[Path, ...], _file_states: tuple[str, ...]) -> _Weights:
    headers = [read_header(file) for file in files]
    return _Weights(
        {tensor.name: tensor for header in headers for tensor in header.tensors},
        dict(chain.from_iterable(map(tensor_bytes, files, headers))),
        # Only the first file of a multi-part model contains the metadata.
        headers[0].architecture_number("block_count"),
        headers[0].architecture_number("nextn_predict_layers"),
    )


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The assignment of a model's layers to this machine and the workers.

    Attributes:
        local: Number of layers on this machine, which runs the model's first layers.
        remote: Number of layers on each worker device, in the order of the workers.
        workers: The layers and memory of each worker.
        local_fraction: This machine's fraction of the weight bytes read in a pass, from 0 to 1.
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
    workers, weights = options.workers, _layer_bytes(path)
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
            f"the layers of {name} need {format_bytes(needed)}, but the machines in --workers offer only"
            f" {format_bytes(offered)}",
            "add workers, raise the memory limits in --workers, or use a smaller --context or quantisation",
        )
    local, *remote = counts
    shares, first, device, read = [], local, 0, max(1, _read_bytes(path))
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
    """Return the memory of each layer, counting the output layer and its logits as part of the last one."""
    return [*layers[:-1], *(size + output for size in layers[-1:])]


def _device_rooms(link: Link) -> Sequence[int]:
    """Return how many bytes to use on each of a worker's devices, in proportion to their free memory."""
    free = [device.free_bytes for device in link.status.devices]
    return [min(each, link.memory_bytes * each // max(1, sum(free))) for each in free]
