"""Train a drafter on conversations that the target writes, and publish it if it beats the earlier one.

Conversations and training state are saved along the way, so that interrupted training can be resumed with the
same result.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.errors import CancelledError, EdgespecError
from edgespec.model.base import Progress
from edgespec.model.drafter_training import DrafterTrainer, Student
from edgespec.store.prepared.head import needs_conversion, prepare_head
from edgespec.system.files import error_reason, write_advice
from edgespec.train.conversations import (
    BATCH_TOKENS,
    Conversation,
    batch_of,
    read_conversations,
    save_conversations,
    token_counts,
    training_steps,
)
from edgespec.train.evaluation import DEPTH, DrafterFigures, measure_drafter
from edgespec.train.loading import TrainingTarget
from edgespec.train.state import CurvePoint, TrainingFolder, TrainingProgress, TrainingSettings, lock_training
from edgespec.train.timing import measure_speed
from edgespec.train.writing import ConversationWriter, TrainingPrompt

__all__ = ["TrainingResult", "train_drafter"]

# Every 24th conversation is held out for evaluation, up to 256 conversations.
_HELD_OUT_EVERY, _MAX_HELD_OUT = 24, 256
# Number of held-out conversations per evaluation during training, and approximate number of evaluations.
_CURVE_CONVERSATIONS, _CURVE_POINTS = 48, 20
# Number of conversations used to initialise a head's weights.
_EXAMPLES = 64
_GGUF_NAME = "head.gguf"


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of training a drafter: a head or a draft model.

    Attributes:
        folder: The drafter's folder.
        kept: Whether `folder` contains the new drafter. If False, the earlier drafter was at least as good,
            and `folder` is unchanged.
        figures: Accuracy of the new drafter on the held-out conversations.
        earlier: Accuracy on the same conversations of the earlier drafter: the one in `folder`, or the draft
            model before training. None for the first head.
        curve: Evaluations during training.
        best: The evaluation with the most tokens per pass. The new drafter has the weights from this point.
        conversations: Number of conversations, including those held out.
        tokens: Number of tokens in the conversations.
        plot: Path of the training curve. None if `kept` is False or matplotlib is not installed.
        gguf: Path of the new head's GGUF version. None if `kept` is False or the target needs none.
    """

    folder: Path
    kept: bool
    figures: DrafterFigures
    earlier: DrafterFigures | None
    curve: list[CurvePoint] = field(repr=False)
    best: CurvePoint
    conversations: int
    tokens: int
    plot: Path | None
    gguf: Path | None

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "folder": str(self.folder),
            "kept": self.kept,
            "conversations": self.conversations,
            "tokens": self.tokens,
            **self.figures.to_json(),
            "earlier": self.earlier and self.earlier.to_json(),
            "curve": [asdict(point) for point in self.curve],
            "best": asdict(self.best),
            "plot": self.plot and str(self.plot),
            "gguf": self.gguf and str(self.gguf),
        }


def train_drafter(
    target: TrainingTarget,
    student: Student,
    settings: TrainingSettings,
    prompts: Sequence[TrainingPrompt],
    folder: Path,
    progress: Progress,
    announce: Callable[[float, str], None],
) -> TrainingResult:
    """Train a drafter, or continue an interrupted training run.

    Args:
        target: The loaded target.
        student: The kind of head, or the draft model, to train.
        settings: Settings of the training run.
        prompts: Prompts to answer before the target generates its own questions.
        folder: Folder for the drafter. An existing drafter is replaced only by a better one.
        progress: Called with a description and the completed fraction. Returning False stops the training.
        announce: Called once before the work starts, with the estimated remaining time in seconds (0 if
            training is finished) and a description of what an interrupted run has already done (empty for a
            new run).

    Raises:
        CancelledError: `progress` returned False. Calling with the same arguments continues the training.
        BusyError: Another process is training in the same folder.
        OptionError: The folder contains an unfinished training run with other settings, or other files.
        ModelFileError: The folder contains another kind of drafter, or one for a different target.
        EdgespecError: The training or the conversion to GGUF failed, or the folder cannot be written.
    """
    path = folder / "training"
    with _explain_failures(path), lock_training(path):
        teacher, finished, kept = target.teacher, path / "finished", path / "kept"
        # `kept` holds the new drafter while its files are moved to `folder` and converted. If an earlier run
        # was killed at this point, `folder` may contain only some of the files.
        earlier = None if kept.exists() else student.published(folder) or student.untrained()
        saved = TrainingFolder(path, settings)
        conversations = [
            each
            for file in saved.conversation_files()
            for each in read_conversations(file, teacher.vocabulary.size)
        ]
        state = saved.progress(required=kept.exists())
        if kept.exists():
            announce(0.0, "the training is finished, and only its result is left to save")
        else:
            writer = ConversationWriter(teacher, target.template, prompts)
            written = sum(len(each.tokens) for each in conversations)
            speed = saved.speed(lambda: measure_speed(teacher, student, writer.question_start, progress))
            left = speed.remaining_seconds(settings.tokens, written, state.trained_tokens)
            trained = bool(state.curve) and finished.exists()
            announce(0.0 if trained else left, _continued(settings, conversations, state, trained=trained))
            _write_conversations(writer, saved, conversations, settings.tokens, progress)
            held_out, others = _divided(conversations)
            if not others:
                raise EdgespecError(
                    "there are too few conversations to train on",
                    "use a larger --tokens",
                    code="training_data_missing",
                )
            if not trained:
                steps = training_steps(others)
                saved.check_progress(state, steps)
                counts = token_counts(others, teacher.vocabulary.size)
                trainer = student.trainer(batch_of(others[:_EXAMPLES]), counts)
                _train(trainer, saved, state, steps, held_out[:_CURVE_CONVERSATIONS], progress)
                del trainer
                shutil.rmtree(finished, ignore_errors=True)
                saved.best_folder(state.best.steps).rename(finished)
            # Measure the saved drafter, because its weights have a lower precision than during training.
            drafters = {"new": student.published(finished), "earlier": earlier}
            for name, drafter in drafters.items():
                if drafter and not saved.is_measured(name):
                    saved.save_figures(name, measure_drafter(drafter, held_out, BATCH_TOKENS, progress))
        figures = saved.figures("new")
        before = saved.figures("earlier") if saved.is_measured("earlier") else None
        better = before is None or figures.tokens_per_pass > before.tokens_per_pass
        plot, plotted, gguf = folder / "training.png", False, None
        if better:
            if not kept.exists():
                finished.rename(kept)
            for file in sorted(kept.iterdir()):
                file.replace(folder / file.name)
            plotted = _plot_training(state.curve, f"{student.title} for {target.name}", plot)
            if target.gguf and not settings.draft and needs_conversion(folder, target.gguf):
                gguf = folder / _GGUF_NAME
                _convert(folder, target.gguf, gguf, progress)
            kept.rmdir()
        tokens = sum(len(each.tokens) for each in conversations)
        saved.delete_contents()
        return TrainingResult(
            folder=folder,
            kept=better,
            figures=figures,
            earlier=before,
            curve=state.curve,
            best=state.best,
            conversations=len(conversations),
            tokens=tokens,
            plot=plot if plotted else None,
            gguf=gguf,
        )


@contextmanager
def _explain_failures(path: Path) -> Iterator[None]:
    """Convert exceptions to errors that say how to resume the training run in `path`."""
    try:
        yield
    except CancelledError as error:
        raise CancelledError(
            f"the training in {path} is not finished, but its progress has been saved",
            "run the same command again to continue",
        ) from error
    except OSError as error:
        raise EdgespecError(
            f"the training in {path} failed: {error_reason(error)}",
            f"{write_advice(error, path)}, then run the same command again to continue",
            code="file_not_written",
        ) from error


def _continued(
    settings: TrainingSettings, conversations: list[Conversation], state: TrainingProgress, *, trained: bool
) -> str:
    """Describe what an interrupted run has already done. Empty for a new run."""
    if trained:
        return "all training steps are finished, and only the evaluation is left"
    if state.steps:
        total = len(training_steps(_divided(conversations)[1]))
        return f"{state.steps:,} of {total:,} training steps are finished"
    if conversations:
        tokens = sum(len(each.tokens) for each in conversations)
        return (
            f"{len(conversations):,} conversations with {tokens:,} tokens are written"
            f" ({settings.tokens:,} tokens are needed)"
        )
    return ""


def _divided(conversations: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Split conversations into held-out and training ones."""
    held_out = conversations[::_HELD_OUT_EVERY][:_MAX_HELD_OUT]
    held = set(map(id, held_out))
    return held_out, [each for each in conversations if id(each) not in held]


def _write_conversations(
    writer: ConversationWriter,
    saved: TrainingFolder,
    conversations: list[Conversation],
    wanted_tokens: int,
    progress: Progress,
) -> None:
    """Generate conversations until there are `wanted_tokens` tokens, saving each batch."""
    tokens = sum(len(each.tokens) for each in conversations)
    batch = len(saved.conversation_files())

    def report(_description: str, _fraction: float) -> bool:
        return progress("writing conversations", tokens / wanted_tokens)

    while tokens < wanted_tokens:
        new = writer.write(batch, report)
        save_conversations(saved.conversation_file(batch), new)
        conversations += new
        tokens += sum(len(each.tokens) for each in new)
        batch += 1


def _train(
    trainer: DrafterTrainer,
    saved: TrainingFolder,
    state: TrainingProgress,
    steps: Sequence[Sequence[Conversation]],
    held_out: Sequence[Conversation],
    progress: Progress,
) -> None:
    """Run the remaining training steps.

    At regular intervals and after the last step, evaluates the drafter, saves its state, and publishes the
    drafter to `saved.best_folder` if no earlier evaluation was better.
    """
    every = max(1, len(steps) // _CURVE_POINTS)
    if state.steps:
        trainer.load_state(saved.state_file(state.steps))
    try:
        while True:
            # There are no losses if an earlier run already evaluated this step.
            if state.losses and (state.steps % every == 0 or state.steps == len(steps)):
                figures = measure_drafter(
                    trainer, held_out, BATCH_TOKENS, lambda _text, fraction: progress("evaluating", fraction)
                )
                state.add_point(figures.tokens_per_pass)
                if state.best == state.curve[-1]:
                    _publish(trainer, saved.best_folder(state.steps))
                saved.save(state, trainer)
            if state.steps == len(steps):
                return
            reached = f", {state.curve[-1].tokens_per_pass:.2f} tokens per pass" if state.curve else ""
            if not progress(f"training{reached}", state.steps / len(steps)):
                raise CancelledError("training was cancelled")
            batch = steps[state.steps]
            state.losses.append(trainer.step(batch_of(batch), state.steps / len(steps)))
            state.steps += 1
            state.trained_tokens += sum(len(each.tokens) for each in batch)
    except CancelledError:
        saved.save(state, trainer)
        raise


def _publish(trainer: DrafterTrainer, folder: Path) -> None:
    """Write the drafter to `folder`, which gets this name only once the drafter is complete."""
    unfinished = folder.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    trainer.publish(unfinished)
    # An earlier run may have been killed before it saved the progress for this folder.
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _convert(folder: Path, target: Path, output: Path, progress: Progress) -> None:
    """Convert the trained head to GGUF. On failure, the EdgespecError says that the head is finished."""
    if not progress("converting the head to GGUF", 0.0):
        raise CancelledError("the conversion was cancelled")
    try:
        prepare_head(folder, target, output)
    except EdgespecError as error:
        raise EdgespecError(
            f"the head in {folder} has been trained, but could not be converted to GGUF: {error.what}",
            f"{error.next_step}, then run the same command again to convert it",
            code=error.code,
        ) from error


def _plot_training(curve: Sequence[CurvePoint], name: str, path: Path) -> bool:
    """Plot loss and tokens per pass against the number of trained tokens.

    Args:
        curve: The points to plot.
        name: Name of the drafter, for the title.
        path: PNG file to write.

    Returns:
        Whether the file was written. False if matplotlib is not installed.

    Raises:
        OSError: The file cannot be written.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    trained = [point.trained_tokens for point in curve]
    upper.plot(trained, [point.tokens_per_pass for point in curve], marker="o")
    upper.set_ylabel(f"tokens per pass (drafts of {DEPTH} tokens)")
    upper.set_title(f"{name}: accuracy on held-out conversations")
    lower.plot(trained, [point.loss for point in curve], marker="o", color="tab:orange")
    lower.set_ylabel("loss per predicted token")
    lower.set_xlabel("trained tokens, including repetitions")
    figure.savefig(path, dpi=120)
    return True
