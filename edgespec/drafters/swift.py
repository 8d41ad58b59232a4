"""SWIFT (arXiv 2410.06916): draft with the target model while skipping some of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.backends.base import SkippedLayers
from edgespec.backends.optional_features import Skippable
from edgespec.costs.curve import CostFunction, assumed_cost
from edgespec.drafters.array_store import ArrayStore
from edgespec.drafters.base import Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.swift_search import ScoredLayerSet, SwiftSearch
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["SwiftDrafter"]

# Number of recent tokens on which a set of skipped layers is evaluated, in one pass. It is large enough to
# compare sets, and small enough not to delay a new reply noticeably.
EVALUATION_TOKENS = 64
_MIN_EVALUATION_TOKENS = 16
# Maximum number of sets to evaluate per idle period (a heuristic), and in total for a model (as in the
# paper).
MAX_SETS_PER_IDLE_PERIOD = 48
MAX_SETS = 1000


class SwiftDrafter(Drafter):
    """Drafts with the target's own weights and KV cache, skipping layers (SWIFT, arXiv 2410.06916).

    Between replies, the drafter searches for the best layers to skip, using the end of the current chat as
    test data. Nothing is drafted until skipping some set of layers is expected to be faster than plain
    decoding. The paper skips attention and feed-forward blocks separately; here, whole layers are skipped.

    Args:
        target: The target model.
        store: Saves the state of the search for later runs.
        pass_cost: Returns the cost of verifying a given number of tokens in one pass, in target steps.
        min_confidence: See `ModelDrafter`.
        seed: Random seed for the search.

    Raises:
        CapabilityError: The backend cannot skip layers of this target.
    """

    name = "swift"
    has_idle_work = True

    def __init__(
        self,
        target: Skippable,
        *,
        store: ArrayStore | None = None,
        pass_cost: CostFunction = assumed_cost,
        min_confidence: float = 0.0,
        seed: int = 0,
    ) -> None:
        if "swift" not in target.facts.capabilities.self_draft_methods:
            reason = target.facts.capabilities.reason or "its layers cannot be skipped"
            raise CapabilityError(
                f"{target.facts.name} cannot draft by skipping layers: {reason}",
                "choose another --method",
            )
        self._target = target
        self._store = store
        self._min_confidence = min_confidence
        self._search = SwiftSearch(target.layer_count, pass_cost, seed)
        if store:
            self._search.restore(store.load())
        self._tokens: list[int] = []
        # The set of layers skipped in the current reply, and the drafter that skips them.
        self._layer_set: ScoredLayerSet | None = None
        self._drafter: ModelDrafter | None = None
        self._proposed: TokenTree | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        best = self._search.best
        if best is None or best.speed_up <= 1.0:
            self.close()
            self._drafter = self._layer_set = None
        else:
            if self._layer_set is None or best.layers != self._layer_set.layers:
                self.close()
                self._drafter = ModelDrafter(
                    self._target.self_draft(SkippedLayers(best.layers)),
                    self._target.facts.vocab_size,
                    min_confidence=self._min_confidence,
                    name=self.name,
                )
            self._layer_set = best
        self._proposed = None
        self._tokens = list(tokens)
        if self._drafter:
            self._drafter.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        if self._drafter is None or self._layer_set is None:
            return TokenTree.chain(self._tokens[-1])
        length = min(draft_length, self._layer_set.draft_length)
        self._proposed = self._drafter.propose(sampler, acceptance, length)
        return self._proposed

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._drafter:
            self._drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """See `Drafter.commit`. Also tells the search how many drafted tokens were accepted."""
        if self._drafter:
            self._drafter.commit(tokens)
        if self._layer_set and self._proposed and self._proposed.drafted:
            accepted = len(self._proposed.walk(tokens)) - 1
            # If the reply ended inside the draft, it is unknown whether the next drafted token was correct.
            known = min(accepted + 1, self._proposed.drafted) if len(tokens) > accepted else accepted
            self._search.record(self._layer_set.layers, accepted, known)
        self._proposed = None
        self._tokens.extend(tokens)

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Evaluate how well the target predicts the end of the chat when some layers are skipped.

        The best set so far is evaluated first, even if the limit has been reached, because it may be worse
        for the current text.
        """
        tokens = self._tokens[: self._target.length][-EVALUATION_TOKENS:]
        if len(tokens) < _MIN_EVALUATION_TOKENS:
            return
        evaluated = 0
        try:
            while evaluated < MAX_SETS_PER_IDLE_PERIOD and should_continue():
                best = self._search.best
                if evaluated and self._search.tried >= MAX_SETS:
                    break
                layers = best.layers if best and evaluated == 0 else self._search.next_set()
                right = round(self._target.top1_agreement(layers, tokens) * len(tokens))
                self._search.record(layers, right, len(tokens))
                evaluated += 1
            if evaluated and self._store:
                self._store.save(self._search.saved_arrays())
        finally:
            self._target.release_thread_state()

    def note(self) -> str:
        return " · ".join(filter(None, (self._search_result(), self._store.notice if self._store else "")))

    def _search_result(self) -> str:
        best, tried = self._search.best, self._search.tried
        if best is None:
            return "swift does not draft yet: it searches for layers to skip between replies"
        result = (
            f"skipping {len(best.layers)} of {self._target.layer_count} layers predicts the same token"
            f" {best.agreement:.0%} of the time, expected speed-up {best.speed_up:.2f}x, {tried} sets tried"
        )
        if best.speed_up > 1.0:
            return f"swift: {result}"
        return f"swift does not draft because it would not be faster: {result}"

    def interrupt(self, enabled: bool) -> None:
        if self._drafter:
            self._drafter.interrupt(enabled)

    def close(self) -> None:
        if self._drafter:
            self._drafter.close()
