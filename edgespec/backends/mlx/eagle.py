"""Draft with an EAGLE head or an MTP layer, a small network that reads the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, ModelFacts, Progress, Snapshot
from edgespec.backends.base_model import in_batches
from edgespec.backends.hidden_state_log import HiddenStateLog
from edgespec.backends.memory_check import check_tokens_fit
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.cache_serialization import deserialize_head, serialize_head
from edgespec.backends.mlx.evaluation import evaluate, start_evaluation, translate_errors
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.pass_layout import PassLayout, install_tree_ropes
from edgespec.backends.mlx.target_ends import DraftVocabulary
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import BackendError, CancelledError, CapabilityError

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel

__all__ = ["BATCH_TOKENS", "EagleHead", "HeadNetwork"]

# Maximum number of tokens per pass. A pass cannot be interrupted.
BATCH_TOKENS = 64


class HeadNetwork(Protocol):
    """The layer of a head, which runs each token with the hidden state before it."""

    fc: Any
    """The matrix that combines the inputs, whose data type is that of the computation."""

    def reduced(self, states: mx.array) -> mx.array:
        """Return the hidden states [tokens, size] that the layer reads, given the target's."""

    def __call__(self, embeddings: mx.array, states: mx.array, cache: AttentionCache) -> mx.array:
        """Return the head's hidden states [tokens, size] for tokens and the hidden states before them."""

    def normalised(self, states: mx.array) -> mx.array:
        """Return the hidden states that the LM head reads, given those of the layer."""

    def fed_back(self, states: mx.array) -> mx.array:
        """Return the hidden states with which the layer runs the tokens that follow, given its own."""


class EagleHead(SelfDraftView["MlxModel"]):
    """A draft model with its own KV cache, which predicts from the target's hidden states.

    The token at position p is run with the target's hidden state at position p - 1. For drafted tokens, that
    does not exist yet, so the head uses its own. When the draft has been verified, `commit` removes them from
    the KV cache, and they are run again with the target's hidden states.

    Args:
        target: The target.
        log: A log of the target's hidden states that the head reads. The head closes it.
        network: The head, with evaluated weights.
        embed: Returns the embeddings of tokens.
        lm_head: Returns the logits [tokens, draft vocabulary] for normalised hidden states.
        target_ids: For each token of the draft vocabulary, the token of the target. None if they are equal.
    """

    def __init__(
        self,
        target: MlxModel,
        log: HiddenStateLog,
        network: HeadNetwork,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        target_ids: NDArray[np.int64] | None,
        facts: ModelFacts,
    ) -> None:
        super().__init__(target)
        self.log, self._network, self._embed, self._lm_head = log, network, embed, lm_head
        self._draft_vocabulary = DraftVocabulary(target_ids, target.facts.vocab_size)
        self._dtype = network.fc.weight.dtype
        self.vocabulary = target.vocabulary
        self.facts = replace(
            facts,
            capabilities=Capabilities(
                rollback=True,
                tree=target.facts.capabilities.tree,
                max_width=min(BATCH_TOKENS, target.facts.capabilities.max_width),
            ),
        )
        self._layout = PassLayout()
        install_tree_ropes(network, self._layout)
        self._interrupted = False
        self._clear(0)

    def _clear(self, position: int) -> None:
        """Empty the KV cache. Its first row will belong to the token at `position`."""
        self._cache = AttentionCache(self._layout)
        self._start = self._length = position
        self._end_round()

    def _end_round(self) -> None:
        """Discard the tree that is being run."""
        self._round = TreeBuilder()
        # The head's own hidden states [nodes, size] of each pass over the tree.
        self._own_states: list[mx.array] = []
        # Number of nodes of the tree that were run with hidden states of the target.
        self._known_nodes = 0
        self._cache.rewind(self._length - self._start)

    @property
    def length(self) -> int:
        return self._length

    @property
    def free_tokens(self) -> int:
        return max(0, self.facts.context_tokens - self._length)

    @property
    def first_position(self) -> int:
        """The first position at which a token can be run with a hidden state of the target."""
        return self.log.start + 1

    @property
    def last_position(self) -> int:
        """The last position at which a token can be run with a hidden state of the target."""
        return self.log.end

    def start_at(self, position: int) -> None:
        """Empty the KV cache, and let it begin at a position. Tokens before it are never run."""
        self._check()
        self._clear(position)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        check_tokens_fit(self, len(tokens))
        self._end_round()
        for batch in in_batches(tokens, BATCH_TOKENS, progress):
            self._check_not_interrupted()
            try:
                self._layout.set_chain(self._length - self._start)
                self._run(batch, self._target_states(self._length, len(batch)))
                evaluate(*self._cache.state)
            except BaseException:
                self._end_round()
                raise
            self._length += len(batch)

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            if tree.width > self.facts.capabilities.max_width:
                raise CapabilityError(
                    f"a draft of {tree.width} tokens exceeds the limit of"
                    f" {self.facts.capabilities.max_width} per pass",
                    "use a shorter --draft-length or fewer --draft-branches",
                )
            self._check_not_interrupted()
            if first == 0:
                self._end_round()
            self._round.extend(tree, first)
            own = []
            for begin, end in self._passes(tree, first):
                self._set_layout(begin, end)
                own.append(self._run(tree.tokens[begin:end], self._states_before(tree, begin, end)))
                self._own_states.append(own[-1])
            rows = self._logits(mx.concatenate(own))
            start_evaluation(rows, *own, *self._cache.state)
            return DeviceLogits(rows, self._round.depths[first:])
        except BaseException:
            self._end_round()
            raise

    def _passes(self, tree: TokenTree, first: int) -> list[tuple[int, int]]:
        """Return the ranges of nodes from `first` on that can be run together.

        The first range contains the tokens that follow hidden states of the target. A later node needs the
        head's own hidden state after its parent, so its parent must be in an earlier range.
        """
        begin, ranges = first, []
        if first == 0:
            # The root is run even before the target has run any tokens, to warm up.
            last = max(self.log.end, self._length)
            begin = self._known_nodes = sum(self._length + depth <= last for depth in self._round.depths)
            ranges.append((0, begin))
        while begin < tree.width:
            end = begin + 1
            while end < tree.width and tree.parents[end] < begin:
                end += 1
            ranges.append((begin, end))
            begin = end
        return ranges

    def _set_layout(self, begin: int, end: int) -> None:
        start, nodes = self._length - self._start, self._round
        if nodes.is_chain:
            self._layout.set_chain(start)
        else:
            self._layout.set_tree(start, nodes.parents[:end], nodes.depths[:end], begin)

    def _states_before(self, tree: TokenTree, begin: int, end: int) -> mx.array:
        """Return the hidden states before nodes: the target's if known, else the head's own."""
        if end <= self._known_nodes:
            return self._target_states(self._length + begin, end - begin)
        own = mx.concatenate(self._own_states)[mx.array(tree.parents[begin:end])]
        return self._network.fed_back(own)

    def _target_states(self, start: int, count: int) -> mx.array:
        """Return the target's reduced hidden states before each of `count` tokens."""
        rows = self.log.rows(start - 1, start - 1 + count)
        return self._network.reduced(mx.array(rows).astype(self._dtype))

    def _run(self, tokens: Sequence[int], states: mx.array) -> mx.array:
        """Run tokens with the hidden states before them. Return the head's own hidden states after them."""
        with translate_errors("the head could not be run"):
            return self._network(self._embed(mx.array(list(tokens))).astype(self._dtype), states, self._cache)

    def _logits(self, states: mx.array) -> mx.array:
        """Return the logits of the target's tokens. Those outside the draft vocabulary are -inf."""
        with translate_errors("the head could not be run"):
            rows = self._lm_head(self._network.normalised(states)).astype(mx.float32)
            return self._draft_vocabulary.spread(rows)

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep the tokens that were run with hidden states of the target."""
        self._check()
        self._length += self._known_nodes
        self._end_round()

    def truncate(self, length: int) -> None:
        self._check()
        self._length = min(length, self._length)
        self._start = min(self._start, self._length)
        self._end_round()

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the KV cache at positions [start, end). If it begins later, start there."""
        self._check()
        self._end_round()
        end = self._length if end is None else min(end, self._length)
        start = min(max(start, self._start), end)
        data = serialize_head([self._cache], self._start, start, end) if start < end else b""
        return Snapshot(end, data, start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check()
        self._end_round()
        start, end = snapshot.start, snapshot.length
        try:
            if not self._length == start <= end <= self.facts.context_tokens:
                raise BackendError(
                    f"the saved KV cache does not fit {self.facts.name}", "process the prompt again"
                )
            if start < end:
                deserialize_head([self._cache], self._start, start, snapshot.data)
        except BackendError:
            self._clear(0)
            raise
        self._length = end
        self._end_round()

    def interrupt(self, enabled: bool) -> None:
        self._interrupted = enabled

    def _check_not_interrupted(self) -> None:
        if self._interrupted:
            raise CancelledError("the model's computation was cancelled")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._target.stop_logging(self.log)
        self._own_states = []
        del self._network, self._cache, self._embed, self._lm_head, self._draft_vocabulary
