"""Run Medusa and Hydra heads for MLX targets. The heads' matrices are stored on the target's device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.heads import compute_dtype, loaded_bytes, target_embedding, target_lm_head
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.residual_heads import (
    AttentionShape,
    ResidualHeadTarget,
    ResidualHeadView,
    estimate_residual_heads,
    load_residual_heads,
)
from edgespec.model.base import Head
from edgespec.model.formats.mlx_files import read_json_object
from edgespec.model.formats.mlx_metadata import language_config, read_mlx_info
from edgespec.model.heads.numpy_layers import Array, Product
from edgespec.model.heads.residual_layout import ResidualHeads
from edgespec.model.memory_estimate import MemoryEstimate

__all__ = ["estimate_head", "load_head"]


def load_head(target: MlxModel, head: Head) -> ResidualHeadView:
    """Load Medusa or Hydra heads for an MLX target. See `load_residual_heads`."""
    config = language_config(read_json_object(Path(target.facts.path) / "config.json"))

    def number(key: str, default: float) -> float:
        value = config.get(key)
        return float(value) if isinstance(value, int | float) else default

    embedding = target_embedding(target.net, target.facts.vocab_size, target.state_size)
    heads = load_residual_heads(
        ResidualHeadTarget(
            model=target,
            memory_bytes=target.memory_bytes,
            layers=target.layer_count,
            attention=AttentionShape(
                int(number("num_attention_heads", 0)),
                number("rope_theta", 10000.0),
                number("rms_norm_eps", 1e-5),
            ),
            embed=lambda tokens: _on_host(lambda: embedding(mx.array(list(tokens)))),
            make_product=_product,
            output=lambda: _lm_head(target.net, embedding),
            weight_bytes=_weight_bytes,
        ),
        head.shown_path,
    )
    return heads.view(target)


def estimate_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory of Medusa or Hydra heads for an MLX target. See `estimate_residual_heads`."""
    vocab_size = read_mlx_info(target).vocab_size
    return estimate_residual_heads(head.shown_path, context_tokens, vocab_size, _weight_bytes)


def _weight_bytes(heads: ResidualHeads) -> int:
    return loaded_bytes(heads.tensors())


def _product(matrix: NDArray[np.floating], dtype: str) -> Product:
    with translate_errors("the draft head could not be loaded"):
        weight = mx.array(matrix).astype(compute_dtype(dtype))
    # Evaluate the weight here, because MLX can do so only in this thread, and another thread may run the
    # head.
    evaluate(weight)
    return lambda rows: _on_host(lambda: mx.array(rows).astype(weight.dtype) @ weight.T)


def _lm_head(net: Any, embedding: Callable[[mx.array], mx.array]) -> Product:
    lm_head, dtype = target_lm_head(net), embedding(mx.array([0])).dtype
    return lambda rows: _on_host(lambda: lm_head(mx.array(rows).astype(dtype)))


def _on_host(compute: Callable[[], mx.array]) -> Array:
    """Return the result of `compute` as a float32 NumPy array."""
    with translate_errors("the draft head could not be run"):
        result = compute().astype(mx.float32)
    evaluate(result)
    return np.array(result)
