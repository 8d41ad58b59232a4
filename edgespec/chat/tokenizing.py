"""Tokenize text so that Ctrl-C can interrupt long calls, and reject text that cannot fit in the context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edgespec.errors import ContextFullError
from edgespec.model.base import Progress, Vocabulary
from edgespec.system.files import format_bytes
from edgespec.system.waiting import check_cancelled, wait_for

__all__ = ["check_size", "tokenize", "tokenize_whole"]

# Texts up to this length are tokenized in the calling thread. This took at most 0.1 seconds in all tests.
_SHORT_CHARACTERS = 30_000


def tokenize(
    vocabulary: Vocabulary, text: str, *, special: bool, start: bool, progress: Progress | None
) -> list[int]:
    """Convert text to token ids. Takes the arguments of `Vocabulary.tokenize`.

    Native calls cannot be interrupted, so long texts are tokenized in another thread. Ctrl-C and `progress`
    can then end the wait immediately. The thread exits when its call returns.

    Args:
        progress: Called every 50 ms. Returning False cancels the call.

    Raises:
        CancelledError: `progress` returned False.
    """
    call = partial(vocabulary.tokenize, text, special=special, start=start)
    if len(text) <= _SHORT_CHARACTERS:
        return call()
    return wait_for(call, partial(check_cancelled, progress))


def tokenize_whole(vocabulary: Vocabulary, text: str, progress: Progress | None = None) -> list[int]:
    """Tokenize a prompt that was rendered elsewhere, adding the BOS token if the model needs one.

    Many clients include the BOS token in the text, and a second one would change the reply.
    """
    written = bool(vocabulary.bos_text) and text.startswith(vocabulary.bos_text)
    return tokenize(vocabulary, text, special=True, start=not written, progress=progress)


def check_size(vocabulary: Vocabulary, texts: Sequence[str], context_tokens: int) -> None:
    """Raise ContextFullError if the texts cannot possibly fit in the context.

    This avoids tokenizing very long texts. Texts that pass may still have too many tokens.
    """
    if sum(map(len, texts)) <= context_tokens:
        return
    least = sum(map(vocabulary.min_tokens, texts))
    if least > context_tokens:
        size = format_bytes(sum(len(text.encode("utf-8", "replace")) for text in texts))
        raise ContextFullError(
            f"the prompt of {size} has at least {least:,} tokens, but the context holds only"
            f" {context_tokens:,}",
            "shorten it, or load a model with a larger --context",
            prompt_tokens=least,
            context_tokens=context_tokens,
        )
