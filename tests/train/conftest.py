"""A tiny model with random weights, and a quick way to train a head for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from edgespec.chat.message import Message
from edgespec.errors import CancelledError
from edgespec.train import (
    TrainingPrompt,
    TrainingResult,
    TrainingSettings,
    TrainingTarget,
    load_target,
    train_drafter,
)
from tests.backends.mlx.tiny_checkpoints import write_checkpoint

LAYERS = 6
PROMPTS = [
    TrainingPrompt((Message("user", f"list the file {number} the list"),), ("code", "talk")[number % 2])
    for number in range(12)
]


class KilledError(BaseException):
    """Ends a training like a signal. It is not an Exception, so no handler treats it as a failure."""


def no_progress(_description: str, _fraction: float) -> bool:
    return True


class Stops:
    """A progress callback that cancels training at the n-th report of a certain kind."""

    def __init__(self, after: int | None = None, kind: str = "training") -> None:
        self.left = after
        self.kind = kind
        self.seen: list[str] = []

    def __call__(self, description: str, _fraction: float) -> bool:
        self.seen.append(description)
        if self.left is None or not description.startswith(self.kind):
            return True
        self.left -= 1
        return self.left >= 0


Train = Callable[..., TrainingResult]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("target") / "tiny", "llama", config={"num_hidden_layers": LAYERS}
    )


@pytest.fixture(scope="session")
def target(model: Path) -> Iterator[TrainingTarget]:
    with load_target(model, "tiny", None, no_progress) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def train(target: TrainingTarget) -> Train:
    """Train a head on short replies to 12 prompts, which takes a few seconds."""

    def train(
        folder: Path,
        progress: Any = None,
        tokens: int = 300,
        method: str = "eagle3",
        announced: list[str] | None = None,
        gguf: Path | None = None,
    ) -> TrainingResult:
        def announce(_estimate: object, continued: str) -> None:
            if announced is not None:
                announced.append(continued)

        settings = TrainingSettings(method, target.identity, tokens, "test")
        student = target.teacher.head(method)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("edgespec.train.conversations._MAX_REPLY_TOKENS", 20)
            # Measure the costs in a short trial.
            patch.setattr("edgespec.train.timing._TRIAL_CONVERSATIONS", (1,))
            patch.setattr("edgespec.train.timing._TRIAL_TOKENS", (4,))
            return train_drafter(
                replace(target, gguf=gguf), student, settings, PROMPTS, folder, progress or Stops(), announce
            )

    return train


@pytest.fixture(scope="session")
def unmeasured(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training interrupted before its head was measured. Tests change copies."""
    folder = tmp_path_factory.mktemp("unmeasured")
    with pytest.raises(CancelledError):
        train(folder, Stops(0, "measuring"))
    return folder


@pytest.fixture(scope="session")
def finished(train: Train, unmeasured: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """Return the result of an uninterrupted training whose head was measured later."""
    return train(Path(shutil.copytree(unmeasured, tmp_path_factory.mktemp("finished") / "head")))


def arrays_of(folder: Path, file: str = "model.safetensors") -> dict[str, Any]:
    """The tensors of a published head."""
    arrays: Any = mx.load(str(folder / file))
    return dict(arrays)


def same_head(folder: Path, finished: TrainingResult) -> bool:
    """Return whether a folder contains the same head as an uninterrupted training."""
    found, expected = arrays_of(folder), arrays_of(finished.folder)
    return found.keys() == expected.keys() and all(
        mx.array_equal(array, expected[name]) for name, array in found.items()
    )
