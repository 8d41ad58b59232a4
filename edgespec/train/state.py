"""Save and restore the state of an unfinished training run.

Two processes cannot train in the same folder.
"""

from __future__ import annotations

import json
import math
import operator
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import BusyError, ModelFileError, OptionError
from edgespec.model.drafter_training import DrafterTrainer
from edgespec.system.files import read_regular_file, replace_when_written
from edgespec.train.conversations import Conversation
from edgespec.train.evaluation import DEPTH, DrafterFigures
from edgespec.train.timing import TrainingCosts

__all__ = ["CurvePoint", "TrainingFolder", "TrainingProgress", "TrainingSettings", "lock_training"]

T = TypeVar("T")

# Maximum plausible time in seconds and memory or disk space in bytes. Larger saved costs are rejected as
# damaged.
_MAX_SECONDS, _MAX_BYTES = 3600.0, 1 << 50
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

    steps: int
    trained_tokens: int
    loss: float
    tokens_per_pass: float


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a training run.

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
        found = _read_json(file)
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
        return _parsed(file, _costs)

    def is_measured(self, drafter: str) -> bool:
        """Return whether a drafter's evaluation (`new` or `earlier`) has been saved."""
        return self._figures_file(drafter).exists()

    def save_figures(self, drafter: str, figures: DrafterFigures) -> None:
        """Save a drafter's figures (`new` or `earlier`). Raises OSError if writing fails."""
        _write_json(self._figures_file(drafter), asdict(figures))

    def figures(self, drafter: str) -> DrafterFigures:
        """Return a drafter's saved figures (`new` or `earlier`).

        Raises:
            ModelFileError: The file is damaged.
            OSError: The file cannot be read.
        """
        return _parsed(self._figures_file(drafter), _figures)

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
        return _parsed(file, _progress)

    def check_progress(self, progress: TrainingProgress, steps: Sequence[Sequence[Conversation]]) -> None:
        """Check that the saved progress belongs to these training steps.

        Args:
            progress: The progress to check.
            steps: The batch of conversations for each step.

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


def _curve_point(steps: int, trained_tokens: int, loss: float, tokens_per_pass: float) -> CurvePoint:
    return CurvePoint(
        operator.index(steps), operator.index(trained_tokens), float(loss), float(tokens_per_pass)
    )


def _progress(found: dict[str, Any]) -> TrainingProgress:
    progress = TrainingProgress(
        operator.index(found["steps"]),
        operator.index(found["trained_tokens"]),
        [float(loss) for loss in found["losses"]],
        [_curve_point(**point) for point in found["curve"]],
    )
    reached = [0, *(point.steps for point in progress.curve), progress.steps]
    tokens = [0, *(point.trained_tokens for point in progress.curve), progress.trained_tokens]
    if any(later < earlier for counts in (reached, tokens) for earlier, later in pairwise(counts)):
        raise ValueError("a later evaluation has fewer steps or tokens than an earlier one")
    if len(progress.losses) != reached[-1] - reached[-2]:
        raise ValueError("the number of losses differs from the number of steps since the last evaluation")
    losses = [*progress.losses, *(point.loss for point in progress.curve)]
    if not all(map(math.isfinite, losses)):
        raise ValueError("a loss is not finite")
    for point in progress.curve:
        _check_tokens_per_pass(point.tokens_per_pass)
    return progress


def _check_tokens_per_pass(tokens_per_pass: float) -> None:
    """Raise ValueError if the value is NaN or out of range for drafts of `DEPTH` tokens."""
    if not 1.0 <= tokens_per_pass <= DEPTH + 1.0:
        raise ValueError(f"the saved value of {tokens_per_pass} tokens per pass is invalid")


def _costs(found: dict[str, Any]) -> TrainingCosts:
    costs = TrainingCosts(
        float(found["write_seconds"]),
        float(found["step_seconds"]),
        float(found["train_seconds"]),
        float(found["evaluate_seconds"]),
        float(found["save_seconds"]),
        operator.index(found["memory_bytes"]),
        operator.index(found["state_bytes"]),
    )
    *seconds, memory_bytes, state_bytes = astuple(costs)
    if not all(0.0 <= each < _MAX_SECONDS for each in seconds):
        raise ValueError("a saved duration is out of range")
    if not all(0 <= each < _MAX_BYTES for each in (memory_bytes, state_bytes)):
        raise ValueError("a saved size is out of range")
    return costs


def _figures(found: dict[str, Any]) -> DrafterFigures:
    figures = DrafterFigures(
        float(found["tokens_per_pass"]),
        tuple(float(each) for each in found["acceptance_per_depth"]),
        {str(kind): float(each) for kind, each in found["tokens_per_pass_by_kind"].items()},
        # Earlier versions did not save these figures.
        float(found.get("tokens_per_pass_in_trees", found["tokens_per_pass"])),
        operator.index(found.get("draft_tokens", 0)),
        float(found.get("coverage", 1.0)),
    )
    for each in (
        figures.tokens_per_pass,
        figures.tokens_per_pass_in_trees,
        *figures.tokens_per_pass_by_kind.values(),
    ):
        _check_tokens_per_pass(each)
    if not all(0.0 <= each <= 1.0 for each in (*figures.acceptance_per_depth, figures.coverage)):
        raise ValueError("an acceptance rate is out of range")
    return figures


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
        f"{path}, which belongs to an interrupted training run, is damaged",
        f"delete the folder {path.parent} and train again",
        code="training_damaged",
    )


@contextmanager
def lock_training(path: Path) -> Iterator[None]:
    """Lock the folder of an unfinished training run until the end of the block.

    The operating system releases the lock when the process exits, even if it is killed.

    Args:
        path: The folder, which is created if it does not exist. On exit, it and its parent are deleted if
            empty.

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
