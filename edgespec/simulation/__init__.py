"""The policy on machines and texts that are not here: a simulated clock, the real loop, the real policy."""

from edgespec.simulation.machines import MACHINES, SimulatedMachine
from edgespec.simulation.oracle import PLAIN, Fixed, best_fixed, fixed_seconds
from edgespec.simulation.policy import policy
from edgespec.simulation.report import Case, Outcome, judged, recovery_tokens
from edgespec.simulation.traces import Text, Trace, flips, passages, recorded, replies, stationary, stretches
from edgespec.simulation.world import World

__all__ = [
    "MACHINES",
    "PLAIN",
    "Case",
    "Fixed",
    "Outcome",
    "SimulatedMachine",
    "Text",
    "Trace",
    "World",
    "best_fixed",
    "fixed_seconds",
    "flips",
    "judged",
    "passages",
    "policy",
    "recorded",
    "recovery_tokens",
    "replies",
    "stationary",
    "stretches",
]
