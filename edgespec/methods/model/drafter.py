"""Draft chains or trees with a separate draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import takewhile
from time import perf_counter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Distribution, Sampler
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.methods.base import Drafter, DrafterMemory, ForcedDraft, check_rollback
from edgespec.methods.constants import MAX_FORCED_TOKENS, WARM_UP_TOKENS
from edgespec.methods.draft_cache import DraftCache, is_confident, replace_unknown_ids, top_probs
from edgespec.methods.tree_growth import FixedShape, TreeGrowth
from edgespec.model.base import LanguageModel
from edgespec.model.base_model import SelfDraftView
from edgespec.model.model_facts import Capabilities

__all__ = ["ModelDrafter"]

_NO_PROBS: NDArray[np.float64] = np.zeros(0)


class ModelDrafter(Drafter):
    """Drafts with a language model, as in Leviathan et al. 2023 (arXiv 2211.17192).

    The model is either a separate draft model, or a view of the target that runs only part of it
    (`self_draft`). Tree drafting follows SpecInfer (arXiv 2305.09781).

    Args:
        model: The draft model.
        vocab_size: Vocabulary size of the target. Token ids outside it are never drafted.
        branches: Number of children per node at each depth, such as (3, 2). Deeper nodes have one child, so
            an empty tuple drafts chains. Alternatively, a `TreeGrowth` that chooses the shape of each tree
            and is not shared with other drafters.
        min_confidence: Drafting stops after a token whose probability is below this. The token itself is
            kept, because removing it would bias rejection sampling.
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
        # A self-draft view cannot run several drafted tokens in one pass, because each token needs its
        # predecessor's hidden state.
        self.drafts_forced = not isinstance(model, SelfDraftView)
        self._tree: _DraftTree | None = None
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
    def memory_use(self) -> DrafterMemory:
        return DrafterMemory.of(self._model.facts)

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
        tokens = [0] * min(WARM_UP_TOKENS, self._model.free_tokens - 1)
        # Use only the second measurement, because a backend's first passes are slow.
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
        return self._draft(sampler, acceptance, draft_length, max_forced_tokens=0).tree

    def propose_with_forced(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> ForcedDraft:
        limit = MAX_FORCED_TOKENS if self.drafts_forced else 0
        return self._draft(sampler, acceptance, draft_length, max_forced_tokens=limit)

    def _draft(
        self, sampler: Sampler, acceptance: Acceptance, draft_length: int, max_forced_tokens: int
    ) -> ForcedDraft:
        cache = self.cache
        if cache.pending_tokens:
            cache.prefill()
        last = cache.visible_tokens[-1]
        capabilities = self._model.facts.capabilities
        draft_length = min(draft_length, capabilities.max_draft_length)
        max_width = min(self._model.free_tokens, capabilities.max_width)
        if not cache.can_draft(max_width) or not self._growth.begin_round(draft_length):
            return ForcedDraft(TokenTree.chain(last))
        lag = replace_unknown_ids(self._model, cache.visible_tokens[self._model.length :])
        tree = self._tree = _DraftTree(last, lag, max_width, max_forced_tokens)
        is_fixed_chain = self._growth.drafts_chains and not self.chooses_length
        start = self._add_forced(tree, 0, sampler)
        tree.max_depth = tree.drafted.depths[start] + draft_length
        frontier = [start] if tree.can_expand(start) and not self._is_end(tree, start) else []
        while frontier and len(tree.model_tree) <= max_width:
            first, tree.model_tree_run = tree.model_tree_run, len(tree.model_tree)
            depth = tree.drafted.depths[frontier[0]]
            self._model.run_ahead(is_fixed_chain and depth + 1 < tree.max_depth)
            logits = self._model.verify(tree.model_tree.build(), first).limit_vocab(self._vocab_size)
            frontier = self._grow(tree, frontier, first, logits, sampler, acceptance)
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
            depth = tree.push_path(node, sampler)
            try:
                draws = acceptance.draw(sampler, logits, row, max(len(path_probs), self._growth.siblings))
            finally:
                sampler.pop(depth)
            tree.draws[node] = probs[i], [token for token, _ in draws]
            for rank, ((token, distribution), path_prob) in enumerate(zip(draws, path_probs, strict=False)):
                child = tree.add(node, token, distribution, path_prob, rank < expand_count)
                if rank < expand_count and is_confident(logits, row, token, self._min_confidence):
                    end = self._add_forced(tree, child, sampler)
                    if tree.can_expand(end) and not self._is_end(tree, end):
                        expandable.append(end)
        return expandable

    def _is_end(self, tree: _DraftTree, node: int) -> bool:
        return self._model.vocabulary.is_end(tree.drafted.tokens[node])

    def _add_forced(self, tree: _DraftTree, node: int, sampler: Sampler) -> int:
        """Add the tokens that a constraint determines after `node`. Return the last added node, or `node`."""
        limit = min(tree.max_forced_tokens, tree.max_width - len(tree.model_tree))
        if limit > 0 and tree.can_expand(node):
            depth = tree.push_path(node, sampler)
            try:
                forced = sampler.forced_tokens(limit)
            finally:
                sampler.pop(depth)
            for token in forced:
                node = tree.add_forced(node, token)
        return node

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._tree:
            self._growth.record_verify_pass(tree.width)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """See `Drafter.commit`. Tokens missing from the KV cache are run with the next draft."""
        if (tree := self._tree) and tree.model_tree_run:
            nodes = tree.drafted.build().walk(tokens)
            # Exclude the last emitted token, which is not in the KV cache.
            self._model.commit(tree.model_path(nodes[1 : len(tokens)]))
            for node, token in zip(nodes, tokens, strict=False):
                if node in tree.draws:
                    probs, drawn = tree.draws[node]
                    self._growth.record_outcome(probs, drawn.index(token) if token in drawn else None)
        self._tree = None
        self.cache.extend(tokens)

    def reset(self) -> None:
        self._model.truncate(0)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._model.close()


class _DraftTree:
    """A draft tree under construction, and the part of it that the draft model runs.

    The draft model processes the tokens missing from its KV cache, followed by the nodes to expand. Leaves
    are skipped.

    Args:
        last_token: The last emitted token, which is the root of the draft.
        lag: Tokens to run first because they are missing from the draft model's KV cache, ending with
            `last_token`.
        max_width: Maximum number of tokens in a pass of the draft model.
        max_forced_tokens: Maximum number of consecutive tokens to add because a constraint determines them.

    Attributes:
        drafted: The draft tree. Node 0 is the root.
        path_probs: For each drafted node, the estimated probability that it and all its ancestors are
            accepted.
        model_tree: The tree that the draft model runs. It consists of `lag` and the nodes to expand.
        model_tree_run: Number of nodes in `model_tree` that the model has run.
        model_nodes: For each drafted node, the corresponding node in `model_tree`, or -1 if it is not
            expanded.
        draws: For each expanded node, the draft model's highest next-token probabilities, and the tokens
            sampled from them.
        forced: The drafted nodes whose tokens a constraint determines.
        max_depth: Maximum depth of a sampled node.
    """

    def __init__(self, last_token: int, lag: Sequence[int], max_width: int, max_forced_tokens: int) -> None:
        self.max_width, self.max_forced_tokens = max_width, max_forced_tokens
        self.drafted = TreeBuilder([last_token])
        self.path_probs = [1.0]
        self.model_tree = TreeBuilder(lag)
        self.model_tree_run = 0
        self.model_nodes = [len(lag) - 1]
        self.draws: dict[int, tuple[NDArray[np.float64], list[int]]] = {}
        self.forced: set[int] = set()
        self.max_depth = 1
        self._lag_tokens = len(lag)

    def add(
        self, parent: int, token: int, probs: Distribution | None, path_prob: float, expands: bool
    ) -> int:
        """Add a drafted token and return the index of its node."""
        self.model_nodes.append(self.model_tree.add(self.model_nodes[parent], token) if expands else -1)
        self.path_probs.append(path_prob)
        return self.drafted.add(parent, token, probs)

    def add_forced(self, parent: int, token: int) -> int:
        """Add a token that a constraint determines. The draft model runs the token if it runs the parent."""
        node = self.add(parent, token, None, self.path_probs[parent], self.model_nodes[parent] >= 0)
        self.forced.add(node)
        return node

    def can_expand(self, node: int) -> bool:
        """Return whether a token may be sampled after a node without exceeding the maximum depth."""
        return self.drafted.depths[node] < self.max_depth

    def push_path(self, node: int, sampler: Sampler) -> int:
        """Push the tokens of a drafted node and its ancestors to the sampler, and return the count."""
        path = self.drafted.path(node)
        for each in path:
            sampler.push(self.drafted.tokens[each])
        return len(path)

    def model_path(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the path that the draft model commits when the target accepts `nodes`."""
        has_run = takewhile(lambda node: 0 <= self.model_nodes[node] < self.model_tree_run, nodes)
        return (*range(1, self._lag_tokens), *(self.model_nodes[node] for node in has_run))

    def build(self, block: bool) -> ForcedDraft:
        """Return the draft, ordered so that the nodes already processed by the draft model come first.

        A target that shares layers with the draft model can reuse the results for these nodes.
        """
        drafted = self.drafted.build(block)
        order = sorted(range(drafted.width), key=lambda node: self.model_nodes[node] < 0)
        if order != list(range(drafted.width)):
            drafted = drafted.subtree(order)
        forced = frozenset(at for at, node in enumerate(order) if node in self.forced)
        return ForcedDraft(drafted, forced)
