"""The policy on machines and texts that are not here: a simulated clock, the real loop, the real policy."""

from edgespec.simulation.machines import MACHINES, Machine
from edgespec.simulation.oracle import PLAIN, Fixed, best_fixed, fixed_seconds
from edgespec.simulation.policy import policy
from edgespec.simulation.traces import Text, Trace, flips, passages, stationary, stretches
from edgespec.simulation.world import World

__all__ = [
    "MACHINES",
    "PLAIN",
    "Fixed",
    "Machine",
    "Text",
    "Trace",
    "World",
    "best_fixed",
    "fixed_seconds",
    "flips",
    "passages",
    "policy",
    "stationary",
    "stretches",
]
