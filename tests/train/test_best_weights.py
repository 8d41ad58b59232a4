"""Training keeps the best evaluation's weights, even if stopped while it evaluates or saves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgespec.errors import CancelledError, ModelFileError
from edgespec.train.state import TrainingFolder
from tests.raising import raises
from tests.train.conftest import KilledError, Stops, Train, same_head


@pytest.fixture(autouse=True)
def high_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a learning rate for which the head is better in the middle of the training than at the end."""
    monkeypatch.setattr("edgespec.backends.mlx.head_trainer._MATRIX_RATE", 0.3)


@pytest.mark.long
def test_the_weights_of_the_best_evaluation_are_kept(train: Train, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    assert whole.best in whole.curve
    assert whole.best.tokens_per_pass == max(point.tokens_per_pass for point in whole.curve)
    assert whole.best.tokens_per_pass > whole.curve[-1].tokens_per_pass
    # All evaluations use the same conversations, because only one is held out.
    assert whole.figures.tokens_per_pass == whole.best.tokens_per_pass
    assert whole.to_json()["best"]["steps"] == whole.best.steps

    parts = tmp_path / "parts"
    # Stop before and during the first evaluation, and after the best one.
    for stops in (Stops(1), Stops(0, "evaluating"), Stops(whole.best.steps)):
        with raises(CancelledError, "continue"):
            train(parts, stops)
    result = train(parts)
    assert (result.curve, result.best, result.figures) == (whole.curve, whole.best, whole.figures)
    assert same_head(parts, whole)
    assert not (parts / "training").exists()


@pytest.mark.long
def test_a_training_stopped_in_an_evaluation_repeats_only_the_evaluation(
    train: Train, tmp_path: Path
) -> None:
    with pytest.raises(CancelledError):
        train(tmp_path, Stops(1, "evaluating"))
    announced: list[str] = []
    again = Stops(0)
    with pytest.raises(CancelledError):
        train(tmp_path, again, announced=announced)
    assert announced == ["2 of 9 training steps are finished"]
    assert [each.partition(",")[0] for each in again.seen[-2:]] == ["evaluating", "training"]


@pytest.mark.long
def test_a_training_killed_between_publishing_and_saving_its_best_weights(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(saved: TrainingFolder, progress: object, _trainer: object) -> None:
        published.extend(saved.path.glob("best-*/model.safetensors"))
        raise KilledError

    published: list[Path] = []
    whole = train(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingFolder, "save", killed)
        with pytest.raises(KilledError):
            train(tmp_path / "killed")
    assert published
    result = train(tmp_path / "killed")
    assert (result.curve, result.best) == (whole.curve, whole.best)
    assert same_head(tmp_path / "killed", whole)


@pytest.mark.long
def test_missing_best_weights_are_reported(train: Train, tmp_path: Path) -> None:
    with pytest.raises(CancelledError):
        train(tmp_path, Stops(3))
    (best,) = (tmp_path / "training").glob("best-*")
    shutil.rmtree(best)
    with raises(ModelFileError, code="training_damaged"):
        train(tmp_path)
