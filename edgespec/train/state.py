"""The saved state of an unfinished training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgespec.backends.head_training import HeadTrainer
from edgespec.errors import ModelFileError, OptionError
from edgespec.files import replace_when_written

__all__ = ["CurvePoint", "TrainingFolder", "TrainingProgress", "TrainingSettings"]


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What is trained. An interrupted training can only be continued with the same settings.

    Attributes:
        method: The kind of head, such as `eagle3`.
        target: A hash of the target's files.
        tokens: Number of tokens of conversations to train with.
        prompts: A hash of the prompts to answer. Empty if the target writes all questions itself.
    """

    method: str
    target: str
    tokens: int
    prompts: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A measurement during the training.

    Attributes:
        steps: Number of training steps so far.
        trained_tokens: Number of tokens in these steps.
        loss: Mean loss of a step since the last measurement.
        tokens_per_pass: Tokens per pass of the target in held-out conversations.
    """

    steps: int
    trained_tokens: int
    loss: float
    tokens_per_pass: float


@dataclass(slots=True)
class TrainingProgress:
    """How far a training has come.

    Attributes:
        steps: Number of finished training steps.
        trained_tokens: Number of tokens in these steps.
        losses: The losses since the last point of the curve.
        curve: The measurements so far.
    """

    steps: int = 0
    trained_tokens: int = 0
    losses: list[float] = field(default_factory=list)
    curve: list[CurvePoint] = field(default_factory=list)

    def add_point(self, tokens_per_pass: float) -> None:
        """Add a measurement to the curve."""
        loss = sum(self.losses) / len(self.losses)
        self.curve.append(CurvePoint(self.steps, self.trained_tokens, loss, tokens_per_pass))
        self.losses = []


class TrainingFolder:
    """The folder in which an unfinished training is saved.

    Args:
        path: The folder. It is created if it does not exist.
        settings: The settings of the training.

    Raises:
        OptionError: The folder contains a training with other settings, or other files.
        ModelFileError: The folder is damaged.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: Path, settings: TrainingSettings) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        file = path / "settings.json"
        if not file.exists():
            # The folder is deleted at the end, so it must not contain anything else.
            if any(path.iterdir()):
                raise OptionError(
                    f"{path} contains other files", "choose another folder for the head with --to"
                )
            _write_json(file, asdict(settings))
            return
        found = _read_json(file)
        names = {"target": "model", "tokens": "--tokens", "prompts": "prompts", "method": "kind of head"}
        other = [names[key] for key, value in asdict(settings).items() if found.get(key) != value]
        if other:
            raise OptionError(
                f"{path} contains an unfinished training with another {other[0]}",
                "repeat its command to continue it, or delete this folder to begin again",
            )

    def conversation_file(self, batch: int) -> Path:
        """Return the path for a batch of conversations."""
        return self.path / f"conversations-{batch:06d}.npz"

    def conversation_files(self) -> list[Path]:
        """Return the files of all batches, in order."""
        return sorted(self.path.glob("conversations-*.npz"))

    def state_file(self, steps: int) -> Path:
        """Return the path for the state of the head after some training steps."""
        return self.path / f"state-{steps:08d}.safetensors"

    def progress(self) -> TrainingProgress:
        """Return how far the training has come. Raises ModelFileError."""
        file = self.path / "progress.json"
        if not file.exists():
            return TrainingProgress()
        found = _read_json(file)
        try:
            return TrainingProgress(
                found["steps"],
                found["trained_tokens"],
                found["losses"],
                [CurvePoint(**point) for point in found["curve"]],
            )
        except (KeyError, TypeError) as error:
            raise _damaged(file) from error

    def save(self, progress: TrainingProgress, trainer: HeadTrainer) -> None:
        """Save the state of the head. If this is interrupted, the state saved before remains valid."""
        current = self.state_file(progress.steps)
        trainer.save_state(current)
        _write_json(self.path / "progress.json", asdict(progress))
        for file in self.path.glob("state-*.safetensors"):
            if file != current:
                file.unlink()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with replace_when_written(path) as unfinished:
        unfinished.write_text(json.dumps(value), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise _damaged(path) from error
    return value


def _damaged(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{path}, which belongs to an interrupted training, is damaged",
        f"delete the folder {path.parent} and train again",
    )
