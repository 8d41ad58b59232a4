"""Load Medusa and Hydra heads for GGUF targets."""

from __future__ import annotations

import math
from pathlib import Path

from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.matrices import FileMatrix, GgmlProducts, product_bytes
from edgespec.backends.llamacpp.metadata import architecture_metadata
from edgespec.backends.llamacpp.native import library
from edgespec.backends.residual_heads import (
    AttentionShape,
    ResidualHeadTarget,
    estimate_residual_heads,
    load_residual_heads,
)
from edgespec.model.base import Head
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.model.heads.numpy_layers import Product
from edgespec.model.heads.residual_layout import ResidualHeads
from edgespec.model.memory_estimate import MemoryEstimate

__all__ = ["EMBEDDINGS", "estimate_head", "lm_head", "load_head"]

# Name of the token embeddings in GGUF files.
EMBEDDINGS = "token_embd.weight"


def load_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load Medusa or Hydra heads for a GGUF target. See `load_residual_heads`."""
    return load_residual_heads(_target(target), head.shown_path)


def _target(model: HeadTarget) -> ResidualHeadTarget:
    """Return the parts of a GGUF model that Medusa and Hydra heads use.

    Raises:
        ModelFileError: The model's file has no token embeddings, or cannot be read.
    """
    lib, (weights,), path = library(), model.weights, Path(model.facts.path)
    memory_bytes = model.options.memory_bytes
    if memory_bytes is not None:
        memory_bytes -= (model.options.parallel - 1) * model.facts.max_kv_bytes
    products = GgmlProducts(lambda: model.threads)

    def output() -> Product:
        matrix = lm_head(path)
        return products.stored_product(matrix.stored(), matrix.kind, *matrix.shape)

    def number(key: str, default: float) -> float:
        return float(architecture_metadata(weights, key) or default)

    return ResidualHeadTarget(
        model=model,
        memory_bytes=memory_bytes,
        layers=lib.llama_model_n_layer(weights),
        attention=AttentionShape(
            lib.llama_model_n_head(weights),
            number("rope.freq_base", 10000.0),
            number("attention.layer_norm_rms_epsilon", 1e-5),
        ),
        embed=FileMatrix(path, EMBEDDINGS).rows,
        make_product=products.product,
        output=output,
        weight_bytes=lambda heads: _weight_bytes(heads, path),
    )


def lm_head(path: Path) -> FileMatrix:
    """Return the LM head of a GGUF model. Raises ModelFileError if it is missing or unreadable."""
    # Models with tied embeddings have no separate LM head.
    return FileMatrix(path, "output.weight", EMBEDDINGS)


def estimate_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory that Medusa or Hydra heads need for a GGUF target.

    See `estimate_residual_heads`.
    """
    vocab_size = read_gguf_info(target).vocab_size
    return estimate_residual_heads(
        head.shown_path, context_tokens, vocab_size, lambda heads: _weight_bytes(heads, target)
    )


def _weight_bytes(heads: ResidualHeads, target: Path) -> int:
    # Heads without output matrices use a copy of the target's LM head.
    copied = 0 if heads.vocab_size else lm_head(target).stored_bytes
    return copied + sum(math.prod(tensor.shape) * product_bytes(tensor.dtype) for tensor in heads.tensors())
