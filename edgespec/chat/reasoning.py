"""Separate a reply's reasoning from its answer by the markers of published chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from edgespec.backends.base import Vocabulary

__all__ = [
    "ReasoningSplitter",
    "SplitText",
    "closing_marker",
    "piece_with_markers",
    "split_reasoning",
]

# The markers before and after reasoning, with models whose published chat templates contain them.
_MARKERS: Mapping[str, str] = MappingProxyType(
    {
        # Qwen 3, QwQ, DeepSeek R1, GLM 4.5, SmolLM 3, Nemotron Nano, MiniMax M2, Kimi K2 Thinking
        "<think>": "</think>",
        # Magistral, Ministral 3 Reasoning
        "[THINK]": "[/THINK]",
        # Seed-OSS
        "<seed:think>": "</seed:think>",
        # MiniMax M3
        "<mm:think>": "</mm:think>",
        # Command R7B, Command A Reasoning
        "<|START_THINKING|>": "<|END_THINKING|>",
        # Gemma 4
        "<|channel>thought": "<channel|>",
        # gpt-oss. A reply that starts with the final channel has no reasoning, so its reasoning ends at once.
        "<|channel|>analysis<|message|>": "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>": "",
    }
)
# The parts of the markers that can be single control tokens, such as `[THINK]` and `<|channel|>`.
_MARKER_TOKENS = frozenset(
    part.encode()
    for pair in _MARKERS.items()
    for marker in pair
    for part in re.findall(r"<[^<>]+>|\[[^\[\]]+\]", marker)
)
# Number of tokens at the end of a prompt in which to look for an opening marker, which has at most 30 bytes.
_MAX_MARKER_TOKENS = 40


def piece_with_markers(vocabulary: Vocabulary, token: int) -> bytes:
    """Return the bytes that a token adds to a reply, including markers that are control tokens."""
    piece = vocabulary.piece(token)
    if piece:
        return piece
    raw = vocabulary.raw_piece(token)
    return raw if raw in _MARKER_TOKENS else b""


def closing_marker(vocabulary: Vocabulary, prompt: Sequence[int]) -> str | None:
    """Return the marker that ends the reasoning opened by the end of a prompt, or None if none is open.

    The templates of DeepSeek R1, QwQ and others write the opening marker themselves, so that the model must
    reason. The reply then starts inside the reasoning.
    """
    tokens = prompt[-_MAX_MARKER_TOKENS:]
    pieces = (vocabulary.piece(token) or vocabulary.raw_piece(token) for token in tokens)
    end = b"".join(pieces).decode("utf-8", "replace").rstrip()
    return next((close for start, close in _MARKERS.items() if close and end.endswith(start)), None)


class SplitText(NamedTuple):
    """The reasoning and the answer in a part of a reply, without markers.

    Attributes:
        in_reasoning: Whether the part belongs to the reasoning, even if all its text is withheld.
    """

    reasoning: str
    answer: str
    in_reasoning: bool


class ReasoningSplitter:
    """Splits a reply into reasoning and answer while its text arrives.

    Only a marker at the very start of a reply opens reasoning, because a marker in a sentence or a code block
    is part of the answer. Text that could belong to a marker is withheld until more text shows whether it
    does. White space around the reasoning is dropped. A reply without reasoning is not changed.

    Args:
        close: The closing marker if the prompt has already opened the reasoning, or None.
    """

    def __init__(self, close: str | None = None) -> None:
        self._close = close
        self._phase: Literal["start", "reasoning", "answer"] = "start"
        self._held = ""
        # True while the next text is the first one of the reasoning, or of the answer after it.
        self._drops_space = False

    def feed(self, text: str) -> SplitText:
        """Add the text of a token, and return the text that this token completes."""
        before = self._phase
        self._held += text
        if self._phase == "start":
            self._read_start()
        in_reasoning = "reasoning" in (before, self._phase)
        reasoning = self._read_reasoning() if self._phase == "reasoning" else ""
        answer = self._read(len(self._held)) if self._phase == "answer" else ""
        return SplitText(reasoning, answer, in_reasoning)

    def finish(self, text: str = "") -> SplitText:
        """Add the last text of the reply, and return it with all withheld text."""
        reasoning, answer, _ = self.feed(text)
        if self._phase == "start":
            self._leave_start()
        in_reasoning = self._phase == "reasoning"
        rest = self._read(len(self._held.rstrip() if in_reasoning else self._held))
        return (
            SplitText(reasoning + rest, answer, True)
            if in_reasoning
            else SplitText(reasoning, answer + rest, False)
        )

    def _read_start(self) -> None:
        """Read the opening marker, or find that there is none. Does nothing while it could still come."""
        text = self._held.lstrip()
        opening = next((marker for marker in _MARKERS if text.startswith(marker)), None)
        if opening is not None:
            self._close = _MARKERS[opening]
            self._held = text[len(opening) :]
        elif any(marker.startswith(text) for marker in _MARKERS):
            return
        self._leave_start()

    def _leave_start(self) -> None:
        self._phase = "answer" if self._close is None else "reasoning"
        self._drops_space = self._close is not None

    def _read_reasoning(self) -> str:
        """Return the reasoning that is not withheld, and enter the answer after the closing marker."""
        close = self._close or ""
        end = self._held.find(close)
        if end < 0:
            undecided = _shared_length(self._held, close)
            return self._read(len(self._held[: len(self._held) - undecided].rstrip()))
        reasoning = self._read(len(self._held[:end].rstrip()))
        self._held = self._held[self._held.index(close) + len(close) :]
        self._phase, self._drops_space = "answer", True
        return reasoning

    def _read(self, length: int) -> str:
        """Return the first `length` characters, without leading space at the start of a part."""
        text, self._held = self._held[:length], self._held[length:]
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return text


def _shared_length(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that `marker` starts with."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if marker.startswith(text[-size:])), 0)


def split_reasoning(text: str, close: str | None = None) -> tuple[str, str]:
    """Return the reasoning and the answer of a reply.

    Args:
        text: The whole reply.
        close: See `ReasoningSplitter`.
    """
    reasoning, answer, _ = ReasoningSplitter(close).finish(text)
    return reasoning, answer
