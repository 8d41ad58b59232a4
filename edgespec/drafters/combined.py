"""Several drafters at once: their proposals in one tree, verified in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from edgespec.drafters.base import Drafter, Extra
from edgespec.drafters.merging import merged, trimmed
from edgespec.drafters.probe import Probe
from edgespec.drafters.record import Mean, Record
from edgespec.drafters.worth import Said
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.policy.curve import Curve, gentle
from edgespec.policy.limits import Limits

__all__ = ["CombinedDrafter"]

# The first rounds are slow, and say little.
_MEASURED_ROUNDS = 2
# So much of what may be lost goes into reading: the rest is for guesses.
_READING_SHARE = 0.5
# With fewer tokens of the text a model's guesses are worth nothing.
_LEAST_READ = 32
# What reading a token costs until it is known, in plain steps.
_UNKNOWN_READING = 0.03
# Lengths that are weighed of a draft that chooses its own.
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# So many tokens of others' guesses are worth more than a try.
_WORTH_WAITING = 0.5
# Rounds in which what was read has to pay.
_HORIZON = 48


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
    limits: what a pass of the target takes. curve: v(m). may_lose: seconds that the next round may lose
    against a plain one. clock: seconds.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        can_branch: bool,
        *,
        limits: Limits | None = None,
        curve: Curve = gentle,
        may_lose: Callable[[], float] = lambda: inf,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self._drafters = tuple(drafters)
        self._can_branch = can_branch
        self._limits = limits or Limits()
        self._curve = curve
        self._clock = clock
        self._may_lose = may_lose
        # By kind of text; those of another kind begin with what was learnt last.
        self._by_kind: dict[str, tuple[Record, ...]] = {}
        self._records = tuple(Record(drafter.lookup) for drafter in drafters)
        self._probes = tuple(Probe() for _ in drafters)
        # Seconds of reading a token.
        self._reading = tuple(Mean() for _ in drafters)
        self._plain_seconds = Mean()
        self._proposed_at: float | None = None
        self._asked: dict[int, _Said] = {}
        self._speaking: tuple[str, ...] = ()
        # How deep the last proposal was that cost passes of a model.
        self.drafted_levels = 0
        self._last_token = 0

    @property
    def extra(self) -> Extra:
        return sum((drafter.extra for drafter in self._drafters), Extra())

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._drafters

    @property
    def speaking(self) -> tuple[str, ...]:
        return self._speaking

    def turn_to(self, kind: str) -> None:
        """The next text is of this kind: go by what guesses were worth in such texts."""
        if kind not in self._by_kind:
            known, fresh = self._records, tuple(Record(drafter.lookup) for drafter in self._drafters)
            for record, last in zip(fresh, known, strict=True):
                record.restore(last.kept())
                record.doubt()
            self._by_kind[kind] = fresh
        self._records = self._by_kind[kind]

    def kept(self) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        for i, drafter in enumerate(self._drafters):
            parts = {f"record.{kind}": self._by_kind[kind][i].kept() for kind in self._by_kind}
            parts |= {"own": drafter.kept(), "reading": {"mean": self._reading[i].kept()}}
            parts["probe"] = {"wait": self._probes[i].kept()}
            for part, values in parts.items():
                found |= {f"{drafter.name}.{part}.{name}": value for name, value in values.items()}
        return found | {"plain": self._plain_seconds.kept()}

    def restore(self, kept: Mapping[str, NDArray[Any]]) -> None:
        for i, drafter in enumerate(self._drafters):
            drafter.restore(_part(kept, f"{drafter.name}.own."))
            self._reading[i].restore(kept[f"{drafter.name}.reading.mean"])
            self._probes[i].restore(kept[f"{drafter.name}.probe.wait"])
        kinds = {name.split(".")[2] for name in kept if ".record." in name}
        for kind in kinds:
            records = tuple(Record(drafter.lookup) for drafter in self._drafters)
            for record, drafter in zip(records, self._drafters, strict=True):
                record.restore(_part(kept, f"{drafter.name}.record.{kind}."))
            self._by_kind[kind] = records
        self._plain_seconds.restore(kept["plain"])

    def begin(self, tokens: Sequence[int]) -> None:
        self._asked = {}
        self._last_token = tokens[-1]
        for drafter in self._drafters:
            drafter.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        asked = self._asked = {}
        self.read_seconds = 0.0
        for i in sorted(range(len(self._drafters)), key=lambda i: not self._drafters[i].lookup):
            if self._wanted(i, draft_length) and self._read(i):
                started = self._clock()
                said = self._drafters[i].propose(sampler, acceptance, draft_length)
                self._records[i].asked(said, self._clock() - started)
                asked[i] = _Said(said, self._records[i].chances(said))
        self.drafted_levels = max(
            (max(said.tree.depths) for i, said in asked.items() if not self._drafters[i].lookup), default=0
        )
        tree = self._joined() if asked else TokenTree.chain(self._last_token)
        if tree.drafted:
            self._speaking = tuple(self._drafters[i].name for i in sorted(asked) if asked[i].tree.drafted)
        self._proposed_at = self._clock()
        return tree

    def _wanted(self, i: int, draft_length: int) -> bool:
        """Is a drafter to be asked: because it is likely to pay, or to see whether it does by now?"""
        gain = self._gain(i, draft_length)
        if gain > 1.0:
            self._probes[i].paid()
            return True
        # Beside guesses of others a try would cost what those bring.
        if sum(self._said().reached) > _WORTH_WAITING:
            return False
        # What seems to be nearly worth it loses next to nothing when it is tried.
        rounds = self._cost(i, 1) + self._curve(2) if self._drafters[i].adapts else self._usual(i)
        if not self._probes[i].due((1.0 - gain) * rounds):
            return False
        self._records[i].doubt()
        self._drafters[i].dare()
        return True

    def _usual(self, i: int) -> float:
        """What a round with a usual draft costs, in plain steps."""
        return self._cost(i) + self._curve(1 + round(self._records[i].rows.value))

    def _read(self, i: int) -> bool:
        """Let a drafter read what it has to; False while that may not be paid for."""
        drafter = self._drafters[i]
        tokens = self._to_read(i)
        if not tokens:
            return not drafter.unread
        started = self._clock()
        drafter.read(tokens)
        seconds = self._clock() - started
        self.read_seconds += seconds
        self._reading[i].add(seconds / max(tokens, 1))
        return True

    def _to_read(self, i: int) -> int:
        """So many tokens a drafter would read now: 0 where there is nothing to, or what may be lost forbids it."""
        unread, whole = self._drafters[i].unread, self._drafters[i].unread_whole
        most, each = self._may_lose(), self._reading_seconds(i)
        if most == inf or not whole:
            return whole
        # What a token takes is unknown before a pass was seen.
        affordable = int(_READING_SHARE * most / each) if each > 0.0 else 0
        if affordable >= whole:
            return whole
        return min(unread, affordable) if affordable >= min(unread, _LEAST_READ) else 0

    @property
    def reading_seconds(self) -> float:
        """What the next proposal may spend on reading, before it guesses."""
        return sum(
            self._to_read(i) * self._reading_seconds(i)
            for i, drafter in enumerate(self._drafters)
            if not drafter.lookup
        )

    def _reading_seconds(self, i: int) -> float:
        """What it takes a drafter to read a token."""
        reading = self._reading[i]
        return reading.value if reading.count else _UNKNOWN_READING * self._plain_seconds.value

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

    def _known(self, i: int) -> bool:
        """Is it known what a drafter costs?"""
        return min(self._records[i].seconds.count, self._plain_seconds.count) >= _MEASURED_ROUNDS

    def _cost(self, i: int, levels: int | None = None) -> float:
        """What a draft of so many levels costs, or its usual one, in plain steps; 0 until it is measured."""
        if not self._known(i) or self._plain_seconds.value <= 0.0:
            return 0.0
        record = self._records[i]
        drafting = record.seconds.value if levels is None else levels * record.level_seconds
        reading = self._drafters[i].unread * self._reading_seconds(i) / _HORIZON
        return (drafting + reading) / self._plain_seconds.value

    def _said(self) -> Said:
        """What was said in this round so far."""
        said = Said()
        for other, its in self._asked.items():
            said = said.also(*its.levels, self._cost(other))
        return said

    def _gain(self, i: int, draft_length: int) -> float:
        """What asking a drafter is likely to make of the round's worth: more than 1 pays."""
        drafter, record = self._drafters[i], self._records[i]
        if drafter.lookup or (not self._known(i) and not record.silent):
            return inf
        if not self._known(i):
            return 0.0
        said = self._said()
        reached = record.survival(draft_length)
        usual = max(1, min(draft_length, round(record.levels.value)))
        best = max(
            said.worth_with(
                reached[:levels],
                round(levels * record.level_rows),
                self._cost(i, levels),
                self._curve,
                self._limits.max_width,
                self._can_branch,
            )
            for levels in (_LENGTHS if drafter.adapts else (usual,))
            if levels <= draft_length
        )
        return best / said.worth(self._curve)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._proposed_at is not None:
            self._plain_seconds.add((self._clock() - self._proposed_at) / self._curve(tree.width))
        self._proposed_at = None
        for drafter in self._drafters:
            drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for i, record in enumerate(self._records):
            if i in self._asked:
                said = self._asked[i].tree
                record.learn(said, tokens)
                if said.drafted and len(said.walk(tokens)) > max(said.depths):
                    self._probes[i].promising()
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


def _part(kept: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """What was kept under a prefix, by the names after it."""
    return {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
