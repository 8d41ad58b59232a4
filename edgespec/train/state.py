"""Save and restore the state of an unfinished training run.

Two processes cannot train in the same folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from edgespec.errors import BusyError, ModelFileError, OptionError
from edgespec.model.drafter_training import DrafterTrainer
from edgespec.system.files import read_regular_file, replace_when_written
from edgespec.train.conversations import Conversation
from edgespec.train.evaluation import DrafterFigures, TokensPerPass
from edgespec.train.timing import TrainingCosts

__all__ = ["CurvePoint", "TrainingFolder", "TrainingProgress", "TrainingSettings", "lock_training"]

T = TypeVar("T")

_SETTINGS, _PROGRESS, _COSTS = "settings.json", "progress.json", "costs.json"
_LOCK_FILE = "lock"


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Settings of a training run. An unfinished run can be resumed only with identical settings.

    Attributes:
        method: Kind of drafter, such as `eagle3` or `draft`.
        target: Hash of the target's files.
        tokens: Number of tokens in the training conversations.
        prompts: Hash of the user's prompts. Empty if the target generates all questions itself.
        draft: Hash of the files of the draft model to train. Empty for heads.
        lora: Whether to train a LoRA adapter instead of the draft model's weights.
        writer: Hash of the files of the GGUF model that writes the conversations. Empty if the target does.
    """

    method: str
    target: str
    tokens: int
    prompts: str
    draft: str = ""
    lora: bool = False
    writer: str = ""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation during training.

    Attributes:
        steps: Number of training steps so far.
        trained_tokens: Number of tokens in these steps, including repetitions.
        loss: Mean loss of the steps since the previous evaluation.
        tokens_per_pass: Tokens per target pass on held-out conversations.
    """

    steps: NonNegativeInt
    trained_tokens: NonNegativeInt
    loss: FiniteFloat
    tokens_per_pass: TokensPerPass


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a training run.

    Attributes:
        steps: Number of finished training steps.
        trained_tokens: Number of tokens in these steps, including repetitions.
        losses: Losses of the steps since the last point of `curve`.
        curve: Evaluations so far.
    """

    steps: NonNegativeInt = 0
    trained_tokens: NonNegativeInt = 0
    losses: list[FiniteFloat] = field(default_factory=list)
    curve: list[CurvePoint] = field(default_factory=list)

    @property
    def best(self) -> CurvePoint:
        """The evaluation with the most tokens per pass. In a tie, the latest one."""
        return max(self.curve, key=lambda point: (point.tokens_per_pass, point.steps))

    def add_point(self, tokens_per_pass: float) -> None:
        """Add an evaluation to the curve, with the mean loss since the previous evaluation."""
        loss = sum(self.losses) / len(self.losses)
        self.curve.append(CurvePoint(self.steps, self.trained_tokens, loss, tokens_per_pass))
        self.losses = []


class TrainingFolder:
    """The folder that holds the state of an unfinished training run.

    Args:
        path: The folder, which must exist and be locked with `lock_training`.
        settings: The settings of the training run.

    Raises:
        OptionError: The folder contains a training run with different settings, or unrelated files.
        ModelFileError: The folder is damaged.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: Path, settings: TrainingSettings) -> None:
        self.path = path
        file = path / _SETTINGS
        if not file.exists():
            # The folder is deleted after training, so it must not contain unrelated files. A temporary file
            # may remain if an earlier run was killed while writing the settings.
            if {each.name for each in path.iterdir()} - {_LOCK_FILE, f"{_SETTINGS}.tmp"}:
                raise OptionError(
                    f"{path} contains files that edgespec did not create",
                    "choose another folder with --to",
                    code="output_exists",
                )
            _write_json(file, asdict(settings))
            return
        found = _read(file, dict[str, Any])
        names = {
            "target": "model",
            "tokens": "--tokens",
            "prompts": "set of prompts",
            "method": "kind of drafter",
            "draft": "draft model",
            "lora": "--lora",
            "writer": "GGUF file",
        }
        # Runs that earlier versions started have no writer. Their text came from another version of the same
        # model, and is just as good.
        found = {"writer": settings.writer, **found}
        other = [names[key] for key, value in asdict(settings).items() if found.get(key) != value]
        if other:
            raise OptionError(
                f"{path} contains an unfinished training run with a different {other[0]}",
                f"run the command that started it again, or delete the folder {path} to start over",
                code="output_exists",
            )

    @property
    def has_costs(self) -> bool:
        """Whether the training run's costs have been saved."""
        return (self.path / _COSTS).exists()

    def costs(self, measure: Callable[[], TrainingCosts]) -> TrainingCosts:
        """Return the training run's saved costs. If there are none, measure and save them.

        Raises:
            ModelFileError: The file is damaged.
        """
        file = self.path / _COSTS
        if not self.has_costs:
            _write_json(file, asdict(measure()))
        return _read(file, TrainingCosts)

    def save_figures(self, drafter: str, figures: DrafterFigures) -> None:
        """Save a drafter's figures (`new` or `earlier`). Raises OSError if writing fails."""
        _write_json(self._figures_file(drafter), asdict(figures))

    def figures(self, drafter: str) -> DrafterFigures | None:
        """Return a drafter's saved figures (`new` or `earlier`), or None if it has not been measured.

        Raises:
            ModelFileError: The file is damaged.
        """
        file = self._figures_file(drafter)
        return _read(file, DrafterFigures) if file.exists() else None

    def _figures_file(self, drafter: str) -> Path:
        return self.path / f"{drafter}.json"

    def conversation_file(self, batch: int) -> Path:
        """Return the path of a batch of conversations, whether or not the file exists."""
        return self.path / f"conversations-{batch:06d}.npz"

    def conversation_files(self) -> list[Path]:
        """Return the conversation files in batch order, up to the first missing one."""
        return list(takewhile(Path.exists, map(self.conversation_file, count())))

    def state_file(self, steps: int) -> Path:
        """Return the path of the drafter's state after `steps` steps, whether or not the file exists."""
        return self.path / f"state-{steps:08d}.safetensors"

    def best_folder(self, steps: int) -> Path:
        """Return the path of the drafter after `steps` steps, which exists only for the best evaluation."""
        return self.path / f"best-{steps:08d}"

    def progress(self, *, required: bool) -> TrainingProgress:
        """Return the saved progress, or new progress if none was saved.

        Raises:
            ModelFileError: The file is damaged, or it is required but missing.
        """
        file = self.path / _PROGRESS
        if not file.exists():
            if required:
                raise _damaged(file)
            return TrainingProgress()
        return _read(file, TrainingProgress)

    def check_progress(self, progress: TrainingProgress, steps: Sequence[Sequence[Conversation]]) -> None:
        """Check that the saved progress belongs to these batches of conversations, one for each step.

        Raises:
            ModelFileError: The step and token counts do not match, or the best drafter so far is
                missing.
        """
        finished = sum(len(each.tokens) for batch in steps[: progress.steps] for each in batch)
        if (progress.steps, progress.trained_tokens) != (min(progress.steps, len(steps)), finished):
            raise _damaged(self.path / _PROGRESS)
        if progress.curve and not (best := self.best_folder(progress.best.steps)).exists():
            raise _damaged(best)

    def save(self, progress: TrainingProgress, trainer: DrafterTrainer) -> None:
        """Save the progress and the drafter's state.

        If the call is interrupted, the previously saved state stays valid.
        """
        current = self.state_file(progress.steps)
        with replace_when_written(current) as unfinished:
            trainer.save_state(unfinished)
        _write_json(self.path / _PROGRESS, asdict(progress))
        needed = {current, *(self.best_folder(progress.best.steps) for _ in progress.curve[:1])}
        for saved in (*self.path.glob("state-*"), *self.path.glob("best-*")):
            if saved not in needed:
                _delete(saved)

    def delete_contents(self) -> None:
        """Delete the files of a finished training run, except for the lock.

        The progress is deleted before the files that it refers to, and the settings last, so that the
        training folder stays valid if the deletion is interrupted.
        """
        (self.path / _PROGRESS).unlink(missing_ok=True)
        for saved in self.path.iterdir():
            if saved.name not in (_LOCK_FILE, _SETTINGS):
                _delete(saved)
        (self.path / _SETTINGS).unlink()


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with replace_when_written(path) as unfinished:
        unfinished.write_text(json.dumps(value), encoding="utf-8")


def _read(path: Path, kind: type[T]) -> T:
    """Read a saved object. Raises ModelFileError if the file is damaged."""
    try:
        return TypeAdapter(kind).validate_json(read_regular_file(path))
    except ValidationError as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> ModelFileError:
    return ModelFileError(
        f"{path}, which belongs to an interrupted training run, is damaged",
        f"delete the folder {path.parent} and train again",
        code="training_damaged",
    )


@contextmanager
def lock_training(path: Path) -> Iterator[None]:
    """Lock the folder of an unfinished training run until the end of the block.

    Creates the folder if necessary, and deletes it and its parent at the end if they are empty. The operating
    system releases the lock when the process exits, even if it is killed.

    Raises:
        BusyError: Another process is training in this folder.
        OSError: The folder cannot be written.
    """
    from filelock import FileLock, Timeout

    path.mkdir(parents=True, exist_ok=True)
    file = path / _LOCK_FILE
    lock = FileLock(file, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(
            f"another `edgespec train` is already training in {path}",
            "wait until it finishes, stop it with Ctrl-C, or choose another folder with --to",
        ) from None
    try:
        yield
    finally:
        # Delete the file before releasing the lock. A process that opened the deleted file cannot lock it.
        file.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):
            path.rmdir()
            path.parent.rmdir()
