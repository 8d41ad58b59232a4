"""Arrange conversations into training steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.train.conversations import Conversation, batches

__all__ = ["BATCH_TOKENS", "PASSES", "training_steps"]

# Maximum number of tokens per training step. Larger batches need more memory for the target's logits.
BATCH_TOKENS = 1_536
# With few conversations, use smaller batches to get about 1,500 steps. The minimum, 256 tokens, is about one
# conversation.
_WANTED_STEPS, _MIN_BATCH_TOKENS = 1_500, 256
# Number of epochs. More epochs overfit: the head gets worse on other text.
PASSES = 3


def training_steps(conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """Return the batch for each training step. Deterministic, so that training can be continued."""
    tokens = PASSES * sum(len(each.tokens) for each in conversations)
    batch_tokens = min(BATCH_TOKENS, max(_MIN_BATCH_TOKENS, tokens // _WANTED_STEPS))
    return [
        batch
        for repetition in range(PASSES)
        for batch in batches(conversations, batch_tokens, np.random.default_rng(repetition))
    ]
