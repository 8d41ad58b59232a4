"""The best fixed choice in hindsight: what a policy is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scripts.simulation.machines import SimulatedMachine
from scripts.simulation.traces import Text

__all__ = ["PLAIN", "Fixed", "best_fixed", "fixed_seconds"]

_LONGEST = 16


@dataclass(frozen=True, slots=True)
class Fixed:
    """A choice that stays: so many drafted tokens in every round, of the model or of the lookup; 0: none."""

    draft_length: int
    lookup: bool = False


PLAIN = Fixed(0)


def fixed_seconds(
    machine: SimulatedMachine, text: Text, choice: Fixed, slowness: Callable[[float], float] = lambda _: 1.0
) -> float:
    """The time of a reply with one choice, what the draft model has to read included."""
    trace = text.lookup if choice.lookup and text.lookup else text.model
    drafting = 0.0 if choice.lookup else machine.draft_cost
    right, speaks, length, at = trace.right, trace.speaks, text.length, 0
    reads = choice.draft_length > 0 and not choice.lookup
    seconds = machine.reading_cost * max(text.prompt_tokens - 2, 0) * slowness(0.0) if reads else 0.0
    while at < length:
        levels = min(choice.draft_length, length - at - 1)
        if speaks is not None:
            said = 0
            while said < levels and speaks[at + said]:
                said += 1
            levels = said
        seconds += (levels * drafting + machine.curve.v(levels + 1)) * slowness(seconds)
        accepted = 0
        while accepted < levels and right[at + accepted]:
            accepted += 1
        at += accepted + 1
    return seconds


def best_fixed(
    machine: SimulatedMachine, text: Text, slowness: Callable[[float], float] = lambda _: 1.0
) -> tuple[Fixed, float]:
    """The choice that would have been best for this very reply, and its time."""
    choices = [Fixed(length) for length in range(_LONGEST + 1)]
    if text.lookup:
        choices += [Fixed(length, lookup=True) for length in range(1, _LONGEST + 1)]
    times = [fixed_seconds(machine, text, choice, slowness) for choice in choices]
    best = min(range(len(choices)), key=times.__getitem__)
    return choices[best], times[best]
