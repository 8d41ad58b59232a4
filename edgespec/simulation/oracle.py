"""The best fixed choice in hindsight: what a policy is compared with."""

from __future__ import annotations

from edgespec.simulation.machines import Machine
from edgespec.simulation.traces import Trace

__all__ = ["best_fixed", "fixed_seconds"]

_LONGEST = 16


def fixed_seconds(machine: Machine, trace: Trace, draft_length: int, prompt_tokens: int = 0) -> float:
    """The time of a reply with so many drafted tokens in every round; 0 is plain decoding."""
    length, at = len(trace.right), 0
    seconds = machine.reading_cost * prompt_tokens if draft_length else 0.0
    while at < length:
        levels = min(draft_length, length - at - 1)
        seconds += levels * machine.draft_cost + machine.curve.v(levels + 1)
        right = 0
        while right < levels and trace.right[at + right]:
            right += 1
        at += right + 1
    return seconds


def best_fixed(machine: Machine, trace: Trace, prompt_tokens: int = 0) -> tuple[int, float]:
    """The draft length that would have been best for this very reply, and its time."""
    times = [fixed_seconds(machine, trace, k, prompt_tokens) for k in range(_LONGEST + 1)]
    best = min(range(_LONGEST + 1), key=times.__getitem__)
    return best, times[best]
