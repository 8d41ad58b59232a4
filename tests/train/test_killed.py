"""A training that is killed, or cannot write its files, continues with the same result."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.errors import CancelledError, EdgespecError
from edgespec.train import TrainingResult
from tests.raising import raises
from tests.train.conftest import KilledError, Stops, Train, same_head


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Make the operating system reject larger files, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.long
def test_a_training_killed_while_it_saved_its_settings(
    finished: TrainingResult, train: Train, tmp_path: Path
) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "settings.json.tmp").write_text('{"method"')
    train(tmp_path)
    assert same_head(tmp_path, finished)


@pytest.mark.long
def test_a_training_killed_while_it_saved_its_state(
    finished: TrainingResult, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_trainer: MlxHeadTrainer, path: Path) -> None:
        path.write_bytes(b"half")
        raise KilledError

    with pytest.raises(CancelledError):
        train(tmp_path, Stops(2))
    with monkeypatch.context() as patch:
        patch.setattr(MlxHeadTrainer, "save_state", killed)
        # Stop before the first step, so that the state for the same number of steps is saved again.
        with pytest.raises(KilledError):
            train(tmp_path, Stops(0))
    train(tmp_path)
    assert same_head(tmp_path, finished)


@pytest.mark.parametrize("moved", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_training_killed_while_it_published_the_head(
    finished: TrainingResult,
    train: Train,
    unmeasured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moved: int,
) -> None:
    shutil.copytree(unmeasured, tmp_path, dirs_exist_ok=True)
    replace, left = Path.replace, moved

    def killed(path: Path, other: Path) -> Path:
        nonlocal left
        if path.parent.name == "kept":
            left -= 1
            if left < 0:
                raise KilledError
        return replace(path, other)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KilledError):
            train(tmp_path)
    again = Stops()
    result = train(tmp_path, again)
    assert again.seen == []
    assert (result.kept, result.earlier, result.curve) == (True, None, finished.curve)
    assert same_head(tmp_path, finished)
    assert result.plot is not None
    assert result.plot.exists()


@pytest.mark.long
@pytest.mark.parametrize("deleted", [1, 4])
def test_a_training_killed_while_it_deleted_its_files(
    finished: TrainingResult, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    unlink, left = Path.unlink, deleted

    def killed(path: Path, *args: Any, **options: Any) -> None:
        nonlocal left
        if (tmp_path / "model.safetensors").exists() and path.name != "lock":
            left -= 1
            if left < 0:
                raise KilledError
        unlink(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KilledError):
            train(tmp_path)
    # The head was already published, so another training compares its own head with it.
    result = train(tmp_path)
    assert result.figures == finished.figures
    assert same_head(tmp_path, finished)
    assert not (tmp_path / "training").exists()


def no_file_is_written(train: Train, folder: Path, limit_bytes: int) -> None:
    with (
        raises(EdgespecError, "training", code="file_not_written"),
        largest_file(limit_bytes),
    ):
        train(folder)
    assert not list((folder / "training").glob("*.tmp"))


def test_files_that_cannot_be_written(
    finished: TrainingResult, train: Train, unmeasured: Path, tmp_path: Path
) -> None:
    no_file_is_written(train, tmp_path / "new", 100)
    folder = shutil.copytree(unmeasured, tmp_path / "trained")
    no_file_is_written(train, folder, 100)
    train(folder)
    assert same_head(folder, finished)


@pytest.mark.long
def test_a_state_that_cannot_be_written(finished: TrainingResult, train: Train, tmp_path: Path) -> None:
    no_file_is_written(train, tmp_path, 20_000)
    train(tmp_path)
    assert same_head(tmp_path, finished)
