"""Estimate the time, memory and disk space that a training run needs, from a short trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgespec.errors import CancelledError
from edgespec.model.base import Progress
from edgespec.model.drafter_training import DrafterTrainer, Student, Teacher, TrainingBatch, Writer
from edgespec.model.registry import process_bytes
from edgespec.train.conversations import (
    BATCH_CONVERSATIONS,
    BATCH_TOKENS,
    Conversation,
    batch_of,
    token_counts,
)
from edgespec.train.evaluation import DEPTH

__all__ = ["TrainingCosts", "TrainingEstimate", "measure_costs"]

# Maximum tokens per conversation in the short and the long generation trial. The long trial estimates a real
# batch's time per token to within a factor of two. Slow machines run only the short trial, so that the
# estimate does not take minutes.
_TRIAL_TOKENS = (2, 24)
_LONG_WRITE_SECONDS = 5.0
# Number of conversations in each trial step, and their length in tokens. The last two steps are used to
# separate a step's fixed time from its time per token. Slow machines run only the first two sizes, because a
# step cannot be interrupted.
_TRIAL_CONVERSATIONS = (1, 3, 12, 32)
_CONVERSATION_TOKENS = 32
_LONG_STEP_SECONDS = 1.0
# Number of steps per size. In every second step, draft models generate text.
_STEPS = 2
# Number of copies of the drafter's training state, and of its published files, that exist at the same time.
# A new copy is complete before an old one is deleted, and a converted head is about as large as a published
# one.
_STATES, _PUBLISHED = 2, 3


_Seconds = Annotated[float, Field(ge=0, lt=3600)]
_Bytes = Annotated[int, Field(ge=0, lt=1 << 50)]


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """The estimated costs of the rest of a training run.

    Attributes:
        write_seconds: Time to write conversations.
        train_seconds: Time for the training steps.
        evaluate_seconds: Time for the evaluations.
        memory_bytes: Peak memory of the process.
        disk_bytes: Peak disk space of the training folder.
    """

    write_seconds: float
    train_seconds: float
    evaluate_seconds: float
    memory_bytes: int
    disk_bytes: int

    @property
    def seconds(self) -> float:
        return self.write_seconds + self.train_seconds + self.evaluate_seconds


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """The measured costs of a training run.

    Attributes:
        write_seconds: Time to generate one token of a conversation.
        step_seconds: Time of a training step, in addition to the time for its tokens.
        train_seconds: Time to train on one token.
        evaluate_seconds: Time to evaluate the drafter on one token.
        save_seconds: Time to save the training state and the drafter.
        memory_bytes: Peak memory of the process.
        state_bytes: Peak size of the saved training states and drafters on disk.
    """

    write_seconds: _Seconds
    step_seconds: _Seconds
    train_seconds: _Seconds
    evaluate_seconds: _Seconds
    save_seconds: _Seconds
    memory_bytes: _Bytes
    state_bytes: _Bytes


def measure_costs(
    model: Writer,
    teacher: Teacher,
    student: Student,
    question_start: Sequence[int],
    folder: Path,
    progress: Progress,
) -> TrainingCosts:
    """Measure the costs of a training run by generating some text and training on it.

    Args:
        model: The model that generates the text.
        teacher: The target.
        student: The kind of head, or the draft model, to train.
        question_start: The prompt that makes the model generate a question.
        folder: The folder of the training run. Temporary files in it are deleted.
        progress: Called repeatedly. Returning False cancels the trial.

    Raises:
        CancelledError: `progress` returned False.
        OSError: The training state cannot be written to `folder`.
    """
    teacher.peak_bytes()
    write_seconds, tokens = _measure_writing(model, question_start, progress)
    writing_bytes = teacher.peak_bytes() + (0 if model is teacher else model.memory_bytes)
    trainer = student.trainer(
        _trial_batch(tokens, 1), token_counts([_conversation(tokens)], teacher.vocabulary.size)
    )
    # The first step takes longer, because it allocates memory.
    trainer.step(_trial_batch(tokens, 1), 0.0)
    sizes, seconds, peaks = list[int](), list[float](), list[float]()
    for conversations in _TRIAL_CONVERSATIONS:
        if not progress("estimating the time", 1.0):
            raise CancelledError("the estimate was cancelled")
        batch = _trial_batch(tokens, conversations)
        teacher.peak_bytes()
        began = time.perf_counter()
        for _ in range(_STEPS):
            # Measure steps near the end of training. They take longest, because a head then predicts the
            # most tokens ahead, and most steps of a training run predict that many.
            trainer.step(batch, 0.999)
        trained = time.perf_counter()
        trainer.ranks(batch, DEPTH)
        evaluate_seconds = (time.perf_counter() - trained) / batch.tokens.size
        sizes.append(batch.tokens.size)
        seconds.append((trained - began) / _STEPS)
        peaks.append(teacher.peak_bytes())
        if len(sizes) > 1 and seconds[-1] > _LONG_STEP_SECONDS:
            break
    step_seconds, train_seconds = _line(sizes, seconds)
    fixed_bytes, token_bytes = _line(sizes, peaks)
    save_seconds, state_bytes = _measure_saving(trainer, folder)
    memory_bytes = process_bytes() + max(writing_bytes, round(fixed_bytes + BATCH_TOKENS * token_bytes))
    return TrainingCosts(
        write_seconds,
        step_seconds,
        train_seconds,
        evaluate_seconds,
        save_seconds,
        memory_bytes,
        state_bytes,
    )


def _measure_writing(
    model: Writer, question_start: Sequence[int], progress: Progress
) -> tuple[float, NDArray[np.int32]]:
    """Return the time to generate one token in seconds, and the generated tokens."""
    count = BATCH_CONVERSATIONS
    for max_tokens in _TRIAL_TOKENS:
        began = time.perf_counter()
        texts = model.write([list(question_start)] * count, [1.0] * count, max_tokens, 0, progress)
        seconds = time.perf_counter() - began
        if seconds > _LONG_WRITE_SECONDS:
            break
    tokens = np.concatenate([np.array(text, np.int32) for text in texts])
    return seconds / len(tokens), tokens


def _conversation(tokens: NDArray[np.int32]) -> Conversation:
    return Conversation(tokens, 1, "")


def _trial_batch(tokens: NDArray[np.int32], conversations: int) -> TrainingBatch:
    """Return a batch of conversations that consist of the given tokens, repeated as often as necessary."""
    rows = np.resize(tokens, (conversations, _CONVERSATION_TOKENS))
    return batch_of([_conversation(row) for row in rows])


def _line(sizes: Sequence[int], costs: Sequence[float]) -> tuple[float, float]:
    """Return the fixed cost and the cost per token, given the costs of the last two batch sizes."""
    if len(sizes) == 1:
        return 0.0, costs[0] / sizes[0]
    (smaller, size), (lower, cost) = sizes[-2:], costs[-2:]
    per_token = min(max(0.0, (cost - lower) / (size - smaller)), cost / size)
    return cost - size * per_token, per_token


def _measure_saving(trainer: DrafterTrainer, folder: Path) -> tuple[float, int]:
    """Return the time to save the state and the drafter in seconds, and their peak size on disk in bytes."""
    with TemporaryDirectory(dir=folder) as scratch:
        state, published = Path(scratch) / "state", Path(scratch) / "published"
        published.mkdir()
        began = time.perf_counter()
        trainer.save_state(state)
        trainer.publish(published)
        seconds = time.perf_counter() - began
        published_bytes = sum(file.stat().st_size for file in published.iterdir())
        return seconds, _STATES * state.stat().st_size + _PUBLISHED * published_bytes
