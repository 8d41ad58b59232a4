"""SWIFT (arXiv 2410.06916): draft with the target model while skipping some of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.optional_features import Skippable
from edgespec.backends.self_draft_methods import SkippedLayers
from edgespec.costs.curve import CostFunction, assumed_cost
from edgespec.drafters.base import Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.draft_length import best_draft_length
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.saved_arrays import SavedArrays

__all__ = ["LayerSet", "ScoredLayerSet", "SwiftDrafter", "SwiftSearch"]

# Zero-based indices of the skipped layers, in ascending order.
LayerSet: TypeAlias = tuple[int, ...]

# Number of recent tokens on which a set of skipped layers is evaluated. A larger number would noticeably
# delay a new reply.
EVALUATION_TOKENS = 64
_MIN_EVALUATION_TOKENS = 16
# Maximum number of sets of skipped layers to evaluate in one idle period between replies.
MAX_SETS_PER_IDLE_PERIOD = 48
# Maximum number of sets of skipped layers to evaluate for one model, from the SWIFT paper (arXiv 2410.06916).
MAX_SETS = 1000
# Average fraction of the layers to skip in a random set, from the SWIFT paper (arXiv 2410.06916).
_SKIP_RATIO = 0.45
_MAX_DRAFT_LENGTH = 8
# Maximum number of sets of skipped layers to keep results for.
_MAX_SAVED_SETS = 256
# When more drafted tokens than this have been counted for a set of skipped layers, its counts are halved to
# give new tokens more weight.
_MAX_COUNTED_TOKENS = 2048


class SwiftDrafter(Drafter):
    """Drafts with the target's own weights and KV cache, skipping layers (SWIFT, arXiv 2410.06916).

    Between replies, the drafter searches for the best layers to skip, using the end of the current chat as
    test data. Nothing is drafted until skipping some set of layers is expected to be faster than plain
    decoding. Unlike in the paper, only whole layers are skipped.

    Args:
        target: The target model.
        store: Saves the state of the search for later runs.
        pass_cost: Function that returns the duration of a verify pass over a given number of tokens, relative
            to a single-token target pass.
        min_confidence: See `ModelDrafter`.

    Raises:
        CapabilityError: The backend cannot skip layers of this target.
    """

    name = "swift"
    has_idle_work = True

    def __init__(
        self,
        target: Skippable,
        *,
        store: SavedArrays | None = None,
        pass_cost: CostFunction = assumed_cost,
        min_confidence: float = 0.0,
    ) -> None:
        capabilities = target.facts.capabilities
        if "swift" not in capabilities.self_draft_methods:
            raise CapabilityError(
                f"{target.facts.name} cannot draft by skipping layers:"
                f" {capabilities.reason or 'its backend does not support it'}",
                "choose another method with --method",
            )
        self._target = target
        self._store = store
        self._min_confidence = min_confidence
        self._search = SwiftSearch(target.layer_count, pass_cost)
        if store:
            self._search.restore(store.load())
        self._tokens: list[int] = []
        self._layer_set: ScoredLayerSet | None = None
        self._drafter: ModelDrafter | None = None
        self._proposed: TokenTree | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        best = self._search.best
        if best is None or best.speed_up <= 1.0:
            self.close()
        else:
            if self._layer_set is None or best.layers != self._layer_set.layers:
                self.close()
                view = self._target.self_draft(SkippedLayers(best.layers))
                vocab_size = self._target.facts.vocab_size
                self._drafter = ModelDrafter(
                    view, vocab_size, min_confidence=self._min_confidence, name=self.name
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
        """See `Drafter.commit`. Also records how many drafted tokens were accepted."""
        if self._drafter:
            self._drafter.commit(tokens)
        if self._layer_set and self._proposed:
            accepted = len(self._proposed.walk(tokens)) - 1
            # Do not count drafted tokens after the end of the reply, because it is unknown whether they were
            # correct.
            known = min(accepted + 1, self._proposed.drafted) if len(tokens) > accepted else accepted
            self._search.record(self._layer_set.layers, accepted, known)
        self._proposed = None
        self._tokens.extend(tokens)

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        """Search for the best layers to skip, using the last tokens of the chat as test data."""
        tokens = self._tokens[: self._target.length][-EVALUATION_TOKENS:]
        if len(tokens) < _MIN_EVALUATION_TOKENS:
            return
        search, best = self._search, self._search.best
        layers = best.layers if best else search.next_set()
        evaluated = 0
        try:
            while evaluated < MAX_SETS_PER_IDLE_PERIOD and should_continue():
                right = round(self._target.top1_agreement(layers, tokens) * len(tokens))
                search.record(layers, right, len(tokens))
                evaluated += 1
                if search.tried >= MAX_SETS:
                    break
                layers = search.next_set()
            if evaluated and self._store:
                self._store.save(search.saved_arrays())
        finally:
            self._target.release_thread_state()

    def note(self) -> str:
        best, note = self._search.best, "swift does not draft yet: it searches for layers between replies"
        if best:
            note = "swift" if best.speed_up > 1.0 else "swift does not draft because it would not be faster"
            note += (
                f": skipping {len(best.layers)} of {self._target.layer_count} layers predicts the same token"
                f" {best.agreement:.0%} of the time, expected speed-up {best.speed_up:.2f}x,"
                f" {self._search.tried} sets tried"
            )
        return " · ".join(filter(None, (note, self._store.notice if self._store else "")))

    def interrupt(self, enabled: bool) -> None:
        if self._drafter:
            self._drafter.interrupt(enabled)

    def close(self) -> None:
        if self._drafter:
            self._drafter.close()
        self._drafter = self._layer_set = None


class ScoredLayerSet(NamedTuple):
    """A set of layers to skip, and the expected speed-up.

    Attributes:
        layers: The skipped layers.
        agreement: Fraction of tokens that the target predicts identically when it skips these layers.
        speed_up: Expected speed-up over plain decoding; 1.0 means no speed-up.
        draft_length: Draft length that achieves this speed-up.
    """

    layers: LayerSet
    agreement: float
    speed_up: float
    draft_length: int


class SwiftSearch:
    """Searches for the set of skipped layers with the highest expected speed-up.

    Random sets alternate with variants of good sets. The first and the last layer are never skipped.

    Attributes:
        tried: Number of sets tried so far, including those no longer stored.
    """

    def __init__(self, layer_count: int, pass_cost: CostFunction, seed: int = 0) -> None:
        self.tried = 0
        self._layer_count = layer_count
        self._pass_cost = pass_cost
        self._random = np.random.default_rng(seed)
        # For each set of skipped layers: correctly drafted tokens, and all drafted tokens.
        self._counts: dict[LayerSet, tuple[int, int]] = {}
        self._scored: dict[LayerSet, ScoredLayerSet] = {}

    @property
    def best(self) -> ScoredLayerSet | None:
        """The layers to skip for the highest expected speed-up, or None if none have been tried."""
        return max(self._scored.values(), key=lambda scored: scored.speed_up, default=None)

    def record(self, layers: LayerSet, right: int, total: int) -> None:
        """Record that `right` of `total` tokens were correct when drafted without the given layers."""
        if total == 0:
            return
        self.tried += layers not in self._counts
        old_right, old_total = self._counts.get(layers, (0, 0))
        if old_total > _MAX_COUNTED_TOKENS:
            old_right, old_total = old_right // 2, old_total // 2
        self._set_counts(layers, old_right + right, old_total + total)
        if len(self._counts) > _MAX_SAVED_SETS:
            worst = min(self._scored.values(), key=lambda scored: scored.speed_up).layers
            del self._counts[worst], self._scored[worst]

    def _set_counts(self, layers: LayerSet, right: int, total: int) -> None:
        self._counts[layers] = (right, total)
        agreement = right / (total + 1)
        cost = 1.0 - len(layers) / self._layer_count
        length, speed_up = best_draft_length(
            agreement, lambda k: k * cost + self._pass_cost(k + 1), _MAX_DRAFT_LENGTH
        )
        self._scored[layers] = ScoredLayerSet(layers, agreement, speed_up, length)

    def next_set(self) -> LayerSet:
        """Return the next layers to try skipping: a random set, or a variant of one of the best sets."""
        if self.tried % 2:
            leaders = sorted(self._scored.values(), key=lambda scored: -scored.speed_up)[:4]
            layers = list(leaders[self._random.integers(len(leaders))].layers)
            others = sorted(set(range(1, self._layer_count - 1)) - set(layers))
            if others:
                layers[self._random.integers(len(layers))] = others[self._random.integers(len(others))]
                if (variant := tuple(sorted(layers))) not in self._counts:
                    return variant
        return self._random_set()

    def _random_set(self) -> LayerSet:
        skippable = self._layer_count - 2
        count = round(_SKIP_RATIO * self._layer_count + self._random.uniform(-1.0, 1.0))
        chosen = self._random.permutation(skippable)[: max(1, min(count, skippable))]
        return tuple(sorted((chosen + 1).tolist()))

    def saved_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the search results as named arrays, to save for a later run."""
        sets = np.zeros((len(self._counts), self._layer_count), np.uint8)
        for row, layers in zip(sets, self._counts, strict=True):
            row[list(layers)] = 1
        return {
            "sets": sets,
            "counts": np.array(list(self._counts.values()), np.int64).reshape(-1, 2),
            "tried": np.array(self.tried, np.int64),
        }

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore the tried layer sets from arrays returned by `saved_arrays`, ignoring invalid sets."""
        if not {"sets", "counts", "tried"} <= set(saved):
            return
        sets, counts = saved["sets"], saved["counts"]
        if sets.shape != (len(counts), self._layer_count) or counts.shape != (len(sets), 2):
            return
        if saved["tried"].shape != ():
            return
        for row, (right, total) in zip(sets, counts.tolist(), strict=True):
            layers = tuple(np.flatnonzero(row).tolist())
            if layers and layers[0] > 0 and layers[-1] < self._layer_count - 1 and 0 <= right <= total > 0:
                self._set_counts(layers, right, total)
        self.tried = max(len(self._counts), int(saved["tried"]))
