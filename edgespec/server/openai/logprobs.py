"""Log-probabilities in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from edgespec.reply import TokenLogprobs

__all__ = ["ChatLogprobs", "TextLogprobs", "chat_logprobs", "text_logprobs"]

# Replaces the incomplete bytes of a character that spans several tokens.
_PART_OF_CHARACTER = "\ufffd"


class Alternative(TypedDict):
    """A candidate for the token at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(Alternative):
    """A token of the reply, and the most likely tokens at its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """The log-probabilities of the tokens of an answer."""

    content: list[ContentLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """The log-probabilities of the tokens of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return the log-probabilities of tokens in the format of chat completions."""
    content: list[ContentLogprob] = [
        {**_alternative(each), "top_logprobs": [_alternative(other) for other in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> TextLogprobs:
    """Return the log-probabilities of tokens in the format of OpenAI's completions API.

    Args:
        tokens: The tokens.
        offset: Index of the first token's text in the text of the completion.
    """
    offsets = []
    for each in tokens:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [{other.text: other.logprob for other in each.top} for each in tokens],
        "text_offset": offsets,
    }


def _alternative(token: TokenLogprobs) -> Alternative:
    known = _PART_OF_CHARACTER not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if known else None,
    }
