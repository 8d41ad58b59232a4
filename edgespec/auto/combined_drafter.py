"""Several drafters at once: their proposals in one tree, verified in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from edgespec.auto.drafter_stats import MEASURED_ROUNDS, DrafterStats
from edgespec.auto.expected_gain import RoundEstimate
from edgespec.auto.merging import merged, trimmed
from edgespec.costs.curve import Curve, gentle
from edgespec.costs.pass_limits import PassLimits
from edgespec.drafters.base import Drafter, MemoryUse
from edgespec.drafters.running_stats import RunningMean
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["CombinedDrafter"]

# So much of what may be lost goes into reading: the rest is for guesses.
_READING_SHARE = 0.5
# With fewer tokens of the text a model's guesses are worth nothing.
_LEAST_READ = 32
# Lengths that are weighed of a draft that chooses its own.
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# So many tokens of others' guesses are worth more than a try.
_WORTH_WAITING = 0.5


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
    against a plain one; may_try: what of that is for guesses that do not seem to pay. clock: seconds.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        can_branch: bool,
        *,
        limits: PassLimits | None = None,
        curve: Curve = gentle,
        may_lose: Callable[[], float] = lambda: inf,
        may_try: Callable[[], float] = lambda: inf,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self._members = tuple(DrafterStats(drafter) for drafter in drafters)
        self._can_branch = can_branch
        self._limits = limits or PassLimits()
        self._curve = curve
        self._clock = clock
        self._may_lose, self._may_try = may_lose, may_try
        self._plain_seconds = RunningMean()
        self._proposed_at: float | None = None
        self._asked: dict[DrafterStats, _Said] = {}
        self._contributors: tuple[str, ...] = ()
        # How deep the last proposal was that cost passes of a model.
        self.drafted_levels = 0
        # Time spent on prefill in the last proposal.
        self.prefill_seconds = 0.0
        self._last_token = 0

    @property
    def memory_use(self) -> MemoryUse:
        return sum((member.drafter.memory_use for member in self._members), MemoryUse())

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return tuple(member.drafter for member in self._members)

    @property
    def looks_up(self) -> bool:
        """Do some of its guesses cost no passes of a model?"""
        return any(member.lookup for member in self._members)

    @property
    def contributors(self) -> tuple[str, ...]:
        return self._contributors

    def turn_to(self, kind: str) -> None:
        """The next text is of this kind: go by what guesses were worth in such texts."""
        for member in self._members:
            member.turn_to(kind)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        found = {"plain": self._plain_seconds.kept()}
        for member in self._members:
            found |= member.kept()
        return found

    def restore_statistics(self, kept: Mapping[str, NDArray[Any]]) -> None:
        for member in self._members:
            member.restore(kept)
        self._plain_seconds.restore(kept["plain"])

    def begin(self, tokens: Sequence[int]) -> None:
        self._asked = {}
        self._last_token = tokens[-1]
        for member in self._members:
            member.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        return self.propose_within(sampler, acceptance, draft_length, draft_length)

    def propose_within(
        self, sampler: Sampler, acceptance: Acceptance, draft_length: int, levels: int
    ) -> TokenTree:
        """Propose where those whose guesses cost passes of a model may make so many `levels` only."""
        asked = self._asked = {}
        self.prefill_seconds = 0.0
        for member in sorted(self._members, key=lambda member: not member.lookup):
            if member.lookup or (levels and self._ready(member, levels)):
                started = self._clock()
                length = draft_length if member.lookup else levels
                said = member.drafter.propose(sampler, acceptance, length)
                member.asked(said, length, self._clock() - started)
                asked[member] = _Said(said, member.record.chances(said))
        self.drafted_levels = max(
            (max(said.tree.depths) for member, said in asked.items() if not member.lookup), default=0
        )
        tree = self._joined() if asked else TokenTree.chain(self._last_token)
        if tree.drafted:
            drafted = (member for member in self._in_order() if asked[member].tree.drafted)
            self._contributors = tuple(member.drafter.name for member in drafted)
        self._proposed_at = self._clock()
        return tree

    def _in_order(self) -> list[DrafterStats]:
        """Those that were asked, as a method names them."""
        return [member for member in self._members if member in self._asked]

    def _ready(self, member: DrafterStats, levels: int) -> bool:
        """Is a drafter to be asked: because it is likely to pay, or to see whether it does by now?

        It has then read what it has to.
        """
        gain = self._gain(member, levels)
        if gain > 1.0:
            if levels > member.refused_levels:
                member.probe.paid()
            elif member.probe.due(self._cost(member, 1) + self._curve(2) - 1.0):
                member.force_draft()
            return self._read(member)
        # Beside guesses of others a try would cost what those bring.
        if sum(self._said().reached) > _WORTH_WAITING:
            return False
        # What seems to be nearly worth it loses next to nothing when it is tried.
        depth, rows = (1, 1) if member.drafter.chooses_length else (None, round(member.record.rows.value))
        price = max(1.0 - gain, 0.0) * (self._cost(member, depth) + self._curve(1 + rows))
        price += self._entrance(member)
        if member.probe.rare and price * self._plain_seconds.value > self._may_try():
            return False
        if not member.probe.due(price):
            return False
        member.record.doubt()
        member.force_draft()
        return self._read(member)

    def _entrance(self, member: DrafterStats) -> float:
        """What a drafter would read before its first guess in this text, in plain steps.

        Later the same tokens are to be read however rare its tries are: then that is no price of one.
        """
        plain = self._plain_seconds.value
        if member.has_entered or plain <= 0.0:
            return 0.0
        return self._to_read(member) * member.reading_seconds(plain) / plain

    def _read(self, member: DrafterStats) -> bool:
        """Let a drafter read what it has to; False while that may not be paid for."""
        tokens = self._to_read(member)
        if not tokens:
            return not member.pending_tokens
        started = self._clock()
        member.prefill(tokens)
        seconds = self._clock() - started
        self.prefill_seconds += seconds
        member.has_read(tokens, seconds)
        return True

    def _to_read(self, member: DrafterStats) -> int:
        """So many tokens it would read now: 0 where there is nothing to, or what may be lost forbids it."""
        unread, whole = member.pending_tokens, member.full_pending_tokens
        most, each = self._may_lose(), member.reading_seconds(self._plain_seconds.value)
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
            self._to_read(member) * member.reading_seconds(self._plain_seconds.value)
            for member in self._members
            if not member.lookup
        )

    def _joined(self) -> TokenTree:
        """What was said, in one tree, as far as it pays."""
        asked = self._asked
        chosen = self._in_order() if self._can_branch else self._most_promising()
        return trimmed(
            merged([asked[member].tree for member in chosen]),
            [asked[member].chances for member in chosen],
            [member.lookup for member in chosen],
            self._limits,
            self._curve,
            sum(self._cost(member) for member in chosen),
        )

    def _most_promising(self) -> list[DrafterStats]:
        """The one whose chain is taken: one that was worth its passes, else the best lookup."""
        drafted = [member for member in self._in_order() if self._asked[member].tree.drafted]
        others = [member for member in drafted if not member.lookup]
        if others:
            return others[:1]
        return [max(drafted or self._asked, key=lambda member: sum(self._asked[member].chances))]

    def _known(self, member: DrafterStats) -> bool:
        """Is it known what a drafter costs?"""
        return member.measured and self._plain_seconds.count >= MEASURED_ROUNDS

    def _cost(self, member: DrafterStats, levels: int | None = None) -> float:
        """What a draft of so many levels costs, or its usual one, in plain steps; 0 until it is measured."""
        if not self._known(member) or self._plain_seconds.value <= 0.0:
            return 0.0
        return member.cost(self._plain_seconds.value, levels)

    def _said(self) -> RoundEstimate:
        """What was said in this round so far."""
        said = RoundEstimate()
        for member, its in self._asked.items():
            said = said.also(*its.levels, self._cost(member))
        return said

    def _gain(self, member: DrafterStats, draft_length: int) -> float:
        """What asking a drafter is likely to make of the round's worth: more than 1 pays."""
        record = member.record
        if not self._known(member) and not record.silent:
            return inf
        if not self._known(member):
            return 0.0
        said = self._said()
        reached = record.survival(draft_length)
        usual = max(1, min(draft_length, round(record.levels.value)))
        best = max(
            said.worth_with(
                reached[:levels],
                round(levels * record.level_rows),
                self._cost(member, levels),
                self._curve,
                self._limits.max_width,
                self._can_branch,
            )
            for levels in (_LENGTHS if member.drafter.chooses_length else (usual,))
            if levels <= draft_length
        )
        return best / said.worth(self._curve)

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._proposed_at is not None:
            self._plain_seconds.add((self._clock() - self._proposed_at) / self._curve(tree.width))
        self._proposed_at = None
        for drafter in self.parts:
            drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for member, said in self._asked.items():
            member.record.learn(said.tree, tokens)
            if said.tree.drafted and len(said.tree.walk(tokens)) > max(said.tree.depths):
                member.probe.promising()
        self._asked = {}
        if tokens:
            self._last_token = tokens[-1]
        for drafter in self.parts:
            drafter.commit(tokens)

    def note(self) -> str:
        return "; ".join(note for drafter in self.parts if (note := drafter.note()))

    def interrupt(self, enabled: bool) -> None:
        for drafter in self.parts:
            drafter.interrupt(enabled)

    def close(self) -> None:
        for drafter in self.parts:
            drafter.close()
