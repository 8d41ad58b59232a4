"""Several drafters at once: their proposals in one tree, verified in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat, zip_longest
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


@dataclass(frozen=True)
class _Said:
    """What a drafter said in this round. chances: of each node, given that its parent is accepted."""

    tree: TokenTree
    chances: list[float]

    @cached_property
    def levels(self) -> tuple[list[float], list[int]]:
        """Level by level the chance, in [0, 1], that the text is still in the tree, and the level's rows."""
        reached, rows = [0.0] * max(self.tree.depths), [0] * max(self.tree.depths)
        values = [1.0]
        for node in range(1, self.tree.width):
            values.append(values[self.tree.parents[node]] * self.chances[node])
            level = self.tree.depths[node] - 1
            reached[level] = min(reached[level] + values[node], 1.0)
            rows[level] += 1
        return reached, rows


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
        self._drafters = tuple(drafters)
        self._can_branch = can_branch
        self._limits = limits or Limits()
        self._curve = curve
        self._clock = clock
        self._records = tuple(Record(drafter.lookup) for drafter in drafters)
        self._plain_seconds = Mean()
        self._proposed_at: float | None = None
        self._asked: dict[int, _Said] = {}
        self._last_token = 0

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._drafters

    def begin(self, tokens: Sequence[int]) -> None:
        self._asked = {}
        self._last_token = tokens[-1]
        for drafter in self._drafters:
            drafter.begin(tokens)
        # Some of what lookups keep is there from the first reply on.
        self.extra_weight_bytes = sum(drafter.extra_weight_bytes for drafter in self._drafters)
        self.extra_kv_bytes = sum(drafter.extra_kv_bytes for drafter in self._drafters)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        asked = self._asked = {}
        for i in sorted(range(len(self._drafters)), key=lambda i: not self._drafters[i].lookup):
            if self._pays(i, draft_length):
                started = self._clock()
                said = self._drafters[i].propose(sampler, acceptance, draft_length)
                self._records[i].asked(said, self._clock() - started)
                asked[i] = _Said(said, self._records[i].chances(said))
        tree = self._joined() if asked else TokenTree.chain(self._last_token)
        self._proposed_at = self._clock()
        return tree

    def _joined(self) -> TokenTree:
        """What was said, in one tree, as far as it pays."""
        asked = self._asked
        chosen = sorted(asked) if self._can_branch else self._most_promising()
        return trimmed(
            merged([asked[i].tree for i in chosen]),
            [asked[i].chances for i in chosen],
            [self._drafters[i].lookup for i in chosen],
            self._limits,
            self._curve,
            sum(self._cost(i) for i in chosen),
        )

    def _most_promising(self) -> list[int]:
        """The one whose chain is taken: one that was worth its passes, else the best lookup."""
        drafted = [i for i, said in sorted(self._asked.items()) if said.tree.drafted]
        others = [i for i in drafted if not self._drafters[i].lookup]
        if others:
            return others[:1]
        return [max(drafted or self._asked, key=lambda i: sum(self._asked[i].chances))]

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
        said, said_rows = self._levels()
        spent = sum(self._cost(other) for other in self._asked)
        # What was said is verified down to no level at all, to the first, and so on: the best of these.
        rows_to = list(accumulate(said_rows, initial=1))
        without = max(
            tokens / (spent + self._curve(rows))
            for tokens, rows in zip(accumulate(said, initial=1.0), rows_to, strict=True)
        )
        adds, more_rows = record.survival(draft_length), round(record.rows.value)
        alone = chain(adds, repeat(0.0))
        gains = (both - one for both, one in zip(_either(said, adds), alone, strict=False))
        tokens_to = accumulate(gains, initial=1.0 + sum(adds))
        together = max(
            tokens / (spent + cost + self._curve(min(rows + more_rows, self._limits.max_width)))
            for tokens, rows in zip(tokens_to, rows_to if self._can_branch else rows_to[:1], strict=False)
        )
        return together > without

    def _levels(self) -> tuple[list[float], list[int]]:
        """Of all that was said, as of one draft (`_Said.levels`)."""
        chances, rows = list[float](), list[int]()
        for said in self._asked.values():
            its_chances, its_rows = said.levels
            chances = _either(chances, its_chances)
            rows = [sum(pair) for pair in zip_longest(rows, its_rows, fillvalue=0)]
        return chances, rows

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._proposed_at is not None:
            self._plain_seconds.add((self._clock() - self._proposed_at) / self._curve(tree.width))
        self._proposed_at = None
        for drafter in self._drafters:
            drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for i, record in enumerate(self._records):
            if i in self._asked:
                record.learn(self._asked[i].tree, tokens)
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


def _either(said: Sequence[float], adds: Sequence[float]) -> list[float]:
    """Level by level the chance that the text is in one of two drafts, from the chances of each.

    Halfway between drafts that know nothing of each other and ones that are right together.
    """
    chances = []
    for one, other in zip_longest(said, adds, fillvalue=0.0):
        low, high = sorted((one, other))
        chances.append(high + 0.5 * low * (1.0 - high))
    return chances
