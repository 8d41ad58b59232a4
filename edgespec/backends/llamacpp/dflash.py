"""Draft with a DFlash or DSpark head, which predicts a block of tokens in one pass (arXiv 2602.06036)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LoadOptions
from edgespec.backends.gguf_header import read_header
from edgespec.backends.gguf_metadata import read_gguf_info
from edgespec.backends.llamacpp.block_context import BlockContext
from edgespec.backends.llamacpp.block_shape import BlockShape, check_head_kind, read_block_shape
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.head import CachedHead
from edgespec.backends.llamacpp.head_context import HeadPass
from edgespec.backends.llamacpp.head_file import HeadFile, HeadParts, HeadWeights
from edgespec.backends.llamacpp.head_loading import estimate_head, load_head_file, target_layers
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.loading import check_file, threads_for
from edgespec.backends.llamacpp.markov_head import MarkovHead
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.path_selector import PathSelector
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.memory_estimate import MemoryEstimate
from edgespec.backends.model_facts import Capabilities
from edgespec.backends.self_draft_methods import Head
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, ContextFullError
from edgespec.heads.dflash_config import MAX_BLOCK_TOKENS
from edgespec.heads.dflash_files import read_dflash

__all__ = ["DFlashHead", "estimate_dflash_head", "load_dflash_head"]

# Maximum number of tokens per pass. It is small because compute buffers grow with it and the vocabulary size.
_BATCH_TOKENS = MAX_BLOCK_TOKENS
# Approximate size of the compute buffer in bytes, per token of a batch and per token of the vocabulary: for
# most heads, for heads with a reduced draft vocabulary, and for heads with a Markov head and large blocks.
_COMPUTE_BYTES, _REDUCED_COMPUTE_BYTES, _MARKOV_COMPUTE_BYTES = 4, 8, 17


class DFlashHead(CachedHead):
    """A draft model with its own KV cache, which predicts a block of tokens from the target's hidden states.

    The cache entry for position p is computed from the target's hidden states at p rather than from the token
    at p. A pass runs a block, which consists of the last emitted token and a mask token for each token to
    draft. The block itself leaves no entries in the cache.

    The logits after a draft token depend only on the token's position in the block, and on the token itself
    if there is a Markov head or a path selector. One pass is therefore enough for a whole draft tree:
    `verify` runs the pass for the root, and looks up the logits of deeper nodes in its result.
    """

    def __init__(self, shape: BlockShape, parts: HeadParts) -> None:
        self._shape = shape
        capabilities = Capabilities(
            rollback=True, tree=True, max_draft_length=shape.draft_length, drafts_in_one_pass=True
        )
        super().__init__(parts, capabilities)
        self._markov = MarkovHead(parts.weights.path, self.vocabulary.size) if shape.has_markov else None
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
        """Append keys and values for `count` tokens from position `start` on to the KV cache."""
        states = self.log.rows(start, start + count)
        self._context.compute(HeadPass.chain("prefill", [0] * count, states, start))

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        """See `LanguageModel.verify`. Nodes before the drafted block get the logits of its first token."""
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            if first == 0:
                self._run_block(tree)
            depths = np.maximum(np.array(tree.depths[first:]) - self._known_nodes, 0)
            self._check_draft_length(int(depths.max()) + 1, len(self._rows))
            return HostLogits(self._rows_after(tree.tokens[first:], depths))
        except (BackendError, ContextFullError, CancelledError):
            self._keep(self.length)
            raise

    def _run_block(self, tree: TokenTree) -> None:
        """Add the known hidden states of the tree's first nodes to the cache, and run a block after them."""
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
            # Return a view, because copying the row for each token would be slow for large vocabularies.
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


def load_dflash_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load a DFlash or DSpark head for a target. See `load_head_file`."""
    path = head.path
    assert path is not None
    check_head_kind(path)

    def make(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        layers = target_layers(target, weights, head.shown_path, library().llama_model_n_embd(weights))
        shape = read_block_shape(path, target.facts.vocab_size)
        # One branch is enough, because a draft tree needs only one pass over a single block.
        options = replace(options, max_branches=1, batch_tokens=_BATCH_TOKENS, max_logit_rows=shape.tokens)
        plan, free = plan_context(weights, options), partial(library().llama_model_free, weights)
        found = HeadWeights(weights, path, name, options, plan, free, head.shown_path)

        def open_context(target: HeadTarget, row_size: int) -> BlockContext:
            return BlockContext(
                weights,
                options,
                found.plan_for(target),
                threads_for(weights, options),
                target=target.context,
                row_size=row_size,
                causal=shape.causal,
                selects=shape.candidates > 0,
            )

        return HeadFile(found, layers, open_context, partial(DFlashHead, shape))

    return load_head_file(target, head, "dflash", "a DFlash head", make)


def estimate_dflash_head(path: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate the memory for a head, including the log of hidden states that it reads.

    Args:
        path: The head's GGUF file, or a folder with a head that will be converted to GGUF.
        context_tokens: The size of the head's KV cache.

    Raises:
        ModelFileError: The file is missing or damaged.
    """
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
    # llama.cpp sizes its buffers for a batch of two blocks. It includes the Markov head only if two blocks
    # fill the batch, so heads with smaller blocks need no memory for it.
    if markov_elements and 2 * block_tokens >= _BATCH_TOKENS:
        compute_bytes = _MARKOV_COMPUTE_BYTES
    return estimate_head(
        context_tokens,
        # Add the float32 copy of `markov_w2` that `MarkovHead` makes.
        weight_bytes=weight_bytes + 4 * markov_elements,
        token_bytes=token_bytes,
        vocabulary=vocabulary,
        state_size=state_size,
        bytes_per_logit=compute_bytes,
        batch_tokens=_BATCH_TOKENS,
    )
