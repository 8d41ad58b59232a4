"""Tokenize text in calls that Ctrl-C can interrupt, and reject text that cannot fit in the context.

Control tokens in messages are escaped, so that users cannot inject them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from edgespec.chat.message import Message
from edgespec.chat.tool_calls.calls import parse_object
from edgespec.errors import ContextFullError
from edgespec.model.base import Progress, Vocabulary
from edgespec.system.files import format_bytes
from edgespec.system.waiting import check_cancelled, wait_for

__all__ = [
    "ControlTokenEscaping",
    "TextScanner",
    "check_size",
    "is_control",
    "literal",
    "tokenize",
    "tokenize_whole",
]

# Maximum number of characters to tokenize in the calling thread. Tokenizing this much text took at most 0.1
# seconds in all tests.
_SHORT_CHARACTERS = 30_000
# Maximum number of texts whose token counts are cached. A full cache takes about 5 MB.
_MAX_CACHED_SCANS = 16_384


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
            f"the prompt ({size}) has at least {least:,} tokens, but the context holds only"
            f" {context_tokens:,}",
            "shorten it, or load a model with a larger --context",
            prompt_tokens=least,
            context_tokens=context_tokens,
        )


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of scanning text: its token count and its control tokens.

    Attributes:
        token_count: Number of tokens.
        control_tokens: The distinct control tokens in the text, in order of first appearance.
    """

    token_count: int
    control_tokens: tuple[int, ...]


class TextScanner:
    """Counts the tokens in text and finds its control tokens. Caches the results."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Cached results, keyed by a hash of the text.
        self._scans: dict[bytes, Scan] = {}

    def scan(self, text: str, progress: Progress | None) -> Scan:
        """Return the token count and control tokens of `text`. Raises CancelledError if cancelled."""
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        scan = self._scans.get(key)
        if scan is None:
            check_cancelled(progress)
            tokens = tokenize(self._vocabulary, text, special=True, start=False, progress=progress)
            control = [token for token in dict.fromkeys(tokens) if is_control(self._vocabulary, token)]
            scan = self._scans[key] = Scan(len(tokens), tuple(control))
            while len(self._scans) > _MAX_CACHED_SCANS:
                self._scans.pop(next(iter(self._scans)), None)
        return scan


class ControlTokenEscaping:
    """Replaces control tokens typed by the user with placeholders, so that they are tokenized as plain text.

    Attributes:
        literals: The text of each replaced control token, by token id.
    """

    def __init__(
        self, vocabulary: Vocabulary, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._vocabulary, self._messages, self._tools = vocabulary, messages, tools
        self._has_images = False
        self.literals: dict[int, str] = {}

    @cached_property
    def _marks(self) -> tuple[str, str]:
        """The characters before and after a placeholder: two for private use that occur in no message."""
        texts = (text for message in self._messages for text in (message.reasoning, *message.prompt_texts))
        used_characters = set().union(*texts, *_strings(list(self._tools)))
        unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used_characters)
        return next(unused), next(unused)

    def escape(self, message: Message, scanner: TextScanner, progress: Progress | None) -> Message:
        """Return the message with its control tokens replaced by placeholders."""
        # Scan all texts at once, because most messages contain no control tokens. The template decodes the
        # arguments of calls, so scan their strings, too.
        decoded = (text for call in message.tool_calls for text in _strings(parse_object(call.arguments)))
        texts = filter(None, (message.reasoning, *message.prompt_texts, *decoded))
        control_tokens = scanner.scan("\n".join(texts), progress).control_tokens
        if not control_tokens:
            return message
        escape = partial(self._escape, control_tokens=control_tokens)
        calls = (
            replace(
                call,
                id=escape(call.id),
                name=escape(call.name),
                arguments=_mapped_json(call.arguments, escape),
            )
            for call in message.tool_calls
        )
        return replace(
            message,
            content=escape(message.content),
            reasoning=escape(message.reasoning),
            tool_calls=tuple(calls),
            tool_call_id=escape(message.tool_call_id),
            name=escape(message.name),
        )

    def image_mark(self, name: str) -> str:
        """Return a marker for the image `name` that cannot occur in any message. See `split_at_images`."""
        self._has_images = True
        left, right = self._marks
        return f"{left}image {name}{right}"

    def split_at_images(self, text: str) -> list[str]:
        """Split text at image markers. The result alternates between text and image names."""
        if not self._has_images:
            return [text]
        left, right = self._marks
        return re.split(f"{left}image ([0-9a-f]+){right}", text)

    def escape_tools(
        self, tools: Sequence[Mapping[str, Any]], scanner: TextScanner, progress: Progress | None
    ) -> tuple[Mapping[str, Any], ...]:
        """Return the tool definitions with control tokens replaced by placeholders."""
        # Scan all strings at once, because most tools contain no control tokens.
        control_tokens = scanner.scan("\n".join(_strings(list(tools))), progress).control_tokens
        if not control_tokens:
            return tuple(tools)
        return tuple(_mapped(tool, lambda text: self._escape(text, control_tokens)) for tool in tools)

    def _escape(self, text: str, control_tokens: Sequence[int]) -> str:
        left, right = self._marks
        for token in control_tokens:
            found = literal(self._vocabulary, token)
            if found in text:
                text = text.replace(found, f"{left}{token}{right}")
                self.literals[token] = found
        return text

    def unescape(self, text: str) -> str:
        """Return the text with placeholders replaced by the user's original text."""
        left, right = self._marks
        return re.sub(f"{left}(\\d+){right}", lambda mark: self.literals[int(mark[1])], text)


def is_control(vocabulary: Vocabulary, token: int) -> bool:
    """Return whether a token is a control token: one that has a text form but adds no text to a reply."""
    return vocabulary.piece(token) == b"" and vocabulary.raw_piece(token) != b""


def literal(vocabulary: Vocabulary, token: int) -> str:
    """Return the text form of a control token."""
    return vocabulary.raw_piece(token).decode("utf-8", "replace")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, function: Callable[[str], str]) -> Any:
    """Apply a function to all strings in a JSON value."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {function(key): _mapped(item, function) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(item, function) for item in value]
    return value


def _mapped_json(text: str, function: Callable[[str], str]) -> str:
    """Apply a function to all strings in `text` if it is a JSON object, or else to the whole text."""
    value = parse_object(text)
    return function(text) if value is None else json.dumps(_mapped(value, function), ensure_ascii=False)
