"""The policy on machines and texts that are not here: a simulated clock, the real loop, the real policy."""

from scripts.simulation.controller import make_controller
from scripts.simulation.machines import MACHINES, SimulatedMachine
from scripts.simulation.oracle import PLAIN, Fixed, best_fixed, fixed_seconds
from scripts.simulation.report import Case, Outcome, judged, recovery_tokens
from scripts.simulation.traces import Text, Trace, flips, passages, recorded, replies, stationary, stretches
from scripts.simulation.world import World

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
    "make_controller",
    "passages",
    "recorded",
    "recovery_tokens",
    "replies",
    "stationary",
    "stretches",
]
