"""Save and load training conversations, and arrange them into training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.model.drafter_training import TrainingBatch
from edgespec.system.files import replace_when_written

__all__ = [
    "BATCH_TOKENS",
    "PASSES",
    "Conversation",
    "batch_of",
    "batches",
    "read_conversations",
    "save_conversations",
    "step_tokens",
    "token_counts",
    "training_steps",
]

# Maximum number of tokens per training step. Larger batches need more memory for the target's logits.
BATCH_TOKENS = 1_536
# With few conversations, batches are made smaller to get about 1,500 steps, but no smaller than 256 tokens,
# which is about one conversation.
_WANTED_STEPS, _MIN_BATCH_TOKENS = 1_500, 256
# Number of epochs. With more, heads overfit and become worse on other text.
PASSES = 3


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the target's reply to it.

    Attributes:
        tokens: Token ids of the prompt and the reply, int32 [tokens].
        prompt_length: Number of tokens in the prompt.
        kind: Kind of text, such as `code`.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    kind: str


def save_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations to an `.npz` file. Raises OSError if the file cannot be written."""
    with replace_when_written(path) as unfinished, unfinished.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.empty(0, np.int32), *(each.tokens for each in conversations)]),
            ends=np.cumsum([len(each.tokens) for each in conversations], dtype=np.int64),
            prompt_lengths=np.array([each.prompt_length for each in conversations], np.int64),
            kinds=np.array([each.kind for each in conversations], dtype=np.str_),
        )


def read_conversations(path: Path, vocab_size: int) -> list[Conversation]:
    """Read a file written by `save_conversations`. Raises ModelFileError if it is missing or damaged."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            stored_tokens = file["tokens"]
            if stored_tokens.ndim != 1 or stored_tokens.dtype != np.int32:
                raise ValueError("the tokens are not a list of whole numbers")
            # MLX does not check token ids, and would read past the end of the embedding table.
            if stored_tokens.size and not 0 <= stored_tokens.min() <= stored_tokens.max() < vocab_size:
                raise ValueError(f"a token id is outside the vocabulary of {vocab_size:,} tokens")
            texts = np.split(stored_tokens, file["ends"])[:-1]
            return [
                Conversation(tokens, int(prompt_length), str(kind))
                for tokens, prompt_length, kind in zip(
                    texts, file["prompt_lengths"], file["kinds"], strict=True
                )
            ]
    except (OSError, ValueError, TypeError, IndexError, KeyError, BadZipFile) as error:
        raise ModelFileError(
            f"the conversations in {path} cannot be read: {error}",
            "delete this file and train again",
            code="training_damaged",
        ) from error


def batch_of(conversations: Sequence[Conversation]) -> TrainingBatch:
    """Combine conversations into a batch, padding each to the length of the longest."""
    length = max(len(each.tokens) for each in conversations)
    tokens = np.zeros((len(conversations), length), np.int32)
    replied = np.zeros((len(conversations), length), np.bool_)
    for row, each in enumerate(conversations):
        tokens[row, : len(each.tokens)] = each.tokens
        replied[row, each.prompt_length : len(each.tokens)] = True
    return TrainingBatch(tokens, replied)


def batches(
    conversations: Sequence[Conversation], max_tokens: int, random: np.random.Generator
) -> list[list[Conversation]]:
    """Group conversations of similar length into batches, and return the batches in random order.

    Grouping by length minimises padding. A batch has at most `max_tokens` tokens including padding, unless a
    single conversation is longer.
    """
    shuffled = [conversations[i] for i in random.permutation(len(conversations))]
    divided: list[list[Conversation]] = [[]]
    for each in sorted(shuffled, key=lambda each: len(each.tokens)):
        if divided[-1] and len(each.tokens) * (len(divided[-1]) + 1) > max_tokens:
            divided.append([])
        divided[-1].append(each)
    return [divided[i] for i in random.permutation(len(divided))]


def step_tokens(tokens: int) -> int:
    """Return the maximum number of tokens per training step, given the number of tokens to train on."""
    return min(BATCH_TOKENS, max(_MIN_BATCH_TOKENS, PASSES * tokens // _WANTED_STEPS))


def training_steps(conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """Return the batch for each training step. The order is deterministic, so training can be resumed."""
    batch_tokens = step_tokens(sum(len(each.tokens) for each in conversations))
    return [
        batch
        for repetition in range(PASSES)
        for batch in batches(conversations, batch_tokens, np.random.default_rng(repetition))
    ]


def token_counts(conversations: Sequence[Conversation], vocab_size: int) -> NDArray[np.int64]:
    """Count how often each token occurs in the replies. Returns int64 [vocabulary]."""
    replies = [each.tokens[each.prompt_length :] for each in conversations]
    return np.bincount(np.concatenate(replies), minlength=vocab_size).astype(np.int64)
