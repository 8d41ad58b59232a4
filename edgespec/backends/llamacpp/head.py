"""The base class for heads with a KV cache of their own, which run tokens with the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LoadOptions, Progress
from edgespec.backends.base_model import in_batches
from edgespec.backends.hidden_state_log import MAX_LOGGED_TOKENS, HiddenStateLog
from edgespec.backends.llamacpp.context import ContextPlan
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.loading import describe
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.resizing import check_resize_fits, rebuild_context
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ContextFullError,
    MemoryBudgetError,
    ModelFileError,
)

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.model import LlamaCppModel

__all__ = ["PairHead", "check_finite", "check_sizes", "estimate_head", "head_options"]

# Maximum number of tokens per pass of a head. Its buffers grow with this number and with the vocabulary.
_BATCH_TOKENS = 64


def head_options(target: LlamaCppModel) -> LoadOptions:
    """Return the load options of a head, given its target."""
    options = target.options
    memory_bytes = options.memory_bytes
    if memory_bytes is not None:
        memory_bytes = max(0, memory_bytes - target.facts.weight_bytes - target.facts.max_kv_bytes)
    return replace(
        options.for_draft(),
        context_tokens=target.max_plan.tokens,
        choose_context_tokens=None,
        memory_bytes=memory_bytes,
        batch_tokens=_BATCH_TOKENS,
        max_logit_rows=_BATCH_TOKENS,
        kv_type="auto",
    )


def check_sizes(target: LlamaCppModel, path: Path, sizes: Sequence[tuple[str, int, int]]) -> None:
    """Raise CapabilityError if a size of a head differs from its target's.

    Args:
        target: The target.
        path: The head's file, for the message.
        sizes: What has the size, such as `vocabularies`, the target's size, and the size that the head needs.
    """
    for what, own, needed in sizes:
        if own != needed:
            raise CapabilityError(
                f"the head {path} was made for another target: it needs {what} of size {needed:,}, but those"
                f" of {target.facts.name} have {own:,}",
                "choose the head that was published for this target",
            )


def check_finite(head: PairHead, path: Path) -> None:
    """Run a token. Raise ModelFileError if its logits are not numbers."""
    logits = head.verify(TokenTree.chain(0)).at(0, np.arange(head.facts.vocab_size))
    head.truncate(0)
    # Tokens outside the head's own vocabulary have the logit -inf.
    if np.isnan(logits).any() or not np.isfinite(logits).any():
        raise ModelFileError(
            f"the head {path} is damaged: its logits are not finite", "download it again, or omit --head"
        )


def estimate_head(
    context_tokens: int,
    *,
    weight_bytes: int,
    token_bytes: int,
    vocabulary: int,
    state_size: int,
    bytes_per_logit: int,
) -> MemoryEstimate:
    """Return the memory used by a head and by the hidden states that are kept for it.

    Args:
        context_tokens: The size of the head's KV cache.
        weight_bytes: The size of the weights that are loaded for the head.
        token_bytes: The size of one KV cell.
        vocabulary: The number of tokens in the head's vocabulary.
        state_size: The number of values that are kept per token of the target.
        bytes_per_logit: Approximate size of the compute buffer, per token of a batch and per token of the
            vocabulary.
    """
    hidden_bytes = MAX_LOGGED_TOKENS * state_size * 4
    return MemoryEstimate(
        context_tokens,
        "f16",
        (
            MemoryPart("weights", weight_bytes),
            MemoryPart("cache", token_bytes * context_tokens),
            MemoryPart("compute", _BATCH_TOKENS * vocabulary * bytes_per_logit + hidden_bytes),
            MemoryPart("output", _BATCH_TOKENS * vocabulary * 4),
        ),
    )


class PairHead(SelfDraftView["LlamaCppModel"]):
    """A draft model with its own KV cache, which predicts from tokens and the target's hidden states.

    The token at position p is run with the target's hidden state at position p - 1. For drafted tokens, that
    does not exist yet, so the head uses its own. When the draft has been verified, `commit` removes their KV
    cells, and they are run again with the target's hidden states.

    Args:
        target: The target.
        weights: The llama_model handle that contains the head.
        path: The head's file.
        options: See `head_options`.
        name: The head's name, for messages.
        context: Runs the head.
        log: The target's hidden states that the head reads.
        max_plan: The size of the head's KV cache at the target's maximum context length.
    """

    def __init__(
        self,
        target: LlamaCppModel,
        weights: Any,
        path: str,
        options: LoadOptions,
        name: str,
        context: HeadContext,
        log: HiddenStateLog,
        max_plan: ContextPlan,
    ) -> None:
        super().__init__(target)
        self._options, self._context, self._log = options, context, log
        self.vocabulary = target.vocabulary
        self._cells = KvCells(context, options.max_branches)
        # The head's own hidden states after each node of the tree that is being run.
        self._own_states: list[NDArray[np.float32]] = []
        # Number of nodes of that tree that were run with hidden states of the target.
        self._known_nodes = 0
        capabilities = Capabilities(
            rollback=True,
            tree=options.max_branches > 1,
            max_width=context.max_width,
            max_branches=options.max_branches,
        )
        facts = describe(
            weights, path, name, max_plan, self.vocabulary, ProbeResult(capabilities, "in place")
        )
        self.facts = replace(
            facts,
            context_tokens=context.plan.tokens,
            kv_bytes=context.plan.kv_bytes,
            vocab_size=self.vocabulary.size,
            notice="",
        )

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def free_tokens(self) -> int:
        return max(0, self._context.tokens - self.length)

    @property
    def threads(self) -> int:
        return self._context.threads

    @property
    def first_position(self) -> int:
        """The first position at which a token can be run with a hidden state of the target."""
        return self._log.start + 1

    @property
    def last_position(self) -> int:
        """The last position at which a token can be run with a hidden state of the target."""
        return self._log.end

    def start_at(self, position: int) -> None:
        """Empty the KV cache, and let it begin at a position. Tokens before it are never run."""
        self._check()
        self._context.clear()
        self._cells.clear_round()
        self._cells.length = position

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        check_tokens_fit(self, len(tokens))
        self._cells.end_round()
        for batch in in_batches(tokens, _BATCH_TOKENS, progress):
            start = self.length
            positions = range(start, start + len(batch))
            try:
                states = self._target_states(start, len(batch))
                self._context.run_pairs(batch, states, positions, [(0,)] * len(batch), logits=False)
            except (BackendError, ContextFullError, CancelledError):
                self._cells.truncate(start)
                raise
            self._cells.length += len(batch)

    @abstractmethod
    def _target_states(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the hidden states before `count` tokens from position `start` on, as the head reads them."""

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            if tree.width > self.facts.capabilities.max_width:
                raise CapabilityError(
                    f"a draft of {tree.width} tokens exceeds the limit of"
                    f" {self.facts.capabilities.max_width} per pass",
                    "use a shorter --draft-length or fewer --draft-branches",
                )
            if first == 0:
                self._cells.end_round()
                self._own_states = []
            positions, sequences = self._cells.place_tree(tree, first)
            states = self._states_before(tree, first, positions)
            logits = self._context.run_pairs(tree.tokens[first:], states, positions, sequences)
            self._own_states.extend(self._context.last_states(len(positions)))
            return HostLogits(logits)
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise

    def _states_before(self, tree: TokenTree, first: int, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return the hidden states before the tree's nodes: the target's if known, else the head's own."""
        known = 0
        if first == 0:
            # The root is run even before the target has run any tokens, to warm up.
            last = max(self._log.end, positions[0])
            known = self._known_nodes = sum(position <= last for position in positions)
        own = [self._own_states[tree.parents[first + node]] for node in range(known, len(positions))]
        return np.array([*(self._target_states(positions[0], known) if known else ()), *own])

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep the tokens that were run with hidden states of the target."""
        self._check()
        if self._known_nodes:
            self._cells.commit(tuple(range(1, self._known_nodes)))
        self._cells.end_round()

    def truncate(self, length: int) -> None:
        self._check()
        self._cells.truncate(min(length, self.length))

    def resized(self) -> None:
        """Resize the head's context to match the target's, or keep its size if memory is short."""
        tokens = self._target.facts.context_tokens
        if not tokens:
            # The target lost its KV cache. The head's is allocated again together with the target's.
            self._cells.length = 0
            self._context.release()
            return
        before = self._context.plan
        plan = before.with_tokens(tokens)
        try:
            check_resize_fits([before], [plan], self.facts.weight_bytes, self._options)
        except MemoryBudgetError:
            plan = before
        try:
            length = min(self.length, plan.tokens)
            self._cells.truncate(length)
            rebuild_context(self._context, plan, length)
        except (MemoryBudgetError, BackendError):
            self._cells.length = 0
        self.facts = replace(
            self.facts, context_tokens=self._context.plan.tokens, kv_bytes=self._context.plan.kv_bytes
        )

    def interrupt(self, enabled: bool) -> None:
        self._context.interrupt.requested = enabled

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._target.stop_logging()
        self._context.close()
        self._free_weights()

    @abstractmethod
    def _free_weights(self) -> None:
        """Free the weights that were loaded for this head."""
