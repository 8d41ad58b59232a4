"""Draft chains or trees with a separate draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LanguageModel
from edgespec.drafters.base import BudgetedDrafter, MemoryUse, check_rollback
from edgespec.drafters.draft_cache import DraftCache, is_confident, replace_unknown_ids, top_probs
from edgespec.drafters.draft_tree import DraftTree
from edgespec.drafters.tree_growth import FixedShape, TreeGrowth
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["ModelDrafter"]

# Number of tokens to prefill during warm-up. Most prompts are at least this long.
_WARM_UP_TOKENS = 16


class ModelDrafter(BudgetedDrafter):
    """Drafts with a language model, as in Leviathan et al. 2023 (arXiv 2211.17192).

    The model is either a separate draft model, or a view of the target that runs only part of it
    (`self_draft`). Tree drafting follows SpecInfer (arXiv 2305.09781).

    Args:
        model: The draft model.
        vocab_size: Vocabulary size of the target. Token ids outside it are never drafted.
        branches: Number of children per node at each depth, such as (3, 2). Deeper nodes have one child, so
            an empty tuple drafts chains. Alternatively, a `TreeGrowth` that chooses the shape of each tree.
            It must not be shared with other drafters.
        min_confidence: Drafting stops after a token with a lower probability. The token itself is kept,
            because removing it would bias rejection sampling.
        name: Name of the drafter shown in reports.
        cache: The model's KV cache. Needed only if another drafter shares it.

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
        if isinstance(branches, tuple):
            branches = branches if model.facts.capabilities.tree else ()
            self._block = set(branches) <= {1}
            self._growth: TreeGrowth = FixedShape(branches)
        else:
            self._block = branches.siblings == 1
            self._growth = branches
        self.chooses_length = self._growth.chooses_length
        # In a chain of fixed length, the best token of each pass is the input of the next, so the backend can
        # start the next pass without waiting for the result.
        self._is_chain = branches == ()
        self._min_confidence = min_confidence
        self.cache = cache or DraftCache(model)
        self._tree: DraftTree | None = None

    def with_growth(self, make_growth: Callable[[Capabilities], TreeGrowth]) -> ModelDrafter:
        return ModelDrafter(
            self._model,
            self._vocab_size,
            branches=make_growth(self._model.facts.capabilities),
            min_confidence=self._min_confidence,
            name=self.name,
            cache=self.cache,
        )

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse.of(self._model.facts)

    def begin(self, tokens: Sequence[int]) -> None:
        """See `Drafter.begin`. New tokens are not prefilled until a draft is needed."""
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
        if self._model.length == 0:
            # A backend's first pass with a new shape is slow, so run one prefill and one decoding pass.
            self._model.prefill([0] * min(_WARM_UP_TOKENS, self._model.free_tokens - 1))
            self._model.verify(TokenTree.chain(0)).at(0, np.array([0]))
            self._model.truncate(0)

    def force_draft(self) -> None:
        self._growth.force_draft()

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        cache = self.cache
        if cache.pending_tokens:
            cache.prefill()
        max_width = min(self._model.free_tokens, self._model.facts.capabilities.max_width)
        if cache.lag_tokens > min(2, max_width):
            return TokenTree.chain(cache.visible_tokens[-1])
        if not self._growth.begin_round(draft_length):
            self._growth.record_skipped_round()
            return TokenTree.chain(cache.visible_tokens[-1])
        # If the whole previous draft was accepted, the token before the root is not cached yet. Run it
        # together with the root.
        lag = replace_unknown_ids(self._model, cache.visible_tokens[self._model.length :])
        tree = self._tree = DraftTree(cache.visible_tokens[-1], lag)
        frontier = [0]
        for depth in range(draft_length):
            first, tree.model_tree_run = tree.model_tree_run, len(tree.model_tree)
            self._model.run_ahead(self._is_chain and depth + 1 < draft_length)
            logits = self._model.verify(tree.model_tree.build(), first).limit_vocab(self._vocab_size)
            frontier = self._grow(tree, frontier, first, logits, sampler, acceptance)
            if not frontier or len(tree.model_tree) > max_width:
                break
        self._growth.finish_draft()
        return tree.tree(self._block)

    def _grow(
        self,
        tree: DraftTree,
        frontier: list[int],
        first: int,
        logits: Logits,
        sampler: Sampler,
        acceptance: Acceptance,
    ) -> list[int]:
        """Add children to the nodes in the frontier, and return the new nodes to expand next."""
        rows = [place - first for node in frontier if (place := tree.model_nodes[node]) is not None]
        probs = [_NO_PROBS] * len(rows)

        def draft_probs(i: int) -> NDArray[np.float64]:
            probs[i] = np.sort(top_probs(logits, rows[i])[1])[::-1]
            return probs[i]

        values = [tree.path_probs[node] for node in frontier]
        expandable = []
        for i, children in enumerate(self._growth.grow_level(values, draft_probs)):
            node, child_count = frontier[i], len(children.path_probs)
            path = tree.path_tokens(node)
            for token in path:
                sampler.push(token)
            draws = acceptance.draw(sampler, logits, rows[i], max(child_count, self._growth.siblings))
            sampler.pop(len(path))
            tree.draws[node] = probs[i], [token for token, _ in draws]
            drafted = zip(draws, children.path_probs, strict=False)
            for rank, ((token, distribution), path_prob) in enumerate(drafted):
                expands = rank < children.expand_count
                child = tree.add(node, token, distribution, path_prob, expands)
                if expands and self._can_continue(logits, rows[i], token):
                    expandable.append(child)
        return expandable

    def _can_continue(self, logits: Logits, row: int, token: int) -> bool:
        """Return False if `token` ends the reply or its probability is below `min_confidence`."""
        if self._model.vocabulary.is_end(token):
            return False
        return is_confident(logits, row, token, self._min_confidence)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._tree:  # otherwise another drafter proposed the tree
            self._growth.record_verify_pass(tree.width)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """See `Drafter.commit`. The next draft pass runs any emitted tokens missing from the KV cache."""
        if self._tree and self._tree.model_tree_run:
            nodes = self._tree.walk(tokens)
            self._model.commit(self._tree.model_path(nodes[1 : len(tokens)]))
            self._record_outcomes(self._tree, nodes, tokens)
        self._tree = None
        self.cache.extend(tokens)

    def _record_outcomes(self, tree: DraftTree, nodes: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Record for each node on the emitted path which child was accepted."""
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


_NO_PROBS: NDArray[np.float64] = np.zeros(0)
