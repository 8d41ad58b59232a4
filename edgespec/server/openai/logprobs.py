"""Log-probabilities in OpenAI's formats."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from edgespec.decode.reply import TokenLogprobs
from edgespec.server.errors import invalid_request
from edgespec.server.fields import RequestFields

__all__ = [
    "ChatLogprobs",
    "LogprobFields",
    "TextLogprobs",
    "TextOffsets",
    "chat_logprobs",
    "prompt_logprobs",
    "spelled_in",
    "text_logprobs",
    "wanted_logprobs",
]


class LogprobFields(RequestFields):
    """The fields with which a chat request asks for log-probabilities."""

    logprobs: bool | int | None = Field(
        default=None, description="Return log-probabilities of the tokens. A number works like top_logprobs."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Number of the most likely tokens to return at each position."
    )

    @property
    def wanted_logprobs(self) -> int | None:
        """Number of most likely tokens to return at each position, or None for no log-probabilities.

        Raises ApiError if the request sets only `top_logprobs`.
        """
        wanted = wanted_logprobs(self.logprobs, self.top_logprobs)
        if self.top_logprobs and wanted is None:
            raise invalid_request(
                "top_logprobs requires logprobs: true; set logprobs to true, or leave both out",
                param="top_logprobs",
            )
        return wanted


class Alternative(TypedDict):
    """A candidate token at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Alternative):
    """A token of the reply, with the most likely tokens at its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """The log-probabilities of an answer's tokens."""

    content: list[ContentLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """The log-probabilities of a completion's tokens. They are null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def wanted_logprobs(logprobs: bool | int | None, top: int | None) -> int | None:
    """Return the `logprobs` reply option for a request's `logprobs` and `top_logprobs` fields.

    In the completions API, `logprobs` is the number of alternatives. In the chat API, it is a boolean, and
    `top_logprobs` is the number. Clients mix up the two.
    """
    if logprobs is None or logprobs is False:
        return None
    number = 0 if logprobs is True else logprobs
    return number if top is None else top


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Format the log-probabilities of tokens for chat completions.

    The token that ends the reply is omitted, so that the tokens' bytes exactly make up the text.
    """
    content: list[ContentLogprob] = [
        {**_alternative(each), "top_logprobs": [_alternative(other) for other in each.top]}
        for each in tokens
        if not each.is_end
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Tracks where each token's text starts in a completion.

    Args:
        start: Number of characters before the first token.
    """

    def __init__(self, start: int = 0) -> None:
        self._length = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def after(self, token: TokenLogprobs) -> int:
        """Add a token, and return the character index at which its text starts."""
        return self.after_bytes(b"" if token.is_end else token.raw)

    def after_bytes(self, spelled: bytes) -> int:
        """Add a token's text, and return the character index at which it starts."""
        offset = self._length
        self._length += len(self._decoder.decode(spelled))
        return offset


def text_logprobs(tokens: Sequence[TokenLogprobs], offsets: TextOffsets) -> TextLogprobs:
    """Format the log-probabilities of tokens for OpenAI's completions API.

    The token that ends the reply is included, as in OpenAI's API, because evaluation tools count tokens.

    Args:
        tokens: The tokens.
        offsets: Computes the position of each token's text.
    """
    return {
        "tokens": [_shown(each) for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [{_shown(other): other.logprob for other in each.top} for each in tokens],
        "text_offset": [offsets.after(each) for each in tokens],
    }


def prompt_logprobs(tokens: Sequence[TokenLogprobs], spelled: Sequence[bytes]) -> TextLogprobs:
    """Format the log-probabilities of a prompt's tokens. See `text_logprobs`.

    Args:
        tokens: The tokens of the whole prompt.
        spelled: The part of the prompt's text that each token represents.
    """
    result = text_logprobs(tokens, TextOffsets())
    # The first token follows no other token, so it has no probability.
    result["token_logprobs"][:1], result["top_logprobs"][:1] = [None], [None]
    offsets = TextOffsets()
    result["text_offset"] = [offsets.after_bytes(each) for each in spelled]
    return result


def spelled_in(text: str, tokens: Sequence[TokenLogprobs], piece: Callable[[int], bytes]) -> list[bytes]:
    """Return the part of a prompt's text that each of its tokens represents.

    The BOS token that some models need represents no text, and neither does the space that some tokenizers
    prepend. A control token written out in the text represents its own text.

    Args:
        text: The text.
        tokens: Its tokens.
        piece: Returns the bytes that a token adds to text. See `Vocabulary.piece`.
    """
    whole, start, result = text.encode("utf-8", "replace"), 0, []
    for token in tokens:
        added = piece(token.token)
        exact = [each for each in (token.raw, added, added.lstrip(b" ")) if whole.startswith(each, start)]
        # If nothing matches, assume that the token represents as many bytes as it adds. Tokenizers that
        # normalise characters, such as accents, usually preserve the number of bytes.
        length = len(max(exact, key=len)) if exact else len(added)
        result.append(whole[start : start + length])
        start += length
    return result


def _alternative(token: TokenLogprobs) -> Alternative:
    return {"token": _shown(token), "logprob": token.logprob, "bytes": list(token.raw)}


def _shown(token: TokenLogprobs) -> str:
    """Return a token's text, escaping bytes that are not valid text on their own, as in OpenAI's API."""
    try:
        return token.raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
