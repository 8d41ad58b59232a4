"""A smaller model with its own KV cache guesses, as a chain or as a tree.

Source: Leviathan et al. 2023 (arXiv 2211.17192); trees as in SpecInfer (arXiv 2305.09781).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LanguageModel
from edgespec.drafters.base import BudgetedDrafter, MemoryUse, check_rollback
from edgespec.drafters.draft_cache import DraftCache
from edgespec.drafters.draft_model import is_sure, known, sureness
from edgespec.drafters.draft_tree import DraftTree
from edgespec.drafters.tree_growth import FixedShape, TreeGrowth
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["ModelDrafter"]

# So many tokens a first reading is likely to have at least.
_WARM_TOKENS = 16


class ModelDrafter(BudgetedDrafter):
    """Drafts with a LanguageModel: one with a cache of its own, or a target's view of itself (`self_draft`).

    branches: children of a node at each depth, such as (3, 2); deeper levels get one. () is a chain. A
    TreeGrowth, of this drafter alone, decides as it goes; it has to know what both models take.
    min_confidence: stop below a drafted token of less probability. The token itself is kept: dropping
    it would bias rejection mode.
    vocab_size: the target's; ids beyond it are never drafted. memory: of the same model, where another
    drafter has it as well.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        *,
        branches: tuple[int, ...] | TreeGrowth = (),
        min_confidence: float = 0.0,
        name: str = "model",
        memory: DraftCache | None = None,
    ) -> None:
        check_rollback(model)
        self.name = name
        self._model = model
        self._vocab_size = min(vocab_size, model.facts.vocab_size)
        if isinstance(branches, tuple):
            branches = branches if model.facts.capabilities.tree else ()
            self._single = set(branches) <= {1}
            self._growth: TreeGrowth = FixedShape(branches)
        else:
            self._single = branches.siblings == 1
            self._growth = branches
        self.chooses_length = self._growth.chooses_length
        # The best token of each pass is the next one to run, and nothing has to be known in between.
        self._straight = branches == ()
        self._min_confidence = min_confidence
        self.memory = memory or DraftCache(model)
        self._grown: DraftTree | None = None

    def with_growth(self, make_growth: Callable[[Capabilities], TreeGrowth]) -> ModelDrafter:
        return ModelDrafter(
            self._model,
            self._vocab_size,
            branches=make_growth(self._model.facts.capabilities),
            min_confidence=self._min_confidence,
            name=self.name,
            memory=self.memory,
        )

    @property
    def memory_use(self) -> MemoryUse:
        return MemoryUse.of(self._model.facts)

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache's common beginning with `tokens`; the rest is read when a guess is wanted."""
        self._grown = None
        self.memory.begin(tokens)

    @property
    def pending_tokens(self) -> int:
        return self.memory.unread

    @property
    def full_pending_tokens(self) -> int:
        return self.memory.unread_whole

    def prefill(self, max_tokens: int) -> None:
        self.memory.read(max_tokens)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        return self._growth.saved_statistics()

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._growth.restore_statistics(saved)

    def warm_up(self) -> None:
        if self._model.length == 0:
            # As much as a first reading and a first guess run: passes of a shape that is new take longer.
            self._model.prefill([0] * min(_WARM_TOKENS, self._model.free_tokens - 1))
            self._model.verify(TokenTree.chain(0)).at(0, np.array([0]))
            self._model.truncate(0)

    def force_draft(self) -> None:
        self._growth.force_draft()

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        memory = self.memory
        if memory.unread:
            memory.read()
        widest = min(self._model.free_tokens, self._model.facts.capabilities.max_width)
        if memory.behind > min(2, widest):
            return TokenTree.chain(memory.shown[-1])
        if not self._growth.begin_round(draft_length):
            self._growth.record_skipped_round()
            return TokenTree.chain(memory.shown[-1])
        # After full acceptance the cache lags one token: it is run together with the root.
        lag = known(self._model, memory.shown[self._model.length :])
        grown = self._grown = DraftTree(memory.shown[-1], lag)
        frontier = [0]
        for depth in range(draft_length):
            first, grown.done = grown.done, len(grown.ran)
            self._model.run_ahead(self._straight and depth + 1 < draft_length)
            logits = self._model.verify(grown.ran.build(), first).limit_vocab(self._vocab_size)
            frontier = self._grow(grown, frontier, first, logits, sampler, acceptance)
            if not frontier or len(grown.ran) > widest:
                break
        self._growth.finish_draft()
        return grown.tree(self._single)

    def _grow(
        self,
        grown: DraftTree,
        frontier: list[int],
        first: int,
        logits: Logits,
        sampler: Sampler,
        acceptance: Acceptance,
    ) -> list[int]:
        """One level more: children of the frontier. Returns the children worth growing further."""
        rows = [place - first for node in frontier if (place := grown.places[node]) is not None]
        probs = [_NOT_LOOKED_AT] * len(rows)

        def look(i: int) -> NDArray[np.float64]:
            probs[i] = np.sort(sureness(logits, rows[i])[1])[::-1]
            return probs[i]

        values = [grown.values[node] for node in frontier]
        grows = []
        for i, children in enumerate(self._growth.grow_level(values, look)):
            node, wanted = frontier[i], len(children.path_probs)
            path = grown.path_tokens(node)
            for token in path:
                sampler.push(token)
            draws = acceptance.draw(sampler, logits, rows[i], max(wanted, self._growth.siblings))
            sampler.pop(len(path))
            grown.looked_at[node] = probs[i], [token for token, _ in draws]
            for rank, ((token, law), value) in enumerate(zip(draws, children.path_probs, strict=False)):
                child = grown.add(node, token, law, value, rank < children.expand_count)
                if rank < children.expand_count and self._goes_on(logits, rows[i], token):
                    grows.append(child)
        return grows

    def _goes_on(self, logits: Logits, row: int, token: int) -> bool:
        """False after an end of the reply, and after a token the draft is not sure of; both stay drafted."""
        if self._model.vocabulary.is_end(token):
            return False
        return is_sure(logits, row, token, self._min_confidence)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._grown:  # else the pass was of no draft of this one
            self._growth.record_verify_pass(tree.width)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Keep what the draft model has run of the emitted path; the rest is caught up next time."""
        if self._grown and self._grown.done:
            nodes = self._grown.walk(tokens)
            self._model.commit(self._grown.ran_path(nodes[1 : len(tokens)]))
            self._learn(self._grown, nodes, tokens)
        self._grown = None
        self.memory.extend(tokens)

    def _learn(self, grown: DraftTree, nodes: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Which of the children looked at came true, down the emitted path: `nodes`, the root first."""
        for node, token in zip(nodes, tokens, strict=False):
            if node not in grown.looked_at:
                break
            probs, drawn = grown.looked_at[node]
            self._growth.record_outcome(probs, drawn.index(token) if token in drawn else None)

    def reset(self) -> None:
        self._model.truncate(0)

    def interrupt(self, enabled: bool) -> None:
        self._model.interrupt(enabled)

    def close(self) -> None:
        self._model.close()


_NOT_LOOKED_AT: NDArray[np.float64] = np.zeros(0)
