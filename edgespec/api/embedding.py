"""Compute embeddings, vectors that represent the meaning of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.chat.tokenizing import check_size, tokenize
from edgespec.decode.request import check_vocabulary
from edgespec.errors import ContextFullError, OptionError
from edgespec.model.base import Progress, Vocabulary
from edgespec.model.model_facts import ModelFacts
from edgespec.system.waiting import check_cancelled

__all__ = ["Embedding", "tokenize_texts"]


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector that represents the meaning of text. Vectors of similar texts have a large dot product.

    Attributes:
        vector: The unit vector, float32 [size].
        tokens: Number of tokens in the text.
    """

    vector: NDArray[np.float32]
    tokens: int

    @classmethod
    def of(cls, vector: NDArray[np.float32], tokens: int) -> Embedding:
        """Create an embedding by normalising a vector to length 1."""
        length = float(np.linalg.norm(vector))
        return cls(vector / np.float32(length or 1.0), tokens)

    def shortened(self, size: int) -> Embedding:
        """Return the first `size` dimensions, renormalised. This is intended for Matryoshka embeddings.

        Raises:
            OptionError: The vector has fewer dimensions.
        """
        if size > len(self.vector):
            raise OptionError(
                f"`dimensions` is {size}, but the model's embeddings have only {len(self.vector)} dimensions",
                "use a smaller number, or leave it out",
            )
        return Embedding.of(self.vector[:size], self.tokens)


def tokenize_texts(
    texts: Sequence[str | Sequence[int]],
    vocabulary: Vocabulary,
    facts: ModelFacts,
    context_tokens: int,
    truncate: bool,
    progress: Progress | None,
) -> list[Sequence[int]]:
    """Tokenize each text for an embedding model.

    Args:
        texts: The texts, as strings or token ids.
        vocabulary: The model's tokenizer.
        facts: Properties of the model.
        context_tokens: Size of the context. One token is reserved for the EOS token, which some models
            require after the text.
        truncate: Whether to drop the end of texts that do not fit in the context.
        progress: Called as texts are tokenized. Returning False cancels tokenization.

    Raises:
        CancelledError: `progress` returned False.
        ContextFullError: A text does not fit in the context.
        OptionError: `texts` is not a list of texts, or a text is empty.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise OptionError(
            f"texts must be a list, not {type(texts).__name__}", 'for example, pass ["Hello", "Good morning"]'
        )
    limit, result = context_tokens - 1, []
    for number, text in enumerate(texts, 1):
        check_cancelled(progress)
        if not isinstance(text, str | Sequence):
            raise OptionError(
                f"text {number} must be a string or a list of token IDs, not {text!r}",
                'for example, pass "Hello" or [9906, 1917]',
            )
        if not text:
            raise OptionError(
                f"text {number} is empty", "leave it out, or add at least one word", code="prompt_empty"
            )
        if isinstance(text, str):
            if not truncate:
                check_size(vocabulary, [text], limit)
            tokens: Sequence[int] = tokenize(vocabulary, text, special=False, start=True, progress=progress)
        else:
            tokens = tuple(text)
            check_vocabulary(f"text {number}", tokens, facts)
        if len(tokens) > limit and not truncate:
            raise ContextFullError(
                f"text {number} has {len(tokens):,} tokens, but the context has room for only {limit:,}",
                "shorten it, or load a model with a larger --context",
                prompt_tokens=len(tokens),
                context_tokens=context_tokens,
            )
        result.append(tokens[:limit])
    return result
