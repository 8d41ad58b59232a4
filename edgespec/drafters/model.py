"""A smaller model with its own KV cache guesses, as a chain or as a tree.

Source: Leviathan et al. 2023 (arXiv 2211.17192); trees as in SpecInfer (arXiv 2305.09781).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgespec.backends.base import LanguageModel
from edgespec.drafters.base import Drafter
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.distribution import Distribution
from edgespec.engine.logits import Logits
from edgespec.engine.prefix import common_prefix
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["ModelDrafter"]


@dataclass(slots=True)
class _Growing:
    """A tree while it grows, and how much of it the draft model has run.

    Its first nodes, up to `root`, are tokens that the draft model had not run yet.
    """

    tokens: list[int]
    parents: list[int]
    root: int
    laws: list[Distribution | None] = field(default_factory=list)
    run: int = 0

    def add(self, parent: int, token: int, law: Distribution | None) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        return len(self.tokens) - 1

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens), tuple(self.parents), tuple(self.laws))

    def path(self, node: int) -> list[int]:
        """The tokens after the root down to `node`."""
        path = []
        while node > self.root:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


class ModelDrafter(Drafter):
    """Drafts with a LanguageModel: one with a cache of its own, or a target's view of itself (`self_draft`).

    branches: children of a node at each depth, such as (3, 2); deeper levels get one. () is a chain.
    min_confidence: stop below a drafted token of less probability. The token itself is kept: dropping
    it would bias rejection mode.
    vocab_size: the target's; ids beyond it are never drafted.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        *,
        branches: tuple[int, ...] = (),
        min_confidence: float = 0.0,
        name: str = "model",
    ) -> None:
        if not model.facts.capabilities.rollback:
            raise CapabilityError(
                f"{model.facts.name} cannot be a draft: {model.facts.capabilities.reason}",
                "choose a draft whose cache can be rolled back, or --draft none",
            )
        self.name = name
        self.extra_weight_bytes, self.extra_kv_bytes = model.facts.weight_bytes, model.facts.kv_bytes
        self._model = model
        self._vocab_size = min(vocab_size, model.facts.vocab_size)
        self._branches = branches if model.facts.capabilities.tree else ()
        self._min_confidence = min_confidence
        self._tokens: list[int] = []
        self._grown: _Growing | None = None

    @property
    def _behind(self) -> int:
        """Tokens the draft model has not run, the last one included."""
        return len(self._tokens) - self._model.length

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache's common beginning with `tokens`; prefill the rest but the last token."""
        self._grown = None
        self._model.truncate(min(common_prefix(self._tokens[: self._model.length], tokens), len(tokens) - 1))
        self._tokens = list(tokens)
        self._catch_up()

    def _catch_up(self) -> None:
        """Run all tokens but the last, if they fit the draft's context."""
        if 1 < self._behind <= self._model.room:
            self._model.prefill(self._known(self._tokens[self._model.length : -1]))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens with a stand-in for ids the draft's vocabulary lacks: a guess may be bad, not impossible."""
        size = self._model.facts.vocab_size
        return [token if token < size else 0 for token in tokens]

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        if self._behind > 2:
            self._catch_up()
        widest = min(self._model.room, self._model.facts.capabilities.max_width)
        if self._behind > min(2, widest):
            return TokenTree.chain(self._tokens[-1])
        # After full acceptance the cache lags one token: it is run together with the root.
        lag = self._known(self._tokens[self._model.length :])
        root = len(lag) - 1
        grown = self._grown = _Growing(lag, list(range(-1, root)), root, [None] * len(lag))
        frontier = [root]
        for depth in range(draft_length):
            first, grown.run = grown.run, len(grown.tokens)
            self._model.run_ahead(not self._branches and depth + 1 < draft_length)
            logits = self._model.verify(grown.tree(), first).limited(self._vocab_size)
            rows = [(node, node - first) for node in frontier]
            frontier = self._grow(grown, rows, logits, sampler, acceptance, depth)
            if not frontier or len(grown.tokens) > widest:
                break
        return TokenTree(
            (self._tokens[-1], *grown.tokens[root + 1 :]),
            (-1, *(parent - root for parent in grown.parents[root + 1 :])),
            (None, *grown.laws[root + 1 :]),
            block=all(count == 1 for count in self._branches[:draft_length]),
        )

    def _grow(
        self,
        grown: _Growing,
        rows: list[tuple[int, int]],
        logits: Logits,
        sampler: Sampler,
        acceptance: Acceptance,
        depth: int,
    ) -> list[int]:
        """One level more: children of the frontier. Returns the children worth growing further."""
        count = self._branches[depth] if depth < len(self._branches) else 1
        frontier = []
        for node, row in rows:
            path = grown.path(node)
            for token in path:
                sampler.push(token)
            for token, law in acceptance.draw(sampler, logits, row, count):
                child = grown.add(node, token, law)
                if self._goes_on(logits, row, token):
                    frontier.append(child)
            sampler.pop(len(path))
        return frontier

    def _goes_on(self, logits: Logits, row: int, token: int) -> bool:
        """False after an end of the reply, and after a token the draft is not sure of; both stay drafted.

        Sure is judged by the draft's own probability at temperature 1, over its 64 best tokens.
        """
        if self._model.vocabulary.is_end(token):
            return False
        if self._min_confidence <= 0.0:
            return True
        tokens, values = logits.top(row, 64)
        weights = np.exp(values - values.max())
        return bool(weights[tokens == token].sum() >= self._min_confidence * weights.sum())

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Keep what the draft model has run of the emitted path; the rest is caught up next time."""
        if self._grown and self._grown.run:
            tree, node = self._grown.tree(), self._grown.root
            path = list(range(1, node + 1))
            for token in tokens[:-1]:
                child = tree.child(node, token)
                if child is None or child >= self._grown.run:
                    break
                path.append(child)
                node = child
            self._model.commit(tuple(path))
        self._grown = None
        self._tokens.extend(tokens)

    def interrupt(self, wanted: bool) -> None:
        self._model.interrupt(wanted)

    def close(self) -> None:
        self._model.close()
