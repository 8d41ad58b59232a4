"""Estimate the duration of a training run from the speed of a short trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.errors import CancelledError
from edgespec.model.base import Progress
from edgespec.model.drafter_training import Student, Teacher
from edgespec.train.conversations import PASSES, Conversation, batch_of, token_counts
from edgespec.train.writing import BATCH_CONVERSATIONS

__all__ = ["TrainingSpeed", "measure_speed"]

# Maximum tokens per conversation in the short and the long generation trial. The long trial estimates a real
# batch's time per token to within a factor of two. Slow machines run only the short trial, so that the
# estimate does not take minutes.
_TRIAL_TOKENS = (2, 24)
_LONG_WRITE_SECONDS = 5.0
# Number of conversations in each trial step. Larger steps take less time per token and are closer to real
# training steps. Slow machines run only the first trial step, because a step cannot be interrupted.
_TRIAL_CONVERSATIONS = (1, 8, BATCH_CONVERSATIONS)
_LONG_STEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """The measured speed of a training run.

    Attributes:
        write_seconds: Time to generate one token of a conversation, in seconds.
        train_seconds: Time to train on one token, in seconds.
    """

    write_seconds: float
    train_seconds: float

    def remaining_seconds(self, wanted_tokens: int, written_tokens: int, trained_tokens: int) -> float:
        """Return the estimated remaining time in seconds.

        Args:
            wanted_tokens: Number of tokens that the training conversations should contain.
            written_tokens: Number of tokens in the conversations so far.
            trained_tokens: Number of tokens trained on so far, including repetitions.
        """
        left_to_write = max(0, wanted_tokens - written_tokens)
        left_to_train = max(0, wanted_tokens * PASSES - trained_tokens)
        return left_to_write * self.write_seconds + left_to_train * self.train_seconds


def measure_speed(
    teacher: Teacher, student: Student, question_start: Sequence[int], progress: Progress
) -> TrainingSpeed:
    """Measure the speed of a training run by generating some text and training on it.

    Args:
        teacher: The target, which generates the text.
        student: The kind of head, or the draft model, to train.
        question_start: The prompt that makes the target generate a question.
        progress: Called repeatedly. Returning False cancels the trial.

    Raises:
        CancelledError: `progress` returned False.
    """
    count = BATCH_CONVERSATIONS
    for max_tokens in _TRIAL_TOKENS:
        began = time.perf_counter()
        texts = teacher.write([list(question_start)] * count, [1.0] * count, max_tokens, 0, progress)
        seconds = time.perf_counter() - began
        if seconds > _LONG_WRITE_SECONDS:
            break
    write_seconds = seconds / sum(map(len, texts))
    trial = [
        Conversation(np.array([*question_start, *text], np.int32), len(question_start), "") for text in texts
    ]
    counts = token_counts(trial, teacher.vocabulary.size)
    trainer = student.trainer(batch_of(trial[:1]), counts)
    for conversations in _TRIAL_CONVERSATIONS:
        if not progress("estimating the time", 1.0):
            raise CancelledError("the estimate was cancelled")
        batch = batch_of(trial[:conversations])
        began = time.perf_counter()
        # Time a step near the end of training, which takes longest, because a head then predicts the most
        # tokens ahead. The average step takes about 80 % of that time.
        trainer.step(batch, 0.999)
        step_seconds = time.perf_counter() - began
        if step_seconds > _LONG_STEP_SECONDS:
            break
    return TrainingSpeed(write_seconds, 0.8 * step_seconds / batch.tokens.size)
