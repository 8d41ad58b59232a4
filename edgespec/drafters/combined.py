"""Several drafters at once: their proposals in one tree, verified in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from time import perf_counter

from edgespec.drafters.base import Drafter
from edgespec.drafters.merging import merged, trimmed
from edgespec.drafters.record import Mean, Record
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.policy.curve import Curve, gentle
from edgespec.policy.limits import Limits

__all__ = ["CombinedDrafter"]

# The first rounds are slow, and say little.
_MEASURED_ROUNDS = 2


class CombinedDrafter(Drafter):
    """Asks the drafters that are worth asking and merges what they say, within one width budget.

    Lookups are asked first. What costs passes of a model is asked only where it is likely to bring more
    than that, by how often each came true lately; until its costs are measured it is always asked. Guesses
    of a lookup are verified as far as their chance pays for their rows; what others say stays whole, for it
    may have been drawn by chance, and dropping it by what was drawn would bias rejection mode.
    can_branch: False for a target that verifies chains only; then the most promising chain is taken.
    limits: what a pass of the target takes. curve: v(m). clock: seconds.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        can_branch: bool,
        *,
        limits: Limits | None = None,
        curve: Curve = gentle,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self.rests = any(drafter.rests for drafter in drafters)
        self.extra_weight_bytes = sum(drafter.extra_weight_bytes for drafter in drafters)
        self.extra_kv_bytes = sum(drafter.extra_kv_bytes for drafter in drafters)
        self._drafters = tuple(drafters)
        self._can_branch = can_branch
        self._limits = limits or Limits()
        self._curve = curve
        self._clock = clock
        self._records = tuple(Record(drafter.lookup) for drafter in drafters)
        self._plain_seconds = Mean()
        self._proposed_at: float | None = None
        self._asked: dict[int, TokenTree] = {}
        self._last_token = 0

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._drafters

    def begin(self, tokens: Sequence[int]) -> None:
        self._asked = {}
        self._last_token = tokens[-1]
        for drafter in self._drafters:
            drafter.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        asked = self._asked = {}
        for i in sorted(range(len(self._drafters)), key=lambda i: not self._drafters[i].lookup):
            if self._pays(i, draft_length):
                started = self._clock()
                asked[i] = self._drafters[i].propose(sampler, acceptance, draft_length)
                self._records[i].asked(asked[i], self._clock() - started)
        tree = self._joined() if asked else TokenTree.chain(self._last_token)
        self._proposed_at = self._clock()
        return tree

    def _joined(self) -> TokenTree:
        """What was said, in one tree, as far as it pays."""
        asked = self._asked
        chosen = sorted(asked) if self._can_branch else self._most_promising()
        return trimmed(
            merged([asked[i] for i in chosen]),
            [self._records[i].chances(asked[i]) for i in chosen],
            [self._drafters[i].lookup for i in chosen],
            self._limits,
            self._curve,
            sum(self._cost(i) for i in chosen),
        )

    def _most_promising(self) -> list[int]:
        """The one whose chain is taken: one that was worth its passes, else the best lookup."""
        drafted = [i for i, tree in sorted(self._asked.items()) if tree.drafted]
        others = [i for i in drafted if not self._drafters[i].lookup]
        if others:
            return others[:1]
        return [max(drafted or self._asked, key=lambda i: sum(self._records[i].chances(self._asked[i])))]

    def _cost(self, i: int) -> float:
        """What asking a drafter costs, in plain steps; 0 until it is measured."""
        seconds, plain = self._records[i].seconds, self._plain_seconds
        if min(seconds.count, plain.count) < _MEASURED_ROUNDS or plain.value <= 0.0:
            return 0.0
        return seconds.value / plain.value

    def _pays(self, i: int, draft_length: int) -> bool:
        """Is a drafter likely to add more than it costs to what was said already?"""
        record, cost = self._records[i], self._cost(i)
        if self._drafters[i].lookup or not cost:
            return True
        said = self._said()
        spent = sum(self._cost(other) for other in self._asked)
        without = max(
            (1.0 + sum(level for level, _ in said[:depth])) / (spent + self._curve(1 + _rows(said, depth)))
            for depth in range(len(said) + 1)
        )
        adds = record.survival(draft_length)
        rows = 1 + round(record.rows.value)
        deepest = len(said) if self._can_branch else 0
        together = max(
            (1.0 + sum(_either(said[:depth], adds)))
            / (spent + cost + self._curve(min(rows + _rows(said, depth), self._limits.max_width)))
            for depth in range(deepest + 1)
        )
        return together > without

    def _said(self) -> list[tuple[float, int]]:
        """Level by level of what was said: the chance that the text is still in it, and its rows."""
        levels: list[tuple[float, int]] = []
        for i, tree in self._asked.items():
            depths, values = tree.depths, [1.0]
            for node, chance in enumerate(self._records[i].chances(tree)[1:], 1):
                values.append(values[tree.parents[node]] * chance)
            mine = [(0.0, 0)] * max(depths)
            for depth, value in zip(depths[1:], values[1:], strict=True):
                chance, rows = mine[depth - 1]
                mine[depth - 1] = min(chance + value, 1.0), rows + 1
            both = _either(levels, [chance for chance, _ in mine])
            rows_of = zip_longest((rows for _, rows in levels), (rows for _, rows in mine), fillvalue=0)
            levels = [(chance, sum(rows)) for chance, rows in zip(both, rows_of, strict=True)]
        return levels

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._proposed_at is not None:
            self._plain_seconds.add((self._clock() - self._proposed_at) / self._curve(tree.width))
        self._proposed_at = None
        for drafter in self._drafters:
            drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for i, record in enumerate(self._records):
            if i in self._asked:
                record.learn(self._asked[i], tokens)
            else:
                record.fade()
        self._asked = {}
        if tokens:
            self._last_token = tokens[-1]
        for drafter in self._drafters:
            drafter.commit(tokens)

    def note(self) -> str:
        return "; ".join(note for drafter in self._drafters if (note := drafter.note()))

    def interrupt(self, wanted: bool) -> None:
        for drafter in self._drafters:
            drafter.interrupt(wanted)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def _rows(said: Sequence[tuple[float, int]], depth: int) -> int:
    """The rows of the first `depth` levels."""
    return sum(rows for _, rows in said[:depth])


def _either(said: Sequence[tuple[float, int]], adds: Sequence[float]) -> list[float]:
    """Level by level the chance that the text is in one of two drafts.

    Halfway between drafts that know nothing of each other and ones that are right together.
    """
    chances = []
    for one, other in zip_longest((chance for chance, _ in said), adds, fillvalue=0.0):
        low, high = sorted((one, other))
        chances.append(high + 0.5 * low * (1.0 - high))
    return chances
