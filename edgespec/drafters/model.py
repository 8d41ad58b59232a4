"""Draft chains or trees with a separate draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import takewhile
from time import perf_counter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel
from edgespec.backends.model_facts import Capabilities
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.drafters.base import BudgetedDrafter, MemoryUse, check_rollback
from edgespec.drafters.draft_cache import DraftCache, is_confident, replace_unknown_ids, top_probs
from edgespec.drafters.tree_growth import FixedShape, TreeGrowth
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.distribution import Distribution
from edgespec.engine.logits import Logits
from edgespec.engine.prefix import common_prefix_length
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree, TreeBuilder

__all__ = ["ModelDrafter"]

_WARM_UP_TOKENS = 16
_NO_PROBS: NDArray[np.float64] = np.zeros(0)


class ModelDrafter(BudgetedDrafter):
    """Drafts with a language model, as in Leviathan et al. 2023 (arXiv 2211.17192).

    The model is either a separate draft model, or a view of the target that runs only part of it
    (`self_draft`). Tree drafting follows SpecInfer (arXiv 2305.09781).

    Args:
        model: The draft model.
        vocab_size: Vocabulary size of the target. Token ids outside it are never drafted.
        branches: Number of children per node at each depth, such as (3, 2). Deeper nodes have one child, so
            an empty tuple drafts chains. Alternatively, a `TreeGrowth` that chooses the shape of each tree,
            and that no other drafter uses.
        min_confidence: Drafting stops after a token with a lower probability. The token itself is kept,
            because removing it would bias rejection sampling.
        name: Name of the drafter shown in reports.
        cache: The model's KV cache, if it is shared.

    Raises:
        CapabilityError: The model does not support rollback.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        *,
        branches: tuple[int, ...] | TreeGrowth = (),
        min_confidence: float = 0.0,
        name: str = "model",
        cache: DraftCache | None = None,
    ) -> None:
        check_rollback(model)
        self.name = name
        self._model = model
        self._vocab_size = min(vocab_size, model.facts.vocab_size)
        self._min_confidence = min_confidence
        self.cache = cache or DraftCache(model)
        # Views of the target run each drafted token with the states of the one before.
        self.drafts_after_forced = not isinstance(model, SelfDraftView)
        self._tree: _DraftTree | None = None
        # Tokens that the last draft assumed to come before its own.
        self._forced: tuple[int, ...] = ()
        if isinstance(branches, tuple):
            branches = FixedShape(branches if model.facts.capabilities.tree else ())
        self._set_growth(branches)

    def _set_growth(self, growth: TreeGrowth) -> None:
        self._growth, self.chooses_length = growth, growth.chooses_length

    def with_growth(self, make_growth: Callable[[Capabilities], TreeGrowth]) -> Self:
        other = copy(self)
        other._set_growth(make_growth(self._model.facts.capabilities))
        return other

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse.of(self._model.facts)

    def begin(self, tokens: Sequence[int]) -> None:
        """See `Drafter.begin`. New tokens are prefilled only when the next draft is requested."""
        self._tree = None
        self.cache.begin(tokens)

    @property
    def pending_tokens(self) -> int:
        return self.cache.pending_tokens

    @property
    def full_pending_tokens(self) -> int:
        return self.cache.full_pending_tokens

    def prefill(self, max_tokens: int) -> None:
        self.cache.prefill(max_tokens)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        return self._growth.saved_statistics()

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._growth.restore_statistics(saved)

    def warm_up(self) -> None:
        if self._model.length:
            return
        tokens = [0] * min(_WARM_UP_TOKENS, self._model.free_tokens - 1)
        # Measure the second time, because a backend's first passes are slow.
        for _ in range(2):
            started = perf_counter()
            self._model.prefill(tokens)
            prefilled = perf_counter()
            self._model.verify(TokenTree.chain(0)).at(0, np.array([0]))
            self.pass_seconds = perf_counter() - prefilled
            self.prefill_token_seconds = (prefilled - started) / len(tokens)
            self._model.truncate(0)

    def force_draft(self) -> None:
        self._growth.force_draft()

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        return self._draft((), sampler, acceptance, draft_length)

    def propose_after(
        self, forced: Sequence[int], sampler: Sampler, acceptance: Acceptance, draft_length: int
    ) -> TokenTree:
        if self._model.vocabulary.is_end(forced[-1]):
            return TokenTree.chain(forced[-1])
        for token in forced:
            sampler.push(token)
        try:
            return self._draft(tuple(forced), sampler, acceptance, draft_length)
        finally:
            sampler.pop(len(forced))

    def _draft(
        self, forced: tuple[int, ...], sampler: Sampler, acceptance: Acceptance, draft_length: int
    ) -> TokenTree:
        cache = self.cache
        if cache.pending_tokens:
            cache.prefill()
        last = forced[-1] if forced else cache.visible_tokens[-1]
        capabilities = self._model.facts.capabilities
        draft_length = min(draft_length, capabilities.max_draft_length)
        max_width = min(self._model.free_tokens, capabilities.max_width)
        if not cache.can_draft(max_width) or cache.lag_tokens + len(forced) > max_width:
            return TokenTree.chain(last)
        if not self._growth.begin_round(draft_length):
            return TokenTree.chain(last)
        self._forced = forced
        lag = replace_unknown_ids(self._model, [*cache.visible_tokens[self._model.length :], *forced])
        tree = self._tree = _DraftTree(last, lag)
        is_fixed_chain = self._growth.drafts_chains and not self.chooses_length
        frontier = [0]
        for depth in range(draft_length):
            first, tree.model_tree_run = tree.model_tree_run, len(tree.model_tree)
            self._model.run_ahead(is_fixed_chain and depth + 1 < draft_length)
            logits = self._model.verify(tree.model_tree.build(), first).limit_vocab(self._vocab_size)
            frontier = self._grow(tree, frontier, first, logits, sampler, acceptance)
            if not frontier or len(tree.model_tree) > max_width:
                break
        self._growth.finish_draft()
        return tree.build(self._growth.drafts_chains)

    def _grow(
        self,
        tree: _DraftTree,
        frontier: list[int],
        first: int,
        logits: Logits,
        sampler: Sampler,
        acceptance: Acceptance,
    ) -> list[int]:
        rows = [tree.model_nodes[node] - first for node in frontier]
        probs = [_NO_PROBS] * len(rows)

        def draft_probs(i: int) -> NDArray[np.float64]:
            probs[i] = np.sort(top_probs(logits, rows[i])[1])[::-1]
            return probs[i]

        expandable = []
        levels = self._growth.grow_level([tree.path_probs[node] for node in frontier], draft_probs)
        for i, (path_probs, expand_count) in enumerate(levels):
            node, row = frontier[i], rows[i]
            path = tree.drafted.path(node)
            for ancestor in path:
                sampler.push(tree.drafted.tokens[ancestor])
            draws = acceptance.draw(sampler, logits, row, max(len(path_probs), self._growth.siblings))
            sampler.pop(len(path))
            tree.draws[node] = probs[i], [token for token, _ in draws]
            for rank, ((token, distribution), path_prob) in enumerate(zip(draws, path_probs, strict=False)):
                child = tree.add(node, token, distribution, path_prob, rank < expand_count)
                if (
                    rank < expand_count
                    and not self._model.vocabulary.is_end(token)
                    and is_confident(logits, row, token, self._min_confidence)
                ):
                    expandable.append(child)
        return expandable

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._tree:
            self._growth.record_verify_pass(tree.width)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """See `Drafter.commit`. Tokens missing from the KV cache are run when the next draft is made."""
        if (tree := self._tree) and tree.model_tree_run:
            # The last emitted token is not part of the KV cache.
            missing = len(self._forced) - common_prefix_length(self._forced, tokens[:-1])
            if missing:
                self._model.commit(tree.path_without(missing))
            else:
                self._commit_draft(tree, tokens[len(self._forced) :])
        self._tree = None
        self.cache.extend(tokens)

    def _commit_draft(self, tree: _DraftTree, tokens: tuple[int, ...]) -> None:
        nodes = tree.drafted.build().walk(tokens)
        self._model.commit(tree.model_path(nodes[1 : len(tokens)]))
        for node, token in zip(nodes, tokens, strict=False):
            if node not in tree.draws:
                break
            probs, drawn = tree.draws[node]
            self._growth.record_outcome(probs, drawn.index(token) if token in drawn else None)

    def reset(self) -> None:
        self._model.truncate(0)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._model.close()


class _DraftTree:
    """A draft tree under construction, and the part of it that the draft model runs.

    The draft model runs the tokens missing from its KV cache, followed by the nodes to expand. It does not
    run leaves.

    Args:
        last_token: The last emitted token, which is the root of the draft.
        lag: Tokens to run first because they are missing from the draft model's KV cache, ending with
            `last_token`.

    Attributes:
        drafted: The draft tree. Node 0 is the root.
        path_probs: For each drafted node, the estimated probability that it and all its ancestors are
            accepted.
        model_tree: The tree that the draft model runs. It consists of `lag` and the nodes to expand.
        model_tree_run: Number of nodes in `model_tree` that the model has run.
        model_nodes: For each drafted node, the corresponding node in `model_tree`, or -1 if it is not
            expanded.
        draws: For each expanded node, the draft model's highest next-token probabilities, and the tokens
            drawn from them.
    """

    def __init__(self, last_token: int, lag: Sequence[int]) -> None:
        self.drafted = TreeBuilder([last_token])
        self.path_probs = [1.0]
        self.model_tree = TreeBuilder(lag)
        self.model_tree_run = 0
        self.model_nodes = [len(lag) - 1]
        self.draws: dict[int, tuple[NDArray[np.float64], list[int]]] = {}
        self._lag_tokens = len(lag)

    def add(
        self, parent: int, token: int, probs: Distribution | None, path_prob: float, expands: bool
    ) -> int:
        """Add a drafted token and return the index of its node."""
        self.model_nodes.append(self.model_tree.add(self.model_nodes[parent], token) if expands else -1)
        self.path_probs.append(path_prob)
        return self.drafted.add(parent, token, probs)

    def path_without(self, missing: int) -> tuple[int, ...]:
        """Return the path that the draft model commits if the last `missing` tokens of `lag` are rejected."""
        return tuple(range(1, self._lag_tokens - missing))

    def model_path(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the path that the draft model commits when the target accepts `nodes`."""
        has_run = takewhile(lambda node: 0 <= self.model_nodes[node] < self.model_tree_run, nodes)
        return (*range(1, self._lag_tokens), *(self.model_nodes[node] for node in has_run))

    def build(self, block: bool) -> TokenTree:
        """Return the draft tree. Nodes that the draft model has processed come first.

        For these nodes, a target that shares layers with the draft model can reuse the model's results.
        """
        order = sorted(range(len(self.drafted)), key=lambda node: self.model_nodes[node] < 0)
        return self.drafted.build(block).subtree(order)
