"""The target without some of its layers guesses; which ones is searched for between replies.

Source: SWIFT (arXiv 2410.06916): random search over the layers to skip, at a fixed ratio, with a Bayesian
step now and then, on the text that is being written. The paper skips attention and feed-forward parts one by
one; here layers are skipped whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.backends.base import SkippedLayers
from edgespec.backends.optional_features import Skippable
from edgespec.costs.curve import CostFunction, assumed_cost
from edgespec.drafters.array_store import ArrayStore
from edgespec.drafters.base import Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.swift_search import Found, SwiftSearch
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["SwiftDrafter"]

# One pass looks at so many of the last tokens: enough to tell sets apart, and a step stays short.
WINDOW_TOKENS = 64
_FEWEST_TOKENS = 16
# Sets tried in one rest, and on one model altogether (the paper's bound of its search).
MOST_IN_A_REST = 48
MOST_TRIED = 1000


class SwiftDrafter(Drafter):
    """Drafts on the target's own memory with its cheapest good set of layers; silent while none pays.

    notes: where what was found is kept; None forgets it with the process.
    pass_cost: v(m), what a pass of so many rows costs the target, in plain steps.
    min_confidence: as for ModelDrafter.
    Raises CapabilityError where the target's layers cannot be skipped.
    """

    name = "swift"
    has_idle_work = True

    def __init__(
        self,
        target: Skippable,
        *,
        notes: ArrayStore | None = None,
        pass_cost: CostFunction = assumed_cost,
        min_confidence: float = 0.0,
        seed: int = 0,
    ) -> None:
        if "swift" not in target.facts.capabilities.self_draft_methods:
            reason = target.facts.capabilities.reason or "its layers cannot be skipped"
            raise CapabilityError(f"{target.facts.name} cannot draft without some of its layers: {reason}")
        self._target = target
        self._notes = notes
        self._min_confidence = min_confidence
        self._search = SwiftSearch(target.layer_count, pass_cost, seed)
        if notes:
            self._search.take_over(notes.load())
        self._tokens: list[int] = []
        # The set that drafts in this reply, and the drafter of it.
        self._chosen: Found | None = None
        self._guess: ModelDrafter | None = None
        self._proposed: TokenTree | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        best = self._search.best
        if best is None or best.speed_up <= 1.0:
            self.close()
            self._guess = self._chosen = None
        else:
            if self._chosen is None or best.layers != self._chosen.layers:
                self.close()
                self._guess = ModelDrafter(
                    self._target.self_draft(SkippedLayers(best.layers)),
                    self._target.facts.vocab_size,
                    min_confidence=self._min_confidence,
                    name=self.name,
                )
            self._chosen = best
        self._proposed = None
        self._tokens = list(tokens)
        if self._guess:
            self._guess.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        if self._guess is None or self._chosen is None:
            return TokenTree.chain(self._tokens[-1])
        length = min(draft_length, self._chosen.draft_length)
        self._proposed = self._guess.propose(sampler, acceptance, length)
        return self._proposed

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._guess:
            self._guess.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """What was really accepted counts with what the search found."""
        if self._guess:
            self._guess.commit(tokens)
        if self._chosen and self._proposed and self._proposed.drafted:
            accepted = len(self._proposed.walk(tokens)) - 1
            # After an end of the reply nothing tells whether the rest was right.
            judged = min(accepted + 1, self._proposed.drafted) if len(tokens) > accepted else accepted
            self._search.count(self._chosen.layers, accepted, judged)
        self._proposed = None
        self._tokens.extend(tokens)

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Try other sets on the end of the text, first the best known again, however many were tried."""
        window = self._tokens[: self._target.length][-WINDOW_TOKENS:]
        if len(window) < _FEWEST_TOKENS:
            return
        tried = 0
        try:
            while tried < MOST_IN_A_REST and should_continue():
                best = self._search.best
                if tried and self._search.tried >= MOST_TRIED:
                    break
                layers = best.layers if best and tried == 0 else self._search.next()
                matched = round(self._target.top1_agreement(layers, window) * len(window))
                self._search.count(layers, matched, len(window))
                tried += 1
            if tried and self._notes:
                self._notes.save(self._search.to_keep())
        finally:
            self._target.release_thread_state()

    def note(self) -> str:
        return " · ".join(filter(None, (self._found(), self._notes.notice if self._notes else "")))

    def _found(self) -> str:
        best, tried = self._search.best, self._search.tried
        if best is None:
            return "swift does not draft yet: it looks for layers to skip between replies"
        found = (
            f"without {len(best.layers)} of {self._target.layer_count} layers it agrees with itself"
            f" {best.agreement:.0%} of the time, {best.speed_up:.2f}x expected, {tried} sets tried"
        )
        return (
            f"swift: {found}" if best.speed_up > 1.0 else f"swift does not draft, it would not pay: {found}"
        )

    def interrupt(self, enabled: bool) -> None:
        if self._guess:
            self._guess.interrupt(enabled)

    def close(self) -> None:
        if self._guess:
            self._guess.close()
