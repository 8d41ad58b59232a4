"""Find the best fixed draft length in hindsight, with which the controller is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scripts.simulation.machines import SimulatedMachine
from scripts.simulation.traces import Text

# Longest draft length to compare.
_MAX_DRAFT_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Fixed:
    """A draft length used in every round, or 0 for plain decoding. `lookup` selects the lookup drafter."""

    draft_length: int
    lookup: bool = False


PLAIN = Fixed(0)


def fixed_seconds(
    machine: SimulatedMachine, text: Text, choice: Fixed, slowness: Callable[[float], float] = lambda _: 1.0
) -> float:
    """Return the duration of a reply with a fixed draft length, including the draft model's prefill."""
    trace = text.lookup if choice.lookup and text.lookup else text.model
    drafting = 0.0 if choice.lookup else machine.draft_cost
    is_right, has_draft, length, at = trace.is_right, trace.has_draft, text.length, 0
    prefills = choice.draft_length > 0 and not choice.lookup
    seconds = machine.prefill_cost * max(text.prompt_tokens - 2, 0) * slowness(0.0) if prefills else 0.0
    while at < length:
        levels = min(choice.draft_length, length - at - 1)
        if has_draft is not None:
            drafted = 0
            while drafted < levels and has_draft[at + drafted]:
                drafted += 1
            levels = drafted
        seconds += (levels * drafting + machine.curve.v(levels + 1)) * slowness(seconds)
        accepted = 0
        while accepted < levels and is_right[at + accepted]:
            accepted += 1
        at += accepted + 1
    return seconds


def best_fixed(
    machine: SimulatedMachine, text: Text, slowness: Callable[[float], float] = lambda _: 1.0
) -> tuple[Fixed, float]:
    """Return the fastest fixed draft length for this reply, and the duration of the reply."""
    choices = [Fixed(length) for length in range(_MAX_DRAFT_LENGTH + 1)]
    if text.lookup:
        choices += [Fixed(length, lookup=True) for length in range(1, _MAX_DRAFT_LENGTH + 1)]
    times = [fixed_seconds(machine, text, choice, slowness) for choice in choices]
    best = min(range(len(choices)), key=times.__getitem__)
    return choices[best], times[best]
