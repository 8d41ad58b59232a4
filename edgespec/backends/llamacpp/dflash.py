"""Run DFlash heads (arXiv 2602.06036) and DSpark heads (arXiv 2607.05147) with llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from edgespec.backends.head_view import HeadView
from edgespec.backends.llamacpp.context import Batch, Inputs, LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.head import LlamaHeadCells, describe_head
from edgespec.backends.llamacpp.head_loading import (
    HeadContext,
    HeadFile,
    HeadParts,
    HeadPass,
    HeadRows,
    head_memory,
    load_head_file,
    target_layers,
)
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.loading import check_file, threads_for
from edgespec.backends.llamacpp.matrices import FileMatrix
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.state_taps import copied_rows, nextn
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.gguf_header import GgufHeader, read_header
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.model.heads.dflash_files import MAX_BLOCK_TOKENS, read_dflash
from edgespec.model.memory_estimate import MemoryEstimate
from edgespec.model.model_facts import Capabilities

__all__ = ["DFlashHead", "MarkovHead", "estimate_head", "load_head"]

# Maximum number of tokens per pass. It is small because compute buffers grow with both this number and the
# vocabulary size.
_BATCH_TOKENS = MAX_BLOCK_TOKENS
# Approximate compute buffer size in bytes, per batch token and vocabulary entry: for most heads, for heads
# with a reduced draft vocabulary, and for heads with a Markov head and large blocks.
_COMPUTE_BYTES, _REDUCED_COMPUTE_BYTES, _MARKOV_COMPUTE_BYTES = 4, 8, 17
# Block size that llama.cpp assumes if the metadata does not contain one.
_DEFAULT_BLOCK_TOKENS = 16
# Metadata keys for which llama.cpp expects a single value rather than one per layer.
_SAME_IN_ALL_LAYERS = (
    "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "rope.dimension_count",
)  # fmt: skip
# Number of positions that M-RoPE needs per hidden state: time, height, width, and an unused one.
_MROPE_POSITIONS = 4


class _MRopeBatch(Batch):
    """A batch of hidden states for a head with M-RoPE, which needs several positions per hidden state."""

    def __init__(self, size: int, sequences: int, embd_size: int) -> None:
        super().__init__(size * _MROPE_POSITIONS, sequences, embd_size)

    def put(
        self,
        inputs: Inputs,
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        logits: bool | Sequence[bool],
    ) -> None:
        super().put(inputs, positions, sequences, logits)
        # For text tokens, the time, height and width positions are equal.
        rows = self._position[: len(inputs) * _MROPE_POSITIONS].reshape(_MROPE_POSITIONS, -1)
        rows[:-1], rows[-1] = positions, 0


class BlockContext(HeadContext):
    """A context that runs a block-diffusion head.

    Its KV cache holds keys and values that the head computes from the target's hidden states.

    Args:
        row_size: Number of values per token in the target's hidden states.
        causal: Whether each token of a block attends only to earlier tokens, rather than to the whole block.
        selects: Whether the head has a path selector, as DFlash 2 heads do.
    """

    def __init__(
        self,
        head: Any,
        options: LoadOptions,
        plan: ContextPlan,
        threads: int,
        *,
        target: LlamaContext,
        row_size: int,
        causal: bool,
        selects: bool,
    ) -> None:
        self._causal, self._selects = causal, selects
        super().__init__(head, options, plan, threads, target=target)
        lib = library()
        has_mrope = lib.llama_model_rope_type(head) == lib.LLAMA_ROPE_TYPE_MROPE
        self._states = (_MRopeBatch if has_mrope else Batch)(options.batch_tokens, plan.sequences, row_size)

    def allocate(self, plan: ContextPlan) -> None:
        super().allocate(plan)
        library().llama_set_causal_attn(self._context, self._causal)
        if self._selects:
            nextn().switch(self._context, True, False)

    def compute(self, head_pass: HeadPass) -> HeadRows:
        """Run a pass of the head. See `HeadContext.compute`.

        A `prefill` pass reads only hidden states. A `draft` pass runs a block and reads only tokens. If the
        head has a path selector, the pass returns the `PathSelector`'s lattice in place of hidden states. The
        caller must then remove the block's keys and values.
        """
        none = np.empty((0, 0), np.float32)
        kind, tokens, inputs, positions, sequences = head_pass
        if kind == "prefill":
            self._states.put(inputs, positions, sequences, logits=False)
            self._decode(self._states)
            return HeadRows(none, none)
        logits = self.run(tokens, positions, sequences)
        return HeadRows(logits, self._lattice(len(tokens)) if self._selects else none)

    def _lattice(self, count: int) -> NDArray[np.float32]:
        """Return the candidates and scores for a block of `count` tokens. See `PathSelector`."""
        return copied_rows(nextn().address(self._context), count, library().llama_model_n_embd(self._model))

    def close(self) -> None:
        super().close()
        self._states.free()


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The layout of the blocks that a head drafts.

    A block consists of the last emitted token, followed by mask tokens. A pass over a block returns one row
    of logits per token.

    Attributes:
        tokens: Number of tokens in a block.
        mask_token: ID of the mask token.
        first_row: Index of the row that predicts the first draft token. It is 1 for DFlash heads, in which
            each mask token predicts the token at its own position. It is 0 for most DSpark heads, in which
            each token of the block predicts the next one.
        causal: Whether each token of a block attends only to earlier tokens, rather than to the whole block.
        has_markov: Whether the logits also depend on the previous draft token, as in DSpark heads.
        candidates: Number of candidates per draft token that the path selector of a DFlash 2 head chooses
            from. 0 for other heads.
    """

    tokens: int
    mask_token: int
    first_row: int
    causal: bool
    has_markov: bool
    candidates: int

    @property
    def draft_length(self) -> int:
        """Number of draft tokens per pass."""
        return self.tokens - self.first_row


def check_head_kind(path: Path) -> None:
    """Raise CapabilityError if edgespec does not support a GGUF file's kind of block-diffusion head."""
    if read_header(path).architecture_value("hyper_connection_count", 0):
        raise CapabilityError(
            f"{path} is a DeepSeek-V4 DSpark head, which edgespec cannot run",
            "choose a DFlash or DSpark head",
            code="head_not_supported",
        )


def read_block_shape(path: Path, vocab_size: int) -> BlockShape:
    """Read the layout of a head's blocks from its GGUF file.

    Args:
        path: The head's GGUF file.
        vocab_size: Number of tokens in the target's vocabulary.

    Raises:
        ModelFileError: The metadata is damaged, so running the head could make llama.cpp abort.
    """
    header = read_header(path)
    names = {tensor.name for tensor in header.tensors}
    has_markov, selects = "markov_w1.weight" in names, "selector_hidden.weight" in names
    shape = BlockShape(
        tokens=header.architecture_value("block_size", _DEFAULT_BLOCK_TOKENS),
        mask_token=header.metadata.get("tokenizer.ggml.mask_token_id", -1),
        first_row=0 if header.architecture_value("sample_from_anchor", has_markov) is True else 1,
        causal=header.architecture_value("attention.causal", False) is True,
        has_markov=has_markov,
        candidates=header.architecture_value("selector_top_k", 0) if selects else 0,
    )
    problem = _block_problem(header, shape, vocab_size) or _attention_problem(header)
    if problem:
        raise ModelFileError(
            f"the draft head {path} is damaged: {problem}", "download it again, or use --head none"
        )
    return shape


def _block_problem(header: GgufHeader, shape: BlockShape, vocab_size: int) -> str:
    if not (_is_int(shape.tokens) and 2 <= shape.tokens <= MAX_BLOCK_TOKENS):
        return f"its block_size must be from 2 to {MAX_BLOCK_TOKENS}, not {shape.tokens!r}"
    if shape.has_markov and header.architecture_value("block_size") is None:
        return "it has no block_size"
    if shape.candidates and (shape.has_markov or shape.first_row == 0):
        return "a DFlash 2 head cannot have a Markov head or draft from its first token"
    if not (_is_int(shape.mask_token) and 0 <= shape.mask_token < vocab_size):
        return (
            f"its mask token has the ID {shape.mask_token!r}, but its vocabulary has only {vocab_size:,}"
            " tokens"
        )
    return ""


def _attention_problem(header: GgufHeader) -> str:
    value = header.architecture_value
    for key in _SAME_IN_ALL_LAYERS:
        if not _is_int(value(key, 0)):
            return f"its {key} is not a whole number"
    heads, size = value("attention.head_count", 0), value("embedding_length", 0)
    kv_heads = value("attention.head_count_kv", heads)
    if not (heads > 0 and kv_heads > 0 and heads % kv_heads == 0):
        return f"its {heads:,} attention heads cannot share {kv_heads:,} key-value heads"
    keys = value("attention.key_length", size // heads)
    values = value("attention.value_length", size // heads)
    if keys != values:
        return f"its keys have length {keys:,}, but its values have length {values:,}"
    rotated = value("rope.dimension_count", keys)
    if rotated % 2 or not 0 < rotated <= keys:
        return (
            f"its rope.dimension_count must be an even number up to the key length of {keys:,}, not"
            f" {rotated:,}"
        )
    sections = np.atleast_1d(value("rope.dimension_sections", 0))
    if sections.dtype.kind not in "iu" or not all(0 <= int(section) <= keys for section in sections):
        return f"its rope.dimension_sections are not whole numbers from 0 to {keys:,}"
    return ""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class PathSelector:
    """The candidates for each draft token of a block, with scores that depend on the preceding candidate.

    llama.cpp computes the candidates and scores in the pass over the block. All other tokens get a logit of
    -inf.

    Args:
        lattice: One row per draft token: the ids of `count` candidates, followed by a matrix
            [candidates of the previous draft token, candidates] of scores. All rows of the first draft
            token's matrix are equal.
        count: Number of candidates per draft token.
        vocab_size: Number of tokens in the target's vocabulary.
    """

    def __init__(self, lattice: NDArray[np.float32], count: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._candidates = lattice[:, :count].astype(np.int64)
        self._scores = lattice[:, count : count + count * count].reshape(-1, count, count)
        # For each depth, the index of the candidate on the most likely path.
        self._path: list[int] = []
        for scores in self._scores:
            self._path.append(int(scores[self._path[-1] if self._path else 0].argmax()))

    def logits(self, token: int, depth: int) -> NDArray[np.float32]:
        """Return the logits [vocabulary] after `token`, given its depth below the block's first token.

        If `token` is not a candidate, the most likely candidate at that depth is used instead.
        """
        previous = 0
        if depth:
            found = np.flatnonzero(self._candidates[depth - 1] == token)
            previous = int(found[0]) if found.size else self._path[depth - 1]
        row = np.full(self._vocab_size, -np.inf, np.float32)
        row[self._candidates[depth]] = self._scores[depth, previous]
        return row


class MarkovHead:
    """The Markov head of a DSpark head: a table of logits for each possible previous token.

    The table is the product of two low-rank matrices, `markov_w1` and `markov_w2`. llama.cpp applies it only
    along the most likely draft, so this class computes the rows for all other drafts.

    Args:
        path: The head's GGUF file.
        vocab_size: Number of tokens in the target's vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        self._names = {tensor.name for tensor in read_header(path).tensors}
        self._inputs = FileMatrix(path, "markov_w1.weight")

    @cached_property
    def _outputs(self) -> NDArray[np.float32]:
        """The matrix `markov_w2` [draft vocabulary, rank].

        Loaded on first use, because greedy drafts usually match llama.cpp's own prediction and do not need
        it.
        """
        matrix = FileMatrix(self._path, "markov_w2.weight")
        outputs: NDArray[np.float32] = dequantize(matrix.stored(), matrix.kind).astype(np.float32)
        if "markov_w2.scale" in self._names:
            outputs *= FileMatrix(self._path, "markov_w2.scale").rows([0])
        return outputs

    @cached_property
    def _target_ids(self) -> NDArray[np.int64] | None:
        """The target's token for each draft token, or None if the head uses the target's vocabulary."""
        return FileMatrix(self._path, "d2t").stored().view(np.int64)[0] if "d2t" in self._names else None

    def logits(self, token: int) -> NDArray[np.float32]:
        """Return the logits [vocabulary] that the Markov head adds if `token` is the previous token."""
        logits: NDArray[np.float32] = self._outputs @ self._inputs.rows([token])[0]
        if self._target_ids is None:
            return logits
        result = np.zeros(self._vocab_size, np.float32)
        result[self._target_ids] = logits
        return result


class DFlashHead(HeadView[HeadTarget]):
    """A head with its own KV cache that predicts a block of tokens from the target's hidden states.

    The cache entry for position p is computed from the target's hidden states at p rather than from the token
    at p. A pass runs a block, which consists of the last emitted token and a mask token for each token to
    draft. The block itself leaves no entries in the cache.

    The logits after a draft token depend only on the token's position in the block, and on the token itself
    if there is a Markov head or a path selector. One pass is therefore enough for a whole draft tree:
    `verify` runs the pass for the root, and looks up the logits of deeper nodes in its result.
    """

    def __init__(self, shape: BlockShape, parts: HeadParts) -> None:
        options, self._shape, self._context = parts.file.options, shape, parts.context
        super().__init__(parts.target, parts.log, parts.release, LlamaHeadCells(parts.context, options))
        capabilities = Capabilities(
            rollback=True, tree=True, max_draft_length=shape.draft_length, drafts_in_one_pass=True
        )
        self.facts = describe_head(parts, capabilities)
        self._batch_tokens = options.batch_tokens
        self._markov = MarkovHead(parts.file.path, self.vocabulary.size) if shape.has_markov else None
        # For each row, the previous token that llama.cpp assumed when it added the Markov head's logits.
        self._assumed: list[int] = []
        self._keep(0)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        # The logits of the last block, one row per draft token.
        self._rows: NDArray[np.float32] = np.empty((0, self.vocabulary.size), np.float32)
        self._selector: PathSelector | None = None

    @property
    def free_tokens(self) -> int:
        # If the first row of a block is unused, the block needs one more position than it has draft tokens.
        return max(0, super().free_tokens - self._shape.first_row)

    @property
    def first_position(self) -> int:
        return self.log.start

    def _append(self, tokens: Sequence[int]) -> None:
        self._add_states(self.length, len(tokens))

    def _add_states(self, start: int, count: int) -> None:
        """Append keys and values for `count` tokens to the KV cache, starting at position `start`."""
        states = self.log.rows(start, start + count)
        self._context.compute(HeadPass.chain("prefill", [0] * count, states, start))

    def _run_tree(self, tree: TokenTree, first: int) -> HostLogits:
        """Return the logits of a tree's nodes, running a block first if `first` is 0.

        Nodes before the drafted block get the logits of the block's first token.
        """
        if first == 0:
            self._run_block(tree)
        depths = np.maximum(np.array(tree.depths[first:]) - self._known_nodes, 0)
        self._check_draft_length(int(depths.max()) + 1, len(self._rows))
        return HostLogits(self._rows_after(tree.tokens[first:], depths))

    def _run_block(self, tree: TokenTree) -> None:
        """Add the leading tree nodes with known hidden states to the cache, and run a block after them."""
        self._keep(self.length)
        known = self._known_nodes = min(max(self.log.end - self.length, 0), tree.width - 1)
        begin = self.length + known
        if known:
            self._add_states(self.length, known)
        count = min(self._shape.tokens, self._context.tokens - begin)
        block = [tree.tokens[known], *[self._shape.mask_token] * (count - 1)]
        rows = self._context.compute(HeadPass.chain("draft", block, np.empty((count, 0), np.float32), begin))
        self._context.drop(0, begin)
        self._rows = rows.logits[self._shape.first_row :]
        if self._shape.candidates:
            lattice = rows.states[self._shape.first_row :]
            self._selector = PathSelector(lattice, self._shape.candidates, self.vocabulary.size)
        if self._markov:
            self._assumed = [block[0], *self._rows[:-1].argmax(axis=1).tolist()]

    def _rows_after(self, tokens: Sequence[int], depths: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return one row of logits per token, given each token's depth below the first token of the block."""
        if self._selector:
            return np.stack([self._selector.logits(*node) for node in zip(tokens, depths, strict=True)])
        if self._markov:
            return np.stack([self._corrected(*node) for node in zip(tokens, depths, strict=True)])
        if (depths == depths[0]).all():
            # Return a view, because copying the row for every token would be slow for large vocabularies.
            return np.broadcast_to(self._rows[depths[0]], (len(depths), self._rows.shape[1]))
        rows: NDArray[np.float32] = self._rows[depths]
        return rows

    def _corrected(self, token: int, depth: int) -> NDArray[np.float32]:
        """Return the logits after `token`, replacing the Markov logits if llama.cpp assumed another token."""
        assert self._markov is not None
        row: NDArray[np.float32] = self._rows[depth]
        assumed = self._assumed[depth]
        if token == assumed:
            return row
        return row + (self._markov.logits(token) - self._markov.logits(assumed))


def load_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load a DFlash or DSpark head for a target. See `load_head_file`."""
    path = head.path
    assert path is not None
    check_head_kind(path)

    def make(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        layers = target_layers(target, weights, head.shown_path, library().llama_model_n_embd(weights))
        shape = read_block_shape(path, target.facts.vocab_size)
        # One branch is enough, because any draft tree takes only one pass over a single block.
        options = replace(options, max_branches=1, batch_tokens=_BATCH_TOKENS, max_logit_rows=shape.tokens)
        plan = plan_context(weights, options)

        def open_context(file: HeadFile, target: HeadTarget, row_size: int) -> BlockContext:
            return BlockContext(
                weights,
                options,
                file.plan_for(target),
                threads_for(weights, options),
                target=target.context,
                row_size=row_size,
                causal=shape.causal,
                selects=shape.candidates > 0,
            )

        make_view = partial(DFlashHead, shape)
        return HeadFile(weights, path, head.shown_path, name, options, plan, layers, open_context, make_view)

    return load_head_file(target, head, "dflash", "a DFlash head", make)


def estimate_head(head: Head, _target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate a head's memory use, converting the head to GGUF first if necessary. See `HeadNetwork`."""
    path = head.path
    assert path is not None
    if path.is_dir():
        files = read_dflash(path)
        config, elements = files.config, {name: math.prod(t.shape) for name, t in files.tensors.items()}
        return _estimate(
            context_tokens,
            weight_bytes=2 * sum(elements.values()),
            token_bytes=2 * 2 * config.layers * config.kv_heads * config.head_size,
            vocabulary=config.vocab_size,
            state_size=len(config.states) * config.size,
            is_reduced=files.target_ids is not None,
            markov_elements=elements.get("markov_head.markov_w2.weight", 0),
            block_tokens=config.block_tokens,
        )
    header, info = read_header(path), read_gguf_info(path)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    layers = np.size(header.architecture_value("target_layers", ()))
    return _estimate(
        context_tokens,
        weight_bytes=check_file(str(path)),
        token_bytes=info.kv_bytes,
        vocabulary=info.vocab_size,
        state_size=layers * header.architecture_number("embedding_length"),
        is_reduced="d2t" in shapes,
        markov_elements=math.prod(shapes.get("markov_w2.weight", (0,))),
        block_tokens=header.architecture_number("block_size"),
    )


def _estimate(
    context_tokens: int,
    *,
    weight_bytes: int,
    token_bytes: int,
    vocabulary: int,
    state_size: int,
    is_reduced: bool,
    markov_elements: int,
    block_tokens: int,
) -> MemoryEstimate:
    compute_bytes = _REDUCED_COMPUTE_BYTES if is_reduced else _COMPUTE_BYTES
    # llama.cpp sizes its buffers for a batch of two blocks, and includes the Markov head only if two blocks
    # fill the batch. Smaller blocks therefore need no memory for the Markov head.
    if markov_elements and 2 * block_tokens >= _BATCH_TOKENS:
        compute_bytes = _MARKOV_COMPUTE_BYTES
    return head_memory(
        context_tokens,
        # Add the float32 copy of `markov_w2` that `MarkovHead` makes.
        weight_bytes=weight_bytes + 4 * markov_elements,
        token_bytes=token_bytes,
        vocabulary=vocabulary,
        state_size=state_size,
        bytes_per_logit=compute_bytes,
        batch_tokens=_BATCH_TOKENS,
    )
