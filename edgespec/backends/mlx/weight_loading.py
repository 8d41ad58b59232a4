"""Load the weights and the tokenizer of an MLX model."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.memory_check import check_weights_fit
from edgespec.backends.mlx.build_info import mlx_core, mlx_lm_utils
from edgespec.backends.mlx.model_skeleton import (
    ModelSkeleton,
    named_arrays,
    parameter_bytes,
    read_skeleton,
    translate_load_errors,
)
from edgespec.backends.mlx_files import read_json_object
from edgespec.errors import CancelledError

__all__ = ["LoadedModel", "load_model"]


class LoadedModel(NamedTuple):
    """A model with all its weights in memory.

    Attributes:
        skeleton: The model and its properties. Its weights are no longer lazy.
        tokenizer: mlx_lm's TokenizerWrapper.
        weight_bytes: Memory used by the weights, without the memory added by low-bit weights.
        widened: Whether 16-bit weights were widened to float32.
        dtype: Data type of the computation (`mx.Dtype`).
    """

    skeleton: ModelSkeleton
    tokenizer: Any
    weight_bytes: int
    widened: bool
    dtype: Any


def load_model(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LoadedModel:
    """Load the weights and the tokenizer of the model in a folder. See `loading.load`."""

    def report(fraction: float) -> None:
        if progress is not None and not progress(f"loading {name}", fraction):
            raise CancelledError(f"loading {name} was cancelled")

    report(0.0)
    skeleton = read_skeleton(path, name, options)
    with translate_load_errors(path), contextlib.redirect_stdout(sys.stderr):
        tokenizer = _load_tokenizer(Path(path), skeleton.config)
    with translate_load_errors(path):
        check_weights_fit(name, skeleton.sizes.tensor_bytes, options)
        widened = _evaluate_weights(skeleton.model, skeleton.sizes.widens(options), report)
        added_bytes = skeleton.low_bits.array_bytes if skeleton.low_bits else 0
        weight_bytes = parameter_bytes(skeleton.model) - added_bytes
    return LoadedModel(skeleton, tokenizer, weight_bytes, widened, _compute_dtype(skeleton.model))


def _load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """Load the tokenizer, with the end-of-sequence tokens from all configuration files of the model."""
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
    return mlx_lm_utils().load_tokenizer(folder, offline, eos_token_ids=sorted(eos_ids))


def _evaluate_weights(model: Any, widen: bool, report: Callable[[float], None]) -> bool:
    """Load all weights into memory, one after another.

    All weights must be evaluated here, because MLX can evaluate an array only in the thread that created it,
    and the model may run in another thread.

    Returns:
        Whether 16-bit weights were widened to float32.
    """
    from mlx.utils import tree_unflatten

    mx = mlx_core()
    # Remove each weight from the list, so that its 16-bit array is freed before the next one is widened. Load
    # the largest weights first, while there is enough memory for both versions of a weight.
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
    # Also evaluate arrays that are not parameters, such as the frequencies of rotary embeddings.
    mx.eval([array for _, array in named_arrays(model)])
    return widened


def _compute_dtype(model: Any) -> Any:
    """Return the most common floating-point data type of the weights, or of the scales if quantised."""
    mx = mlx_core()
    floating: Counter[Any] = Counter()
    for _, weight in named_arrays(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            floating[weight.dtype] += weight.nbytes
    return floating.most_common(1)[0][0] if floating else mx.float32
