"""Evaluation of the controller against plain decoding, the best fixed draft length and the loss limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec.methods.auto.loss_limit import LossLimits
from edgespec.methods.costs.curve import CostCurve
from scripts.simulation.controller import make_controller
from scripts.simulation.machines import SimulatedMachine
from scripts.simulation.oracle import PLAIN, best_fixed, fixed_seconds
from scripts.simulation.traces import Text
from scripts.simulation.world import World


def steady(_: float) -> float:
    """Return 1, the slowdown of an undisturbed machine."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of replies on which the controller is evaluated.

    Attributes:
        warm: Number of other replies the controller generates before each evaluated one.
        distort: Returns the curve with which the controller starts, given the true one.
        slowness: Returns the factor by which everything takes longer, given the seconds since the evaluated
            reply began.
    """

    name: str
    texts: Sequence[Text]
    warm: int = 0
    distort: Callable[[CostCurve], CostCurve] = lambda curve: curve
    slowness: Callable[[float], float] = steady


class Outcome(NamedTuple):
    """Results of a case. Speeds are relative to plain decoding.

    Attributes:
        auto: Geometric mean of the controller's speeds.
        best: Geometric mean of the speeds of each reply's best fixed draft length.
        worst: Speed of the slowest reply.
        slower: Share of replies more than 1% slower than plain decoding.
        limit_left_steps: Least distance to the loss limit over all tokens, in target steps; negative if the
            limit was exceeded. On machines that slow down, the least distance at the end of a reply.
    """

    auto: float
    best: float
    worst: float
    slower: float
    limit_left_steps: float

    @property
    def share(self) -> float:
        """Speed as a fraction of the speed of the best fixed draft lengths."""
        return self.auto / self.best


def evaluate(machine: SimulatedMachine, case: Case, limits: LossLimits | None = None) -> Outcome:
    """Return the results of a case, with a new controller for each reply."""
    limits = limits or LossLimits()
    autos, bests, left = [], [], []
    for at, text in enumerate(case.texts):
        world = _Delayed(machine, case.slowness)
        drafter = make_controller(
            world, initial_curve=case.distort(machine.curve), limits=limits, lookup=text.lookup is not None
        )
        for before in range(case.warm):
            world.reply(drafter, case.texts[(at + 1 + before) % len(case.texts)])
        world.start_slowing()
        seconds = world.reply(drafter, text)
        plain = fixed_seconds(machine, text, PLAIN, case.slowness)
        autos.append(plain / seconds)
        bests.append(plain / best_fixed(machine, text, case.slowness)[1])
        if case.slowness is steady:
            left.append(_left(world.moments, limits))
        else:
            steps = limits.steps * case.slowness(seconds)
            left.append((1.0 + limits.rate) * plain + steps - seconds)
    slower = float(np.mean(np.array(autos) < 0.99))
    return Outcome(_mean(autos), _mean(bests), min(autos), slower, min(left))


class _Delayed(World):
    """A world that slows down only during the evaluated reply."""

    def __init__(self, machine: SimulatedMachine, slowness: Callable[[float], float]) -> None:
        super().__init__(machine, lambda now: slowness(now - self._from) if self._from >= 0.0 else 1.0)
        self._from = -1.0

    def start_slowing(self) -> None:
        self._from = self.seconds


def _left(moments: Sequence[float], limits: LossLimits) -> float:
    tokens = np.arange(1, len(moments) + 1)
    return float(((1.0 + limits.rate) * tokens + limits.steps - np.array(moments)).min())


def _mean(speeds: Sequence[float]) -> float:
    return float(np.exp(np.log(speeds).mean()))


# Number of tokens over which a speed is averaged, and fraction of the best speed that counts as recovered.
_WINDOW = 20
_RECOVERED_SHARE = 0.9


def recovery_tokens(machine: SimulatedMachine, texts: Sequence[Text], at: int) -> int:
    """Return how many tokens the controller takes to recover from a change of the acceptance rate.

    It has recovered when its mean speed over the next 20 tokens and all replies is within 10% of the best
    fixed draft length for the tokens after the change.

    Args:
        machine: The machine.
        texts: Replies whose acceptance rate changes.
        at: Token at which it changes.

    Returns:
        The number of tokens; all remaining ones if it does not recover.
    """
    paces = []
    for text in texts:
        world = World(machine)
        world.reply(make_controller(world), text)
        paces.append(np.diff([0.0, *world.moments]))
    mean = np.mean(paces, axis=0)[at:]
    length = len(mean)
    rest = [_rest(text, at) for text in texts]
    best = min(
        np.mean([fixed_seconds(machine, text, choice) for text in rest]) / length
        for choice in {PLAIN, *(best_fixed(machine, text)[0] for text in rest)}
    )
    sums = np.concatenate([[0.0], np.cumsum(mean)])
    for start in range(length - _WINDOW):
        if best >= _RECOVERED_SHARE * (sums[start + _WINDOW] - sums[start]) / _WINDOW:
            return start
    return length


def _rest(text: Text, at: int) -> Text:
    model = text.model
    return Text(text.name, type(model)(model.is_right[at:], model.confidence[at:]))
