"""Save and restore the state of an unfinished training."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from edgespec.backends.drafter_training import DrafterTrainer
from edgespec.errors import ModelFileError, OptionError
from edgespec.files import read_regular_file, replace_when_written
from edgespec.train.evaluation import DrafterFigures
from edgespec.train.timing import TrainingSpeed

__all__ = ["CurvePoint", "TrainingFolder", "TrainingProgress", "TrainingSettings"]

T = TypeVar("T")

# A saved speed is damaged if writing or training a token takes longer than this.
_MAX_TOKEN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings of a training. An interrupted training can only be continued with the same settings.

    Attributes:
        method: Kind of drafter, such as `eagle3` or `draft`.
        target: Hash of the target's files.
        tokens: Number of tokens in the conversations to train with.
        prompts: Hash of the user's prompts. Empty if the target writes all questions itself.
        draft: Hash of the files of the draft model to train. Empty for heads.
        lora: Whether a LoRA adapter is trained instead of the draft model's weights.
    """

    method: str
    target: str
    tokens: int
    prompts: str
    draft: str = ""
    lora: bool = False


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation during training.

    Attributes:
        steps: Number of training steps so far.
        trained_tokens: Number of tokens in these steps, including repetitions.
        loss: Mean loss of the steps since the previous evaluation.
        tokens_per_pass: Tokens per target pass on held-out conversations.
    """

    steps: int
    trained_tokens: int
    loss: float
    tokens_per_pass: float


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a training.

    Attributes:
        steps: Number of finished training steps.
        trained_tokens: Number of tokens in these steps, including repetitions.
        losses: Losses of the steps since the last point of `curve`.
        curve: Evaluations so far.
    """

    steps: int = 0
    trained_tokens: int = 0
    losses: list[float] = field(default_factory=list)
    curve: list[CurvePoint] = field(default_factory=list)

    def add_point(self, tokens_per_pass: float) -> None:
        """Add an evaluation to the curve, with the mean of the losses since the previous one."""
        loss = sum(self.losses) / len(self.losses)
        self.curve.append(CurvePoint(self.steps, self.trained_tokens, loss, tokens_per_pass))
        self.losses = []


class TrainingFolder:
    """The folder that holds the state of an unfinished training.

    Args:
        path: The folder, which is created if it does not exist.
        settings: The settings of the training.

    Raises:
        OptionError: The folder contains a training with different settings, or unrelated files.
        ModelFileError: The folder is damaged.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: Path, settings: TrainingSettings) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        file = path / "settings.json"
        if not file.exists():
            # The folder is deleted after training, so it must not contain unrelated files.
            if any(path.iterdir()):
                raise OptionError(
                    f"{path} contains files that edgespec did not create", "choose another folder with --to"
                )
            _write_json(file, asdict(settings))
            return
        found = _read_json(file)
        names = {
            "target": "model",
            "tokens": "--tokens",
            "prompts": "set of prompts",
            "method": "kind of drafter",
            "draft": "draft model",
            "lora": "--lora",
        }
        other = [names[key] for key, value in asdict(settings).items() if found.get(key) != value]
        if other:
            raise OptionError(
                f"{path} contains an unfinished training with a different {other[0]}",
                "repeat the command that started it, or delete this folder to begin again",
            )

    def speed(self, measure: Callable[[], TrainingSpeed]) -> TrainingSpeed:
        """Return the saved speed of the training, or measure and save it.

        Raises:
            ModelFileError: The file is damaged.
        """
        file = self.path / "speed.json"
        if not file.exists():
            _write_json(file, asdict(measure()))
        return _parsed(file, _speed)

    def figures(self, drafter: str, measure: Callable[[], DrafterFigures]) -> DrafterFigures:
        """Return the saved figures of a drafter (`new` or `earlier`), or measure and save them.

        Raises:
            ModelFileError: The file is damaged.
        """
        file = self.path / f"{drafter}.json"
        if not file.exists():
            _write_json(file, asdict(measure()))
        return _parsed(file, _figures)

    def conversation_file(self, batch: int) -> Path:
        """Return the path of a batch of conversations, whether or not the file exists."""
        return self.path / f"conversations-{batch:06d}.npz"

    def conversation_files(self) -> list[Path]:
        """Return the existing files of conversations, in the order of their batches."""
        return sorted(self.path.glob("conversations-*.npz"))

    def state_file(self, steps: int) -> Path:
        """Return the path of the drafter's state after `steps` steps, whether or not the file exists."""
        return self.path / f"state-{steps:08d}.safetensors"

    def progress(self) -> TrainingProgress:
        """Return the saved progress, if any. Raises ModelFileError if the file is damaged."""
        file = self.path / "progress.json"
        if not file.exists():
            return TrainingProgress()
        return _parsed(file, _progress)

    def save(self, progress: TrainingProgress, trainer: DrafterTrainer) -> None:
        """Save progress and the drafter's state. If interrupted, the previously saved state stays valid."""
        current = self.state_file(progress.steps)
        trainer.save_state(current)
        _write_json(self.path / "progress.json", asdict(progress))
        for file in self.path.glob("state-*.safetensors"):
            if file != current:
                file.unlink()


def _curve_point(steps: int, trained_tokens: int, loss: float, tokens_per_pass: float) -> CurvePoint:
    return CurvePoint(
        operator.index(steps), operator.index(trained_tokens), float(loss), float(tokens_per_pass)
    )


def _progress(found: dict[str, Any]) -> TrainingProgress:
    return TrainingProgress(
        operator.index(found["steps"]),
        operator.index(found["trained_tokens"]),
        [float(loss) for loss in found["losses"]],
        [_curve_point(**point) for point in found["curve"]],
    )


def _speed(found: dict[str, Any]) -> TrainingSpeed:
    speed = TrainingSpeed(float(found["write_seconds"]), float(found["train_seconds"]))
    if not all(0.0 <= seconds < _MAX_TOKEN_SECONDS for seconds in astuple(speed)):
        raise ValueError("the saved speed is out of range")
    return speed


def _figures(found: dict[str, Any]) -> DrafterFigures:
    return DrafterFigures(
        float(found["tokens_per_pass"]),
        tuple(float(each) for each in found["acceptance_per_depth"]),
        {str(kind): float(each) for kind, each in found["tokens_per_pass_by_kind"].items()},
    )


def _parsed(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """Parse a saved file. Raises ModelFileError if it is damaged."""
    found = _read_json(path)
    try:
        return parse(found)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise _damaged(path) from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with replace_when_written(path) as unfinished:
        unfinished.write_text(json.dumps(value), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular_file(path))
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    return value


def _damaged(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{path}, which belongs to an interrupted training, is damaged",
        f"delete the folder {path.parent} and train again",
    )
