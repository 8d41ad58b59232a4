"""How the policy does on a machine and a text: against plain decoding, the best fixed choice, its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.auto.loss_limit import LossLimits
from edgespec.costs.curve import CostCurve
from scripts.simulation.controller import make_controller
from scripts.simulation.machines import SimulatedMachine
from scripts.simulation.oracle import PLAIN, best_fixed, fixed_seconds
from scripts.simulation.traces import Text
from scripts.simulation.world import World

__all__ = ["Case", "Outcome", "judged", "recovery_tokens"]


def steady(_: float) -> float:
    """A machine that always takes the same time."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """Texts of one kind, each said after `warm` others to one policy.

    told: what v(m) the policy believes in, given the true one. slowness: as in World, from the moment on in
    which the reply that is judged begins.
    """

    name: str
    texts: Sequence[Text]
    warm: int = 0
    told: Callable[[CostCurve], CostCurve] = lambda curve: curve
    slowness: Callable[[float], float] = steady


@dataclass(frozen=True, slots=True)
class Outcome:
    """Geometric means over the replies of a case, as speeds over plain decoding.

    share: auto over best, the best fixed choice of each reply in hindsight. worst: the slowest reply. slower:
    the share of replies more than 1 % slower than plain. left_steps: by how many plain steps the bound was
    kept, at the token and in the reply where it was nearest; below zero it was broken. Where a machine slows
    down: at the ends of replies.
    """

    auto: float
    best: float
    worst: float
    slower: float
    left_steps: float

    @property
    def share(self) -> float:
        """Of the speed of the best fixed choice."""
        return self.auto / self.best


def judged(machine: SimulatedMachine, case: Case, limits: LossLimits | None = None) -> Outcome:
    """The policy on all texts of a case, each with a policy of its own."""
    limits = limits or LossLimits()
    autos, bests, left = [], [], []
    for at, text in enumerate(case.texts):
        world = _Delayed(machine, case.slowness)
        drafter = make_controller(
            world, initial_curve=case.told(machine.curve), limits=limits, lookup=text.lookup is not None
        )
        for before in range(case.warm):
            world.reply(drafter, case.texts[(at + 1 + before) % len(case.texts)])
        world.begins()
        seconds = world.reply(drafter, text)
        plain = fixed_seconds(machine, text, PLAIN, case.slowness)
        autos.append(plain / seconds)
        bests.append(plain / best_fixed(machine, text, case.slowness)[1])
        if case.slowness is steady:
            left.append(_left(world.moments, limits))
        else:
            steps = limits.steps * case.slowness(seconds)
            left.append((1.0 + limits.rate) * plain + steps - seconds)
    return Outcome(
        _mean(autos),
        _mean(bests),
        min(autos),
        float(np.mean(np.array(autos) < 0.99)),
        min(left),
    )


class _Delayed(World):
    """A world whose slowness begins with the reply that is judged."""

    def __init__(self, machine: SimulatedMachine, slowness: Callable[[float], float]) -> None:
        super().__init__(machine, lambda now: slowness(now - self._from) if self._from >= 0.0 else 1.0)
        self._from = -1.0

    def begins(self) -> None:
        """The reply that is judged begins."""
        self._from = self.seconds


def _left(moments: Sequence[float], limits: LossLimits) -> float:
    tokens = np.arange(1, len(moments) + 1)
    return float(((1.0 + limits.rate) * tokens + limits.steps - np.array(moments)).min())


def _mean(speeds: Sequence[float]) -> float:
    return float(np.exp(np.log(speeds).mean()))


# Speeds are looked at over so many tokens, and are as good as the best from this share of it on.
_WINDOW = 20
_GOOD = 0.9


def recovery_tokens(machine: SimulatedMachine, texts: Sequence[Text], at: int) -> int:
    """How many tokens after `at`, where rates flip, the policy is nearly as fast as the best fixed choice.

    Within 10 %, in the mean over all texts and the next 20 tokens; the best choice is that for all that comes
    after the flip. As many as there are where it never is.
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
        if best >= _GOOD * (sums[start + _WINDOW] - sums[start]) / _WINDOW:
            return start
    return length


def _rest(text: Text, at: int) -> Text:
    model = text.model
    return Text(text.name, type(model)(model.right[at:], model.sure[at:]))
