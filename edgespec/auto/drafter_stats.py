"""One of several drafters, and what is known of asking it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from edgespec.auto.acceptance_stats import AcceptanceStats
from edgespec.auto.retry_schedule import RetrySchedule
from edgespec.drafters.base import BudgetedDrafter, Drafter
from edgespec.drafters.running_stats import RunningMean
from edgespec.engine.tree import TokenTree

__all__ = ["MEASURED_ROUNDS", "DrafterStats"]

# The first rounds are slow, and say little.
MEASURED_ROUNDS = 2
# What reading a token costs until it is known, in plain steps.
_UNKNOWN_READING = 0.03
# Rounds in which what was read has to pay.
_HORIZON = 48


class DrafterStats:
    """A drafter among others: how often its guesses come true, what they cost, when to try it again.

    record, probe: for texts of the present kind. has_entered: it has read something of this text.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._budgeted = drafter if isinstance(drafter, BudgetedDrafter) else None
        self.record = AcceptanceStats(drafter.is_lookup)
        self.probe = RetrySchedule()
        # Asked for so many levels it found that none would pay; to guess so few it has to be dared.
        self.refused_levels = 0
        self.has_entered = False
        # Those of another kind begin with what was learnt last.
        self._by_kind: dict[str, AcceptanceStats] = {}
        self._probes: dict[str, RetrySchedule] = {}
        # Seconds of reading a token.
        self._reading = RunningMean()

    @property
    def pending_tokens(self) -> int:
        """Tokens that the drafter must prefill before its next draft."""
        return self._budgeted.pending_tokens if self._budgeted else 0

    @property
    def full_pending_tokens(self) -> int:
        """Tokens to prefill so that the drafter sees the whole sequence."""
        return self._budgeted.full_pending_tokens if self._budgeted else 0

    def prefill(self, max_tokens: int) -> None:
        """Prefill pending tokens; see `BudgetedDrafter.prefill`."""
        if self._budgeted:
            self._budgeted.prefill(max_tokens)

    def force_draft(self) -> None:
        """Make a short draft in the next round; see `BudgetedDrafter.force_draft`."""
        if self._budgeted:
            self._budgeted.force_draft()

    def begin(self, tokens: Sequence[int]) -> None:
        """A text begins, of which it has read nothing."""
        self.has_entered = False
        self.drafter.begin(tokens)

    def asked(self, said: TokenTree, levels: int, seconds: float) -> None:
        """Asked for so many levels it said this, which took so long."""
        self.record.asked(said, seconds)
        self.refused_levels = levels if self.drafter.chooses_length and not said.drafted else 0

    @property
    def lookup(self) -> bool:
        """Whether its guesses cost no passes of a model."""
        return self.drafter.is_lookup

    @property
    def measured(self) -> bool:
        """Is it known what its guesses cost?"""
        return self.record.seconds.count >= MEASURED_ROUNDS

    def turn_to(self, kind: str) -> None:
        """The next text is of this kind: go by what guesses were worth in such texts."""
        if kind not in self._by_kind:
            fresh = AcceptanceStats(self.lookup)
            fresh.restore(self.record.kept())
            fresh.doubt()
            self._by_kind[kind] = fresh
        self.record = self._by_kind[kind]
        # What pays in one kind of text is no reason to try it soon in another, where it never did.
        self.probe = self._probes.setdefault(kind, RetrySchedule())

    def cost(self, plain_seconds: float, levels: int | None = None) -> float:
        """What a draft of so many levels costs, or its usual one, in plain steps."""
        drafting = self.record.seconds.value if levels is None else levels * self.record.level_seconds
        reading = self.pending_tokens * self.reading_seconds(plain_seconds) / _HORIZON
        return (drafting + reading) / plain_seconds

    def reading_seconds(self, plain_seconds: float) -> float:
        """What it takes to read a token."""
        return self._reading.value if self._reading.count else _UNKNOWN_READING * plain_seconds

    def has_read(self, tokens: int, seconds: float) -> None:
        """It has read so many tokens in so long."""
        self._reading.add(seconds / max(tokens, 1))
        self.has_entered = True

    def kept(self) -> dict[str, NDArray[Any]]:
        """All of it by name, for another run."""
        parts: dict[str, Mapping[str, NDArray[Any]]] = {
            f"record.{kind}": record.kept() for kind, record in self._by_kind.items()
        }
        parts["own"] = self._budgeted.saved_statistics() if self._budgeted else {}
        parts["asking"] = {"reading": self._reading.kept()}
        parts["wait"] = {kind: probe.kept() for kind, probe in self._probes.items()}
        name = self.drafter.name
        return {f"{name}.{part}.{each}": v for part, values in parts.items() for each, v in values.items()}

    def restore(self, kept: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what was kept. Raises KeyError, ValueError."""
        mine = _part(kept, f"{self.drafter.name}.")
        if self._budgeted:
            self._budgeted.restore_statistics(_part(mine, "own."))
        self._reading.restore(mine["asking.reading"])
        for kind, waited in _part(mine, "wait.").items():
            self._probes[kind] = RetrySchedule()
            self._probes[kind].restore(waited)
        for kind in {name.split(".")[1] for name in mine if name.startswith("record.")}:
            record = AcceptanceStats(self.lookup)
            record.restore(_part(mine, f"record.{kind}."))
            self._by_kind[kind] = record


def _part(kept: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """What was kept under a prefix, by the names after it."""
    return {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
