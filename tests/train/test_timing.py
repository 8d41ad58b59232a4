"""The cost estimate of a training, whose steps must be short, because they cannot be interrupted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.errors import CancelledError
from edgespec.model.drafter_training import TrainingBatch
from edgespec.train import TrainingEstimate, TrainingSettings, TrainingTarget
from edgespec.train.run import _remaining_work
from edgespec.train.state import CurvePoint, TrainingProgress
from edgespec.train.timing import RemainingWork, TrainingCosts, measure_costs
from edgespec.train.writing import ConversationWriter
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


def test_the_estimate_adds_up_all_work() -> None:
    measured = TrainingCosts(1.0, 10.0, 2.0, 3.0, 5.0, 7_000, 600)
    estimate = measured.estimate(RemainingWork(100, 4, 50, 2, 30), tokens=1_000)
    assert estimate == TrainingEstimate(100.0, 4 * 10.0 + 50 * 2.0, 2 * 5.0 + 30 * 3.0, 7_000, 4_600)
    assert estimate.seconds == 340.0


def test_the_remaining_work() -> None:
    settings = TrainingSettings("eagle3", "target", 48_000, "")
    work = _remaining_work(settings, [], TrainingProgress(), drafters=1)
    # A 24th of the 48,000 tokens is held out, and each of the others is trained on three times.
    assert (work.write_tokens, work.train_tokens) == (48_000, 3 * 46_000)
    assert work.steps == -(-3 * 46_000 // 256)
    # All 2,000 held-out tokens are evaluated each time, and once more after the training.
    assert work.evaluated_tokens == (work.evaluations + 1) * 2_000
    assert 20 <= work.evaluations <= 21
    # Half of the conversations have been written, in 240 conversations of 100 tokens.
    half = _remaining_work(settings, conversations(*[100] * 240), TrainingProgress(), drafters=2)
    assert half.write_tokens == 24_000
    assert half.evaluated_tokens == (half.evaluations + 2) * 2_000
    point = CurvePoint(100, 25_600, 1.0, 1.5)
    rest = _remaining_work(settings, [], TrainingProgress(200, 51_200, [1.0] * 100, [point]), drafters=1)
    assert (rest.steps, rest.train_tokens) == (work.steps - 200, 3 * 46_000 - 51_200)
    assert rest.evaluations == work.evaluations - 1
