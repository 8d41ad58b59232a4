"""Draft with an EAGLE-3 head, a one-layer model that reads the target's hidden states (arXiv 2503.01840)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.eagle1 import estimate_eagle1_head, load_eagle1_head
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.head_context import EagleContext
from edgespec.backends.llamacpp.head_loading import (
    HeadFile,
    HeadWeights,
    head_memory,
    load_head_file,
    target_layers,
)
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.loading import check_file, threads_for
from edgespec.backends.llamacpp.metadata import architecture_metadata
from edgespec.backends.llamacpp.native import library
from edgespec.errors import ModelFileError
from edgespec.model.base import LoadOptions
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.model.formats.mlx_metadata import read_head_info
from edgespec.model.heads.eagle_files import read_eagle
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.self_draft_methods import Head

__all__ = ["estimate_head", "load_head"]

# Approximate size of a head's compute buffer in bytes, per token of a batch and per token of the vocabulary.
_COMPUTE_BYTES_PER_LOGIT = 7


def load_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load an EAGLE-3 head from a GGUF file, or an EAGLE-1 or EAGLE-2 head from a folder.

    See `load_head_file` and `load_eagle1_head`.
    """
    if head.path is not None and head.path.is_dir():
        return load_eagle1_head(target, head.path)

    def make(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        size = architecture_metadata(weights, "target_hidden_size") or library().llama_model_n_embd(weights)
        layers = target_layers(target, weights, head.shown_path, int(size))
        _check_rotations(weights, head.shown_path)
        file = HeadWeights(
            weights,
            head.path or head.shown_path,
            name,
            options,
            plan_context(weights, options),
            partial(library().llama_model_free, weights),
            head.shown_path,
        )

        def open_context(target: HeadTarget, row_size: int) -> EagleContext:
            threads = threads_for(weights, options)
            return EagleContext(weights, options, file.plan_for(target), threads, target.context, row_size)

        return HeadFile(file, layers, open_context, partial(PairHead, encodes=True))

    return load_head_file(target, head, "eagle3", "an EAGLE-3 head", make)


def estimate_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory of a head, which is converted to GGUF first if necessary. See `HeadNetwork`."""
    path = head.path
    assert path is not None
    if path.is_dir():
        return _estimate_published(path, target, context_tokens)
    header = read_header(path)
    state_size = header.architecture_number("target_hidden_size") or header.architecture_number(
        "embedding_length"
    )
    return head_memory(
        context_tokens,
        weight_bytes=check_file(str(path)),
        token_bytes=read_gguf_info(path).kv_bytes,
        vocabulary=header.architecture_number("vocab_size"),
        state_size=np.size(header.architecture_value("target_layers", ())) * state_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


def _estimate_published(folder: Path, target: Path, context_tokens: int) -> MemoryEstimate:
    info = read_head_info(folder)
    if "EAGLE-1" in info.heads:
        return estimate_eagle1_head(read_eagle(folder), target, context_tokens)
    return head_memory(
        context_tokens,
        weight_bytes=info.size_bytes,
        token_bytes=info.kv_bytes,
        vocabulary=info.vocab_size,
        state_size=len(info.read_layers) * info.hidden_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


def _check_rotations(head: Any, path: Path) -> None:
    """Raise ModelFileError for RoPE dimensions that would make llama.cpp hang or abort."""
    rotated, key_length = (
        int(architecture_metadata(head, key) or 0) for key in ("rope.dimension_count", "attention.key_length")
    )
    if rotated % 2 or not 0 < rotated <= key_length:
        raise ModelFileError(
            f"the head {path} is damaged: its rope.dimension_count is {rotated:,}, but must be an even number"
            f" up to the key length of {key_length:,}",
            "download it again, or use --head none",
        )
