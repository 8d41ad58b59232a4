"""Simulation of `--method auto` on other machines, with the real decode loop and controller."""

from scripts.simulation.controller import make_controller
from scripts.simulation.machines import MACHINES, SimulatedMachine
from scripts.simulation.oracle import PLAIN, Fixed, best_fixed, fixed_seconds
from scripts.simulation.report import Case, Outcome, evaluate, recovery_tokens
from scripts.simulation.traces import Text, Trace, flips, passages, recorded, replies, stationary, stretches
from scripts.simulation.world import SimulatedModel, World

__all__ = [
    "MACHINES",
    "PLAIN",
    "Case",
    "Fixed",
    "Outcome",
    "SimulatedMachine",
    "SimulatedModel",
    "Text",
    "Trace",
    "World",
    "best_fixed",
    "evaluate",
    "fixed_seconds",
    "flips",
    "make_controller",
    "passages",
    "recorded",
    "recovery_tokens",
    "replies",
    "stationary",
    "stretches",
]
