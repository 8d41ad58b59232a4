"""Shared code for heads on MLX targets.

Loads and checks the heads' weights, finds the parts of the target that heads share, and runs heads that have
their own KV caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from numpy.typing import NDArray

from edgespec.backends.head_view import HeadCells, HeadView
from edgespec.backends.mlx.attention_cache import AttentionCache, PassLayout, cache_rows
from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.layer_caches import dump_rows, load_rows, read_header
from edgespec.backends.mlx.layers import Body
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import CapabilityError
from edgespec.model.base import LoadOptions
from edgespec.model.heads.tensor_files import StoredTensor
from edgespec.model.memory_estimate import MemoryEstimate, MemoryPart, check_weights_fit
from edgespec.model.model_facts import ModelFacts

__all__ = [
    "BATCH_TOKENS",
    "MlxHead",
    "MlxHeadCells",
    "check_memory",
    "check_sizes",
    "checked_folder",
    "compute_dtype",
    "evaluate_constants",
    "head_facts",
    "head_memory",
    "loaded_bytes",
    "target_embedding",
    "target_lm_head",
    "weight_array",
    "wrong_layers_error",
]

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


def compute_dtype(stored: str) -> mx.Dtype:
    """Return the data type of a loaded floating-point weight, given its type in the file, such as `BF16`.

    On CPUs, heads run in float32, like their targets. See `WeightSizes.widens`.
    """
    return mx.float32 if runs_on_cpu() else _DTYPES.get(stored, mx.float32)


def loaded_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Return the size in bytes of weights after loading."""
    return sum(
        math.prod(tensor.shape) * compute_dtype(tensor.dtype).size
        if tensor.is_floating
        else tensor.size_bytes
        for tensor in tensors
    )


def weight_array(tensor: StoredTensor) -> mx.array:
    """Load a weight as an evaluated array. Quantised weights remain packed in integers.

    The array must be evaluated here, because MLX can evaluate an array only in the thread that created it,
    and another thread may run the head.
    """
    with translate_errors("the draft head could not be loaded"):
        array = mx.array(tensor.read())
        array = array.astype(compute_dtype(tensor.dtype)) if tensor.is_floating else array
    evaluate(array)
    return array


def evaluate_constants(ropes: Iterable[Any]) -> None:
    """Evaluate the constant arrays of rotary embeddings, because another thread may run the head."""
    evaluate(*(part for rope in ropes for part in vars(rope).values() if isinstance(part, mx.array)))
    evaluate(mx.random.state)  # type: ignore[arg-type]


def check_memory(target: MlxModel, name: str, weight_bytes: int) -> None:
    """Raise MemoryBudgetError if a head's weights do not fit in memory."""
    if target.memory_bytes is not None:
        left = target.memory_bytes - target.facts.weight_bytes - target.facts.max_kv_bytes
        check_weights_fit(name, weight_bytes, LoadOptions(memory_bytes=max(0, left)))


def check_sizes(target: MlxModel, folder: Path, state_size: int, vocab_size: int) -> None:
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
    target: MlxModel,
    name: str,
    folder: Path,
    architecture: str,
    description: str,
    weights: Sequence[mx.array],
    kv_bytes_per_token: int,
    context_tokens: int,
) -> ModelFacts:
    """Return a head's `ModelFacts`, with its target's capabilities.

    The head was trained for a context of `context_tokens`, or 0 if that is unknown.
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


def wrong_layers_error(target: MlxModel, folder: Path, layers: Sequence[int]) -> CapabilityError:
    """Return the error for a head that reads layers which the target does not have."""
    return CapabilityError(
        f"the draft head {folder} was made for another model: it reads the layers {list(layers)}, but"
        f" {target.facts.name} has {target.layer_count} layers",
        "choose the head that was published for this model",
        code="head_mismatch",
    )


def target_embedding(net: Any, vocab_size: int, size: int) -> Callable[[mx.array], mx.array]:
    """Return a target's token embedding, which maps token ids [tokens] to embeddings [tokens, size].

    Raises:
        CapabilityError: The target has no embedding of the expected vocabulary and hidden size.
    """
    for _, module in net.named_modules():
        if _embedding_shape(module) == (vocab_size, size):
            embedding: Callable[[mx.array], mx.array] = module
            return embedding
    raise CapabilityError(
        f"the draft head was made for another model: it needs an embedding with {vocab_size:,} tokens"
        f" of size {size:,}",
        "choose the head that was published for this model",
        code="head_mismatch",
    )


def _embedding_shape(module: Any) -> tuple[int, ...] | None:
    """Return an embedding's vocabulary size and hidden size, or None for other modules."""
    if isinstance(module, QuantizedEmbedding):
        return module.num_embeddings, module.dims
    return module.weight.shape if isinstance(module, Embedding) else None


def target_lm_head(net: Any) -> Callable[[mx.array], mx.array]:
    """Return a target's LM head, including any logit scaling or softcapping.

    The LM head maps hidden states [tokens, size] after the final norm to logits [tokens, vocab].

    Raises:
        CapabilityError: The LM head is not separate from the target's layers.
    """
    body = Body(net)

    def lm_head(states: mx.array) -> mx.array:
        with body.returning(states[None]):
            logits: mx.array = net(mx.zeros((1, states.shape[0]), mx.int32))[0]
        return logits

    return lm_head


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
        if start == end:
            return b""
        return dump_rows(self._flat, {"origin": self.start}, start - self.start, end - self.start)

    def append_exported(self, start: int, end: int, data: bytes) -> bool:
        if start == end:
            return True
        try:
            header, rows = read_header(data)
            # Keys are rotated relative to the position of the first row.
            if header["origin"] != self.start:
                return False
            load_rows(self._flat, header, rows, start - self.start)
            mx.eval(*self.arrays)
        except (ValueError, KeyError, TypeError, IndexError):
            return False
        return True


class MlxHead(HeadView[MlxModel]):
    """Base class for heads with their own KV caches.

    Args:
        target: The target that the head drafts for.
        states: The target's hidden states that the head reads. Passed to `log_hidden_states`.
        cells: The head's KV caches.
        embed: Returns the embeddings of token ids.
        lm_head: Returns the logits [tokens, draft vocabulary] for normalised hidden states.
        target_ids: The target's token id for each token of the draft vocabulary, or None if the vocabularies
            are the same.
        facts: The head's name, sizes and capabilities.
    """

    _cells: MlxHeadCells

    def __init__(
        self,
        target: MlxModel,
        states: Sequence[int],
        cells: MlxHeadCells,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        self._embed, self._lm_head, self.facts = embed, lm_head, facts
        self._columns: mx.array | None = None
        if target_ids is not None:
            # Each target token's column in the head's logits. Tokens that the head cannot draft share an
            # extra column of -inf.
            columns = np.full(target.facts.vocab_size, len(target_ids))
            columns[target_ids] = np.arange(len(target_ids))
            self._columns = mx.array(columns)
            mx.eval(self._columns)
        # Open the log last, because nothing would close it if a later line failed.
        super().__init__(target, target.log_hidden_states(states), cells=cells)
        self._keep(0)

    def _in_target_vocabulary(self, rows: mx.array) -> mx.array:
        """Map logits to the target's vocabulary. Tokens outside the draft vocabulary get -inf."""
        if self._columns is None:
            return rows
        rows = mx.concatenate([rows, mx.full((rows.shape[0], 1), -mx.inf)], axis=1)
        return mx.take(rows, self._columns, axis=1)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._keep(self.length)
            del self._cells.caches, self._embed, self._lm_head, self._columns
