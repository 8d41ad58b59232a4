"""Load the weights and the tokenizer of an MLX model, and reject options that MLX does not support."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.backends.mlx.build_info import mlx_core, mlx_lm_utils, runs_on_cpu
from edgespec.backends.mlx.model_skeleton import (
    ModelSkeleton,
    check_complete,
    named_arrays,
    parameter_bytes,
    read_skeleton,
    translate_load_errors,
)
from edgespec.errors import CancelledError, OptionError
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.formats.mlx_files import read_json_object, readable_folder
from edgespec.model.memory_estimate import MachineShare, check_weights_fit

if TYPE_CHECKING:
    from edgespec.backends.mlx.remote_layers import RemoteBlock, RemoteShards

__all__ = [
    "KV_BITS",
    "MAX_WIDTH",
    "LayerPlacement",
    "LoadedMlxModel",
    "check_options",
    "load_model",
    "prefill_batch_tokens",
]

# Maximum number of tokens in a verify pass. Memory estimates include the buffers for a pass of this width.
MAX_WIDTH = 64
# Bits per element in the KV cache, keyed by `LoadOptions.kv_type`. None means that the cache is not quantised
# and uses the model's compute data type.
KV_BITS = {"auto": None, "q8_0": 8, "q4_0": 4}
# Maximum number of tokens in a prefill batch on a CPU. The limit is low, because a batch cannot be
# interrupted.
_CPU_BATCH_TOKENS = 64


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


class LoadedMlxModel(NamedTuple):
    """A model with all weights in memory.

    Attributes:
        skeleton: The model with its loaded weights, and its properties.
        tokenizer: mlx_lm's TokenizerWrapper.
        weight_bytes: Size of the weights in bytes, excluding the arrays added for low-bit drafting.
        widened: Whether 16-bit weights were widened to float32.
        dtype: Compute data type (`mx.Dtype`).
        blocks: The layers that are on workers, or the shards of all layers.
    """

    skeleton: ModelSkeleton
    tokenizer: Any
    weight_bytes: int
    widened: bool
    dtype: Any
    blocks: Sequence[RemoteBlock | RemoteShards] = ()


def prefill_batch_tokens(options: LoadOptions) -> int:
    """Return the maximum number of tokens in a prefill pass."""
    return min(options.batch_tokens, _CPU_BATCH_TOKENS) if runs_on_cpu() else options.batch_tokens


def check_options(options: LoadOptions) -> None:
    """Raise OptionError for options that MLX does not support."""
    if options.kv_type not in KV_BITS:
        raise OptionError(
            f"kv_type {options.kv_type!r} is not available for MLX models",
            f"choose one of {', '.join(KV_BITS)} (auto uses the model's compute data type)",
            option="kv_type",
            code="option_not_supported",
        )
    for name, is_set, reason in (
        ("threads", options.threads is not None, "MLX chooses the number of threads itself"),
        ("gpu_layers", options.gpu_layers is not None, "MLX runs the whole model on one device"),
        ("experts", options.experts is not None, "MLX keeps all weights in the same memory"),
        (
            "flash_attention",
            options.flash_attention != "auto",
            "MLX has only one implementation of attention",
        ),
        ("mlock", options.mlock, "MLX always keeps the weights in memory"),
        ("mmap", not options.mmap, "MLX always reads the weights into memory"),
    ):
        if is_set:
            raise OptionError(
                f"{name} has no effect on an MLX model: {reason}",
                f"omit {name}",
                option=name,
                code="option_without_effect",
            )


def load_model(
    path: str,
    name: str,
    options: LoadOptions,
    progress: Progress | None,
    placement: LayerPlacement | None = None,
) -> LoadedMlxModel:
    """Load a model's weights and tokenizer, onto workers if `placement` is set. See `load`."""

    def report(fraction: float) -> None:
        if progress is not None and not progress(f"loading {name}", fraction):
            raise CancelledError(f"loading {name} was cancelled")

    report(0.0)
    skeleton = read_skeleton(path, name, options)
    check_complete(Path(path))
    with translate_load_errors(path), contextlib.redirect_stdout(sys.stderr):
        tokenizer = _load_tokenizer(Path(path), skeleton.config)
    with translate_load_errors(path):
        check_weights_fit(name, skeleton.sizes.tensor_bytes, options)
        widen = placement.widened if placement else skeleton.sizes.widens(options)
        blocks: Sequence[RemoteBlock | RemoteShards] = ()
        if placement and options.workers:
            from edgespec.backends.mlx.remote_layers import send_blocks, send_shards

            kv_bits, folder, model = KV_BITS[options.kv_type], Path(path), skeleton.model
            if options.split_tensors:
                blocks = (send_shards(folder, name, model, kv_bits, widen, options.workers, report),)
            else:
                blocks = send_blocks(folder, model, placement.blocks, kv_bits, widen, options.workers, report)
        widened = _evaluate_weights(skeleton.model, widen, report)
        added_bytes = skeleton.low_bits.array_bytes if skeleton.low_bits else 0
        weight_bytes = parameter_bytes(skeleton.model) - added_bytes
    dtype = _compute_dtype(skeleton.model)
    return LoadedMlxModel(skeleton, tokenizer, weight_bytes, widened, dtype, blocks)


def _load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """Load the tokenizer, with the end-of-sequence tokens from all of the model's configuration files."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    eos_ids: set[int] = set()
    sources = [config, config.get("text_config")]
    if (folder / "generation_config.json").exists():
        sources.append(read_json_object(folder / "generation_config.json"))
    for source in sources:
        eos = source.get("eos_token_id") if isinstance(source, dict) else None
        eos_ids.update(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))
    offline = {"local_files_only": True, "trust_remote_code": False}
    with readable_folder(folder) as readable:
        return mlx_lm_utils().load_tokenizer(readable, offline, eos_token_ids=sorted(eos_ids))


def _evaluate_weights(model: Any, widen: bool, report: Callable[[float], None]) -> bool:
    """Load all weights into memory, one at a time.

    All weights must be evaluated here, because MLX can evaluate an array only in the thread that created it,
    and the model may run in another thread.

    Returns:
        Whether 16-bit weights were widened to float32.
    """
    from mlx.utils import tree_unflatten

    mx = mlx_core()
    # Start with the largest weights, while there is still enough memory for both their original and float32
    # versions.
    waiting = sorted(named_arrays(model.parameters()), key=lambda each: each[1].nbytes)
    total_bytes, loaded_bytes, widened = parameter_bytes(model), 0, False
    while waiting:
        name, weight = waiting.pop()
        loaded_bytes += weight.nbytes
        if widen and weight.dtype in (mx.float16, mx.bfloat16):
            weight, widened = weight.astype(mx.float32), True
        mx.eval(weight)
        model.update(tree_unflatten([(name, weight)]))
        report(loaded_bytes / total_bytes)
    # Also evaluate arrays that are not parameters, such as rotary embedding frequencies.
    mx.eval([array for _, array in named_arrays(model)])
    return widened


def _compute_dtype(model: Any) -> Any:
    """Return the most common floating-point data type of the weights, or of their scales if quantised."""
    mx = mlx_core()
    floating: Counter[Any] = Counter()
    for _, weight in named_arrays(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            floating[weight.dtype] += weight.nbytes
    return floating.most_common(1)[0][0] if floating else mx.float32
