"""The training steps: which conversations are trained with, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.train.conversations import Conversation, batches

__all__ = ["BATCH_TOKENS", "PASSES", "training_steps"]

# Tokens per training step. Larger batches need more memory for the target's logits.
BATCH_TOKENS = 1_536
# How often the head sees each conversation. More repetitions make it worse with other text.
PASSES = 3


def training_steps(conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """Return the batches of all training steps, in order. The same conversations give the same steps."""
    return [
        batch
        for repetition in range(PASSES)
        for batch in batches(conversations, BATCH_TOKENS, np.random.default_rng(repetition))
    ]
