"""The training steps: which conversations are trained with, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.train.conversations import Conversation, batches

__all__ = ["BATCH_TOKENS", "PASSES", "training_steps"]

# Maximum number of tokens per training step. Larger batches need more memory for the target's logits.
BATCH_TOKENS = 1_536
# With few conversations, batches are smaller, so that there are about this many steps, but never smaller than
# a typical conversation.
_WANTED_STEPS, _MIN_BATCH_TOKENS = 1_500, 256
# How often the head sees each conversation. More repetitions make it worse with other text.
PASSES = 3


def training_steps(conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """Return the batches of all training steps, in order. The same conversations give the same steps."""
    tokens = PASSES * sum(len(each.tokens) for each in conversations)
    batch_tokens = min(BATCH_TOKENS, max(_MIN_BATCH_TOKENS, tokens // _WANTED_STEPS))
    return [
        batch
        for repetition in range(PASSES)
        for batch in batches(conversations, batch_tokens, np.random.default_rng(repetition))
    ]
