"""Estimate the duration of a training from a short trial."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from edgespec.backends.base import Progress
from edgespec.backends.drafter_training import Student, Teacher
from edgespec.train.conversations import Conversation, batch_of, token_counts
from edgespec.train.steps import PASSES
from edgespec.train.writing import BATCH_CONVERSATIONS

__all__ = ["estimate_seconds"]

# Maximum number of tokens to write per conversation. Enough to estimate a real batch's time per token within
# a factor of two.
_TRIAL_TOKENS = 24


def estimate_seconds(
    teacher: Teacher,
    student: Student,
    wanted_tokens: int,
    question_start: Sequence[int],
    written_tokens: int,
    trained_tokens: int,
    progress: Progress,
) -> float:
    """Return the estimated remaining time in seconds, measured by writing a few tokens and training one step.

    Args:
        teacher: The target.
        student: What is trained.
        wanted_tokens: Number of tokens in the conversations to train with.
        question_start: The prompt after which the target writes a question.
        written_tokens: Number of tokens in the conversations already written.
        trained_tokens: Number of tokens already trained on, including repetitions.
        progress: Called repeatedly. Returning False cancels the trial.

    Raises:
        CancelledError: `progress` returned False.
    """
    count = BATCH_CONVERSATIONS
    began = time.perf_counter()
    texts = teacher.write([list(question_start)] * count, [1.0] * count, _TRIAL_TOKENS, 0, progress)
    write_seconds = (time.perf_counter() - began) / sum(map(len, texts))
    trial = [
        Conversation(np.array([*question_start, *text], np.int32), len(question_start), "") for text in texts
    ]
    batch = batch_of(trial)
    trainer = student.trainer(batch, token_counts(trial, teacher.vocabulary.size))
    began = time.perf_counter()
    # Time a step near the end of training, when a head predicts the most tokens ahead, which takes longest.
    # The average step takes about 80 % of that time.
    trainer.step(batch, 0.999)
    train_seconds = 0.8 * (time.perf_counter() - began) / batch.tokens.size
    left_to_write = max(0, wanted_tokens - written_tokens)
    left_to_train = max(0, wanted_tokens * PASSES - trained_tokens)
    return left_to_write * write_seconds + left_to_train * train_seconds
