"""Decide which layers of an MLX model run on which worker."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from edgespec.backends.mlx.build_info import mlx_core
from edgespec.backends.mlx.model_skeleton import parameter_bytes, read_skeleton, trace_one_token
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import split_layers
from edgespec.errors import MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.model.memory_estimate import MachineShare
from edgespec.system.files import format_bytes

__all__ = ["LayerPlacement", "LayerSizes", "place_layers", "place_parts", "read_layer_sizes"]


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The memory that each layer needs.

    Attributes:
        weight_bytes: Size of each layer's weights in bytes.
        caches: The bytes per token of each layer's KV cache, and its sliding window in tokens if it has one.
    """

    weight_bytes: tuple[int, ...]
    caches: tuple[tuple[int, int | None], ...]

    def cache_bytes(self, context_tokens: int) -> list[int]:
        """Return the size in bytes of each layer's KV cache with a full context."""
        from edgespec.backends.mlx.attention_cache import cache_rows

        return [size * cache_rows(window, context_tokens) for size, window in self.caches]


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """How a model's layers are divided between this machine and the workers.

    Attributes:
        widened: Whether 16-bit weights are widened to float32.
        local: Number of layers on this machine, which holds the model's first layers.
        local_weight_bytes, local_cache_bytes: Size in bytes of these layers' weights and KV caches.
        layer_weight_bytes: Size in bytes of the weights of all layers.
        workers: The layers and memory of each worker, in the order of the layers.
    """

    widened: bool
    local: int
    local_weight_bytes: int
    local_cache_bytes: int
    layer_weight_bytes: int
    workers: tuple[MachineShare, ...]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """For each worker, the index of its first layer and the index after its last layer."""
        return list(pairwise(accumulate((share.layers for share in self.workers), initial=self.local)))


@lru_cache(maxsize=16)
def read_layer_sizes(
    path: str, name: str, kv_bits: int | None, widened: bool, parts: int, _stamps: tuple[Any, ...]
) -> LayerSizes:
    """Return the memory that each of a model's layers needs. The result is cached until a model file changes.

    Args:
        path: The model's folder.
        name: The model's name, for messages.
        kv_bits: Bits per element in the KV cache, or None if it is not quantised.
        widened: Whether 16-bit weights are widened to float32.
        parts: Number of workers that each layer is sharded across. The sizes are those of one shard.

    Raises:
        CapabilityError: The layers cannot be split across machines.
        ModelFileError: The model is damaged or not supported.
    """
    from edgespec.backends.mlx.layer_block import check_separable
    from edgespec.backends.mlx.layers import LayerList
    from edgespec.backends.mlx.tensor_shards import ShardIndex, shard_for_transfer

    try:
        skeleton = read_skeleton(path, name, LoadOptions())
        model = skeleton.model
        if parts > 1:
            shard_for_transfer(model, skeleton.config, name, ShardIndex(0, parts))
        else:
            check_separable(model, name)
        if widened:
            model.set_dtype(mlx_core().float32)
        weights = tuple(parameter_bytes(layer) for layer in LayerList(model).layers)
        caches = trace_one_token(model, kv_bits)[1].attention
        return LayerSizes(weights, tuple((cache.bytes_per_token, cache.window) for cache in caches))
    finally:
        # MLX modules contain reference cycles, so only the garbage collector can free them.
        gc.collect()


def place_layers(
    name: str,
    weight_bytes: Sequence[int],
    cache_bytes: Sequence[int],
    workers: ConnectedWorkers,
    compute_bytes: int,
    read_bytes: int,
    *,
    widened: bool,
) -> LayerPlacement:
    """Divide the layers between this machine and the workers, in proportion to their memory.

    Args:
        name: The model's name, for messages.
        weight_bytes: Size of each layer's weights in bytes.
        cache_bytes: Size of each layer's KV cache in bytes.
        workers: The workers to place layers on.
        compute_bytes: Memory in bytes that a pass needs on each worker.
        read_bytes: Size in bytes of the weights that a pass reads.
        widened: Whether 16-bit weights are widened to float32.

    Raises:
        MemoryBudgetError: The layers do not fit in the memory of these machines.
    """
    layers = [sum(both) for both in zip(weight_bytes, cache_bytes, strict=True)]
    rooms = [link.memory_bytes - compute_bytes for link in workers.links]
    counts = split_layers(layers, [workers.local_bytes, *rooms])
    if counts is None:
        needed = sum(layers) + compute_bytes * len(rooms)
        offered = workers.local_bytes + sum(link.memory_bytes for link in workers.links)
        raise MemoryBudgetError(
            f"the layers of {name} need {format_bytes(needed)}, but the machines in --workers offer only"
            f" {format_bytes(offered)}",
            "add workers, raise the memory limits in --workers, or use a smaller --context or quantisation",
        )
    shares, local = [], counts[0]
    first = local
    for link, room, count in zip(workers.links, rooms, counts[1:], strict=True):
        own = slice(first, first + count)
        own_bytes = sum(weight_bytes[own])
        shares.append(
            MachineShare(
                str(link.address),
                count,
                own_bytes,
                sum(cache_bytes[own]),
                compute_bytes if count else 0,
                own_bytes / read_bytes,
                can_hold_all=split_layers(layers, [room]) is not None,
            )
        )
        first += count
    here = sum(weight_bytes[:local]), sum(cache_bytes[:local])
    return LayerPlacement(widened, local, *here, sum(weight_bytes), tuple(shares))


def place_parts(
    name: str,
    part: LayerSizes,
    whole: LayerSizes,
    context_tokens: int,
    workers: ConnectedWorkers,
    compute_bytes: int,
    read_bytes: int,
    *,
    widened: bool,
) -> LayerPlacement:
    """Assign a shard of every layer to each worker.

    Args:
        name: The model's name, for messages.
        part: The memory that one shard of each layer needs.
        whole: The memory that each whole layer needs.
        context_tokens: Context size in tokens.
        workers: The workers to place shards on.
        compute_bytes: Memory in bytes that a pass needs on each worker.
        read_bytes: Size in bytes of the weights that a pass reads.
        widened: Whether 16-bit weights are widened to float32.

    Raises:
        MemoryBudgetError: A shard does not fit on a worker.
    """
    weight_bytes, cache_bytes = sum(part.weight_bytes), sum(part.cache_bytes(context_tokens))
    whole_bytes = sum(whole.weight_bytes) + sum(whole.cache_bytes(context_tokens)) + compute_bytes
    shares = []
    for link in workers.links:
        share = MachineShare(
            str(link.address),
            len(part.weight_bytes),
            weight_bytes,
            cache_bytes,
            compute_bytes,
            weight_bytes / read_bytes,
            can_hold_all=whole_bytes <= link.memory_bytes,
            parts=len(workers.links),
        )
        if share.total_bytes > link.memory_bytes:
            raise MemoryBudgetError(
                f"the part of {name} on the worker {link.address} needs {format_bytes(share.total_bytes)},"
                f" but the worker offers only {format_bytes(link.memory_bytes)}",
                "add workers, request more memory from this one in --workers, use --split-mode layer, or"
                " choose a smaller --context",
            )
        shares.append(share)
    return LayerPlacement(widened, 0, 0, 0, sum(whole.weight_bytes), tuple(shares))
