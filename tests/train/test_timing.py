"""The cost estimate of a training, whose steps must be short, because they cannot be interrupted."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.errors import CancelledError
from edgespec.model.drafter_training import TrainingBatch
from edgespec.train import TrainingEstimate, TrainingSettings, TrainingTarget
from edgespec.train.conversations import ConversationWriter
from edgespec.train.run import _estimate
from edgespec.train.state import CurvePoint, TrainingProgress
from edgespec.train.timing import TrainingCosts, measure_costs
from tests.train.test_sources import conversations

run_step = MlxHeadTrainer.step


class Clock:
    """A clock on which each training step takes 2 seconds, plus 0.5 seconds per token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sizes: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def step(self, trainer: MlxHeadTrainer, batch: TrainingBatch, done: float) -> float:
        self.sizes.append(batch.tokens.size)
        self.now += 2.0 + 0.5 * batch.tokens.size
        return run_step(trainer, batch, done)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    def step(trainer: MlxHeadTrainer, batch: TrainingBatch, done: float) -> float:
        return clock.step(trainer, batch, done)

    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(MlxHeadTrainer, "step", step)
    return clock


def costs(target: TrainingTarget, folder: Path, until: int | None = None) -> TrainingCosts:
    reports: list[str] = []

    def progress(description: str, _fraction: float) -> bool:
        reports.append(description)
        return until is None or reports.count("estimating the time") < until

    teacher = target.teacher
    start = ConversationWriter(teacher, target.template, []).question_start
    return measure_costs(teacher, teacher, teacher.head("medusa"), start, folder, progress)


@pytest.mark.parametrize(
    ("long_seconds", "sizes"),
    # After the first step of 32 tokens, each size is measured in two steps.
    [(0.0, [32, 96]), pytest.param(1e9, [32, 96, 384, 1024], marks=pytest.mark.long)],
)
def test_fixed_costs_are_separated_from_those_per_token(
    target: TrainingTarget,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    long_seconds: float,
    sizes: list[int],
) -> None:
    monkeypatch.setattr("edgespec.train.timing._LONG_STEP_SECONDS", long_seconds)
    found = costs(target, tmp_path)
    assert clock.sizes == [32, *(size for size in sizes for _ in range(2))]
    assert found.step_seconds == pytest.approx(2.0)
    assert found.train_seconds == pytest.approx(0.5)
    # A step of 1,536 tokens also holds the logits of these tokens.
    assert found.memory_bytes > 1_536 * 4 * target.teacher.vocabulary.size
    trainer = target.teacher.head("medusa").published(tmp_path)
    assert trainer is None
    assert not list(tmp_path.iterdir())
    assert found.state_bytes > 0


def test_an_estimate_is_cancelled_between_its_steps(
    target: TrainingTarget, clock: Clock, tmp_path: Path
) -> None:
    with pytest.raises(CancelledError):
        costs(target, tmp_path, until=2)
    assert clock.sizes == [32, 32, 32]


FREE = TrainingCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)


def estimate(costs: TrainingCosts, *, written: int = 0, drafters: int = 1) -> TrainingEstimate:
    """Estimate a training on 48,000 tokens after writing some conversations of 100 tokens."""
    settings = TrainingSettings("eagle3", "target", 48_000, "")
    return _estimate(costs, settings, conversations(*[100] * written), TrainingProgress(), drafters)


def test_the_estimate_adds_up_all_work() -> None:
    costs = TrainingCosts(1.0, 10.0, 2.0, 3.0, 5.0, 7_000, 600)
    each = [estimate(replace(FREE, **{name: value})) for name, value in asdict(costs).items()]
    whole = estimate(costs)
    assert whole.seconds == pytest.approx(sum(part.seconds for part in each))
    # Each token of the conversations takes four bytes on disk.
    assert (whole.memory_bytes, whole.disk_bytes) == (7_000, 600 + 4 * 48_000)


def test_the_remaining_work() -> None:
    steps, tokens = replace(FREE, step_seconds=1.0), replace(FREE, train_seconds=1.0)
    evaluations, evaluated = replace(FREE, save_seconds=1.0), replace(FREE, evaluate_seconds=1.0)
    assert estimate(replace(FREE, write_seconds=1.0)).write_seconds == 48_000
    # A 24th of the 48,000 tokens is held out, and each of the others is trained on three times.
    assert estimate(tokens).train_seconds == 3 * 46_000
    assert estimate(steps).train_seconds == -(-3 * 46_000 // 256)
    # All 2,000 held-out tokens are evaluated each time, and once more after the training.
    count = estimate(evaluations).evaluate_seconds
    assert 20 <= count <= 21
    assert estimate(evaluated).evaluate_seconds == (count + 1) * 2_000
    # Half of the conversations have been written.
    assert estimate(replace(FREE, write_seconds=1.0), written=240).write_seconds == 24_000
    assert estimate(evaluated, written=240, drafters=2).evaluate_seconds == (count + 2) * 2_000


def test_finished_work_is_not_estimated() -> None:
    settings = TrainingSettings("eagle3", "target", 48_000, "")
    costs = TrainingCosts(0.0, 1.0, 1_000.0, 0.0, 1.0, 0, 0)
    point = CurvePoint(100, 25_600, 1.0, 1.5)
    state = TrainingProgress(200, 51_200, [1.0] * 100, [point])
    whole, rest = (_estimate(costs, settings, [], each, 1) for each in (TrainingProgress(), state))
    assert whole.train_seconds - rest.train_seconds == 200 + 1_000 * 51_200
    assert whole.evaluate_seconds - rest.evaluate_seconds == 1
