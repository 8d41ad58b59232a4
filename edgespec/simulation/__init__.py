"""The policy on machines and texts that are not here: a simulated clock, the real loop, the real policy."""

from edgespec.simulation.machines import MACHINES, Machine
from edgespec.simulation.oracle import best_fixed, fixed_seconds
from edgespec.simulation.traces import Trace, flips, stationary, stretches
from edgespec.simulation.world import World

__all__ = [
    "MACHINES",
    "Machine",
    "Trace",
    "World",
    "best_fixed",
    "fixed_seconds",
    "flips",
    "stationary",
    "stretches",
]
