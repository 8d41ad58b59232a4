"""Train a drafter: write conversations, train on them, and publish the drafter if it beats the earlier one.

Conversations and training state are saved as training proceeds, so that an interrupted training can be
continued. The result is the same as without the interruption.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgespec.backends.base import Progress
from edgespec.backends.drafter_training import DrafterTrainer, Guesser, Student
from edgespec.errors import CancelledError, EdgespecError
from edgespec.train.conversations import (
    Conversation,
    batch_of,
    read_conversations,
    save_conversations,
    token_counts,
)
from edgespec.train.evaluation import DrafterFigures, measure_drafter
from edgespec.train.loading import TrainingTarget
from edgespec.train.plots import plot_training
from edgespec.train.sources import TrainingPrompt
from edgespec.train.state import CurvePoint, TrainingFolder, TrainingProgress, TrainingSettings
from edgespec.train.steps import BATCH_TOKENS, training_steps
from edgespec.train.timing import measure_speed
from edgespec.train.writing import ConversationWriter

__all__ = ["TrainingResult", "train_drafter"]

# Every 24th conversation is held out for evaluation, up to 256 conversations.
_HELD_OUT_EVERY, _MAX_HELD_OUT = 24, 256
# Number of held-out conversations per evaluation during training, and approximate number of evaluations.
_CURVE_CONVERSATIONS, _CURVE_POINTS = 48, 20
# Number of conversations used to initialise a head's weights.
_EXAMPLES = 64


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of training a drafter: a head or a draft model.

    Attributes:
        folder: The drafter's folder.
        kept: Whether `folder` contains the new drafter. If False, the earlier drafter was at least as good,
            and `folder` is unchanged.
        figures: Accuracy of the new drafter on the held-out conversations.
        earlier: Accuracy of the earlier drafter on the same conversations: the one in `folder`, or the draft
            model before training. None for the first head.
        curve: Evaluations during training.
        conversations: Number of conversations, including those held out.
        tokens: Number of tokens in these conversations.
        plot: Path of the training curve. None if `kept` is False or matplotlib is not installed.
    """

    folder: Path
    kept: bool
    figures: DrafterFigures
    earlier: DrafterFigures | None
    curve: list[CurvePoint] = field(repr=False)
    conversations: int
    tokens: int
    plot: Path | None

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
            "plot": self.plot and str(self.plot),
        }


def train_drafter(
    target: TrainingTarget,
    student: Student,
    settings: TrainingSettings,
    prompts: Sequence[TrainingPrompt],
    folder: Path,
    progress: Progress,
    announce: Callable[[float], None],
) -> TrainingResult:
    """Train a drafter, or continue an interrupted training.

    Args:
        target: The loaded target.
        student: The kind of head, or the draft model, to train.
        settings: Settings of the training.
        prompts: Prompts to answer before the target writes its own questions.
        folder: Folder for the drafter. A drafter that is already there is replaced only by a better one.
        progress: Called with a description and the completed fraction. Returning False stops the training.
        announce: Called once with the estimated remaining time in seconds, before writing and training.

    Raises:
        CancelledError: `progress` returned False. Calling with the same arguments continues the training.
        OptionError: The folder contains an unfinished training with other settings, or other files.
        ModelFileError: The folder contains another kind of drafter, or one for another target.
        EdgespecError: The training failed.
        OSError: The folder cannot be written.
    """
    teacher = target.teacher
    earlier = student.published(folder) or student.untrained()
    saved = TrainingFolder(folder / "training", settings)
    writer = ConversationWriter(teacher, target.template, prompts)
    try:
        conversations = [
            each
            for file in saved.conversation_files()
            for each in read_conversations(file, teacher.vocabulary.size)
        ]
        state = saved.progress()
        written = sum(len(each.tokens) for each in conversations)
        speed = saved.speed(lambda: measure_speed(teacher, student, writer.question_start, progress))
        announce(speed.remaining_seconds(settings.tokens, written, state.trained_tokens))
        _write_conversations(writer, saved, conversations, settings.tokens, progress)
        held_out = conversations[::_HELD_OUT_EVERY][:_MAX_HELD_OUT]
        held = set(map(id, held_out))
        others = [each for each in conversations if id(each) not in held]
        if not others:
            raise EdgespecError("there are too few conversations to train with", "use a larger --tokens")
        finished = saved.path / "finished"
        if not finished.exists():
            counts = token_counts(others, teacher.vocabulary.size)
            trainer = student.trainer(batch_of(others[:_EXAMPLES]), counts)
            _train(trainer, saved, state, others, held_out[:_CURVE_CONVERSATIONS], progress)
            _publish(trainer, finished)
            del trainer
        # Measure the saved drafter, because its weights have a lower precision than during training.
        published = student.published(finished)
        assert published is not None

        def measured(name: str, drafter: Guesser) -> DrafterFigures:
            return saved.figures(name, lambda: measure_drafter(drafter, held_out, BATCH_TOKENS, progress))

        figures = measured("new", published)
        before = measured("earlier", earlier) if earlier else None
    except CancelledError as error:
        raise CancelledError(
            "the training is not finished, but everything done so far is saved",
            "run the same command again to continue",
        ) from error
    better = before is None or figures.tokens_per_pass > before.tokens_per_pass
    plot = folder / "training.png"
    plotted = False
    if better:
        # A crash may have left a folder with this name behind. Delete it, because it is never read again.
        kept = saved.path / "kept"
        shutil.rmtree(kept, ignore_errors=True)
        for file in sorted(finished.rename(kept).iterdir()):
            file.replace(folder / file.name)
        plotted = plot_training(state.curve, f"{student.title} for {target.name}", plot)
    tokens = sum(len(each.tokens) for each in conversations)
    shutil.rmtree(saved.path)
    if not any(folder.iterdir()):
        folder.rmdir()
    return TrainingResult(
        folder, better, figures, before, state.curve, len(conversations), tokens, plot if plotted else None
    )


def _write_conversations(
    writer: ConversationWriter,
    saved: TrainingFolder,
    conversations: list[Conversation],
    wanted_tokens: int,
    progress: Progress,
) -> None:
    """Append conversations to the list until they have `wanted_tokens` tokens, and save each batch."""
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
    conversations: Sequence[Conversation],
    held_out: Sequence[Conversation],
    progress: Progress,
) -> None:
    """Run the remaining training steps, evaluating the drafter and saving its state at regular intervals."""
    steps = training_steps(conversations)
    every = max(1, len(steps) // _CURVE_POINTS)
    if state.steps:
        trainer.load_state(saved.state_file(state.steps))
    try:
        while state.steps < len(steps):
            reached = f", {state.curve[-1].tokens_per_pass:.2f} tokens per pass" if state.curve else ""
            if not progress(f"training{reached}", state.steps / len(steps)):
                raise CancelledError("training was cancelled")
            batch = steps[state.steps]
            state.losses.append(trainer.step(batch_of(batch), state.steps / len(steps)))
            state.steps += 1
            state.trained_tokens += sum(len(each.tokens) for each in batch)
            if state.steps % every == 0:
                figures = measure_drafter(trainer, held_out, BATCH_TOKENS, lambda _text, _fraction: True)
                state.add_point(figures.tokens_per_pass)
                saved.save(state, trainer)
    except CancelledError:
        saved.save(state, trainer)
        raise


def _publish(trainer: DrafterTrainer, folder: Path) -> None:
    """Write the drafter to `folder`. The folder gets this name only when the drafter is complete."""
    unfinished = folder.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    trainer.publish(unfinished)
    unfinished.rename(folder)
