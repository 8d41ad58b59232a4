"""The estimate of a training's duration, whose steps must be short, because they cannot be interrupted."""

from __future__ import annotations

import pytest

from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.errors import CancelledError
from edgespec.model.drafter_training import TrainingBatch
from edgespec.train import TrainingTarget
from edgespec.train.timing import measure_speed
from edgespec.train.writing import ConversationWriter

run_step = MlxHeadTrainer.step


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of conversations in each trial step."""
    seen: list[int] = []

    def step(trainer: MlxHeadTrainer, batch: TrainingBatch, done: float) -> float:
        seen.append(len(batch.tokens))
        return run_step(trainer, batch, done)

    monkeypatch.setattr(MlxHeadTrainer, "step", step)
    return seen


def estimate(target: TrainingTarget, until: int | None = None) -> float:
    reports: list[str] = []

    def progress(description: str, _fraction: float) -> bool:
        reports.append(description)
        return until is None or reports.count("estimating the time") < until

    start = ConversationWriter(target.teacher, target.template, []).question_start
    student = target.teacher.head("medusa")
    return measure_speed(target.teacher, student, start, progress).remaining_seconds(10_000, 0, 0)


@pytest.mark.long
def test_fast_machines_try_larger_steps(
    target: TrainingTarget, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.train.timing._LONG_STEP_SECONDS", 60.0)
    assert estimate(target) > 0.0
    assert sizes == [1, 8, 32]


@pytest.mark.long
def test_slow_machines_run_one_small_step(
    target: TrainingTarget, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.train.timing._LONG_STEP_SECONDS", 0.0)
    assert estimate(target) > 0.0
    assert sizes == [1]


def test_an_estimate_is_cancelled_between_its_steps(
    target: TrainingTarget, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.train.timing._LONG_STEP_SECONDS", 60.0)
    with pytest.raises(CancelledError):
        estimate(target, until=2)
    assert sizes == [1]
