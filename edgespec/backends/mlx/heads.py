"""Shared code for heads on MLX targets: weight loading, compatibility checks and KV caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from edgespec.backends.head_view import HeadCells
from edgespec.backends.mlx.attention_cache import AttentionCache, cache_rows
from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.layer_caches import deserialize_head, serialize_head
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.backends.mlx.target_ends import HeadTarget
from edgespec.errors import CapabilityError
from edgespec.model.base import LoadOptions
from edgespec.model.heads.tensor_files import StoredTensor
from edgespec.model.memory_estimate import MemoryEstimate, MemoryPart, check_weights_fit
from edgespec.model.model_facts import ModelFacts

__all__ = [
    "BATCH_TOKENS",
    "MlxHeadCells",
    "check_memory",
    "check_sizes",
    "checked_folder",
    "evaluate_constants",
    "head_facts",
    "head_memory",
    "loaded_bytes",
    "weight_array",
]

# On CPUs, heads run in float32, like their targets. See `WeightSizes.widens`.
_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16}
# Maximum number of tokens per pass. Bounds how long an interrupt waits, because a pass cannot be interrupted.
BATCH_TOKENS = 64


def head_memory(
    context_tokens: int, weight_bytes: int, kv_bytes_per_token: int, compute_elements: int
) -> MemoryEstimate:
    """Estimate the memory of a head whose passes allocate `compute_elements` float32 values."""
    return MemoryEstimate(
        context_tokens,
        "as the weights",
        (
            MemoryPart("weights", weight_bytes),
            MemoryPart("cache", kv_bytes_per_token * cache_rows(None, context_tokens)),
            MemoryPart("compute", 4 * compute_elements),
        ),
    )


def checked_folder(path: Path) -> Path:
    """Return `path`, or raise CapabilityError if it is not a folder."""
    if not path.is_dir():
        raise CapabilityError(
            f"{path} is not a folder, but draft heads for MLX models must be folders, as published on"
            " Hugging Face",
            "pass the draft head's folder with --head, or use a GGUF version of the model",
            code="wrong_file",
        )
    return path


def loaded_bytes(tensor: StoredTensor) -> int:
    """Return the size in bytes of a weight after loading."""
    if not tensor.is_floating:
        return tensor.size_bytes
    elements = math.prod(tensor.shape)
    return elements * (4 if runs_on_cpu() or tensor.dtype not in _DTYPES else 2)


def weight_array(tensor: StoredTensor) -> mx.array:
    """Load a weight as an evaluated array. Quantised weights remain packed in integers.

    The array must be evaluated here, because MLX can evaluate an array only in the thread that created it,
    and another thread may run the head.
    """
    dtype = mx.float32 if runs_on_cpu() else _DTYPES.get(tensor.dtype, mx.float32)
    with translate_errors("the draft head could not be loaded"):
        array = mx.array(tensor.read())
        array = array.astype(dtype) if tensor.is_floating else array
    evaluate(array)
    return array


def evaluate_constants(ropes: Iterable[Any]) -> None:
    """Evaluate the constant arrays of rotary embeddings, because another thread may run the head."""
    evaluate(*(part for rope in ropes for part in vars(rope).values() if isinstance(part, mx.array)))
    evaluate(mx.random.state)  # type: ignore[arg-type]


def check_memory(target: HeadTarget, name: str, weight_bytes: int) -> None:
    """Raise MemoryBudgetError if a head's weights do not fit in memory."""
    if target.memory_bytes is not None:
        left = target.memory_bytes - target.facts.weight_bytes - target.facts.max_kv_bytes
        check_weights_fit(name, weight_bytes, LoadOptions(memory_bytes=max(0, left)))


def check_sizes(target: HeadTarget, folder: Path, state_size: int, vocab_size: int) -> None:
    """Raise CapabilityError if a head's hidden size or vocabulary size differs from its target's."""
    for what, own, needed in (
        ("hidden states", target.state_size, state_size),
        ("a vocabulary", target.facts.vocab_size, vocab_size),
    ):
        if own != needed:
            raise CapabilityError(
                f"the draft head {folder} was made for another model: it needs {what} of size {needed:,}, but"
                f" {target.facts.name} has {what} of size {own:,}",
                "choose the head that was published for this model",
                code="head_mismatch",
            )


def head_facts(
    target: HeadTarget,
    name: str,
    folder: Path,
    architecture: str,
    description: str,
    weights: Sequence[mx.array],
    kv_bytes_per_token: int,
    context_tokens: int,
) -> ModelFacts:
    """Return a head's `ModelFacts`, with its target's capabilities.

    Args:
        target: The target that the head drafts for.
        name: The head's name.
        folder: The head's folder.
        architecture: The head's architecture, such as `eagle3`.
        description: User-facing description of the head.
        weights: The head's weights.
        kv_bytes_per_token: Size in bytes of one token's keys and values.
        context_tokens: Context length that the head was trained for. 0 if unknown.
    """
    return replace(
        target.facts,
        name=name,
        path=str(folder),
        architecture=architecture,
        description=description,
        parameters=sum(array.size for array in weights),
        file_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        weight_bytes=sum(array.nbytes for array in weights),
        kv_bytes=kv_bytes_per_token * cache_rows(None, target.facts.max_context_tokens),
        requested_kv_bytes=0,
        trained_context_tokens=context_tokens,
        chat_template=False,
        notice="",
        rollback="in place",
    )


class MlxHeadCells(HeadCells):
    """The KV caches of an MLX head's networks.

    Args:
        counts: Number of caches for each network.

    Attributes:
        layout: Layout of the next pass.
        caches: The caches of each network.
    """

    length = start = 0

    def __init__(self, counts: Sequence[int]) -> None:
        self.layout, self._counts = PassLayout(), counts
        self.restart(0)

    def restart(self, position: int) -> None:
        self.caches = [[AttentionCache(self.layout) for _ in range(count)] for count in self._counts]
        self.start = self.length = position

    def truncate(self, length: int) -> None:
        self.start, self.length = min(self.start, length), length
        self.rewind(length)

    def rewind(self, length: int) -> None:
        """Remove all rows from position `length` onwards."""
        for cache in self._flat:
            cache.rewind(length - self.start)

    @property
    def _flat(self) -> list[AttentionCache]:
        return [cache for caches in self.caches for cache in caches]

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of all caches."""
        return [array for cache in self._flat for array in cache.state]

    def export(self, start: int, end: int) -> bytes:
        return serialize_head(self._flat, self.start, start, end) if start < end else b""

    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        return start == end or deserialize_head(self._flat, self.start, start, data)
