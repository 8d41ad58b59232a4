"""Separate a reply's reasoning from its answer, using the markers of published chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from edgespec.model.base import Vocabulary

__all__ = [
    "MIN_CUT_CHARACTERS",
    "REASONING_MARKERS",
    "ReasoningSplitter",
    "SplitText",
    "leading_marker",
    "opening_marker",
    "piece_with_markers",
    "split_at_markers",
    "split_reasoning",
]

# The markers before and after the reasoning, from published chat templates.
REASONING_MARKERS: Mapping[str, str] = MappingProxyType(
    {
        # Markers used by Qwen 3, QwQ, DeepSeek R1, GLM 4.5, SmolLM 3, Nemotron Nano, MiniMax M2 and Kimi K2
        # Thinking.
        "<think>": "</think>",
        # Markers used by Magistral and Ministral 3 Reasoning.
        "[THINK]": "[/THINK]",
        # Markers used by Seed-OSS.
        "<seed:think>": "</seed:think>",
        # Markers used by MiniMax M3.
        "<mm:think>": "</mm:think>",
        # Markers used by Command R7B and Command A Reasoning.
        "<|START_THINKING|>": "<|END_THINKING|>",
        # Markers used by Gemma 4.
        "<|channel>thought": "<channel|>",
        # Markers used by gpt-oss, whose final channel contains the answer.
        "<|channel|>analysis<|message|>": "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>": "",
    }
)
# Minimum length in characters for an incomplete marker to be removed from the end of a truncated reply. A
# single character, such as `<`, is probably text.
MIN_CUT_CHARACTERS = 2
# Parts of reasoning markers, such as `[THINK]` and `<|channel|>`.
_MARKER_TOKENS = frozenset(
    part.encode()
    for pair in REASONING_MARKERS.items()
    for marker in pair
    for part in re.findall(r"<[^<>]+>|\[[^\[\]]+\]", marker)
)
_MARKER_TOKEN = re.compile(f"({'|'.join(re.escape(marker.decode()) for marker in _MARKER_TOKENS)})")
_LEADING = re.compile(rf"\s*(?:{'|'.join(map(re.escape, REASONING_MARKERS))})\s*")
_OPENED = re.compile(
    rf"(?:{'|'.join(re.escape(start) for start, end in REASONING_MARKERS.items() if end)})\s*\Z"
)
# Number of characters to search at the end of a prompt for a marker that opens the reasoning, such as
# `<think>`. The longest marker has 30 characters.
_PROMPT_END = 200


def piece_with_markers(vocabulary: Vocabulary, token: int, others: frozenset[bytes] = frozenset()) -> bytes:
    """Return the bytes that a token adds to a reply, including reasoning markers such as `<think>`.

    Args:
        vocabulary: The target's tokenizer.
        token: The token.
        others: The texts of other control tokens to include.
    """
    piece = vocabulary.piece(token)
    if piece:
        return piece
    raw = vocabulary.raw_piece(token)
    return raw if raw in _MARKER_TOKENS or raw in others else b""


def opening_marker(prompt: str) -> str:
    """Return the opening reasoning marker at the end of a prompt, with whitespace, or an empty string.

    Some templates, such as those of DeepSeek R1 and QwQ, add the opening marker themselves to make the model
    reason. The reply then starts inside the reasoning.
    """
    opened = _OPENED.search(prompt[-_PROMPT_END:])
    return opened[0] if opened else ""


def split_at_markers(text: str) -> list[tuple[str, bool]]:
    """Split text at potential reasoning markers, and return (part, is_marker) pairs."""
    return [(part, place % 2 == 1) for place, part in enumerate(_MARKER_TOKEN.split(text))]


def leading_marker(text: str) -> str:
    """Return the opening reasoning marker at the start of a reply, or an empty string.

    Whitespace before and after the marker is included.
    """
    leading = _LEADING.match(text)
    return leading[0] if leading else ""


class SplitText(NamedTuple):
    """Newly generated text, split into reasoning and answer, without the markers around the reasoning.

    Attributes:
        in_reasoning: Whether any of the new text belongs to the reasoning.
    """

    reasoning: str
    answer: str
    in_reasoning: bool


class ReasoningSplitter:
    """Splits a reply into reasoning and answer as its text arrives.

    Only a marker at the very start of a reply opens reasoning, because a marker in a sentence or code block
    is part of the answer. Text that could be part of a marker is held back until more text arrives.
    Whitespace around the reasoning is dropped. A reply without reasoning is left unchanged.

    Args:
        reply_start: Text at the end of the prompt that already belongs to the reply.
        ends: Additional strings that end the reasoning. They become part of the answer.
    """

    def __init__(self, reply_start: str = "", ends: tuple[str, ...] = ()) -> None:
        self._close = ""
        self._ends = ends
        self._phase: Literal["start", "reasoning", "answer"] = "start"
        self._held = ""
        # Whether to drop leading whitespace from the reasoning or the answer.
        self._drops_space = False
        self._skipped = 0
        if reply_start:
            self.feed(reply_start)
            self._skipped = len(self._held)

    @property
    def pending(self) -> int:
        """Number of characters that are held back and may turn out to be part of the answer."""
        return len(self._held) - self._skipped if self._phase == "start" else 0

    def feed(self, text: str) -> SplitText:
        """Add reply text, and return all text that can be classified so far as reasoning or answer."""
        before = self._phase
        self._held += text
        if self._phase == "start":
            self._read_start()
        in_reasoning = "reasoning" in (before, self._phase)
        reasoning = self._read_reasoning() if self._phase == "reasoning" else ""
        answer = self._read(len(self._held)) if self._phase == "answer" else ""
        return SplitText(reasoning, answer, in_reasoning or self._drops_space)

    def finish(self, text: str = "", *, cut: bool = False) -> SplitText:
        """Add the final text of the reply, and return all text that was held back.

        Args:
            text: The final text.
            cut: Whether the reply reached its maximum length. If so, an incomplete marker at its end is
                omitted.
        """
        reasoning, answer, _ = self.feed(text)
        if cut:
            self._drop_partial_marker()
        if self._phase == "start":
            self._begin_answer()
        if self._phase == "reasoning":
            return SplitText(reasoning + self._read(len(self._held.rstrip())), "", True)
        return SplitText(reasoning, answer + self._read(len(self._held)), False)

    def _drop_partial_marker(self) -> None:
        markers: tuple[str, ...] = ()
        if self._phase == "start":
            markers = tuple(REASONING_MARKERS)
        elif self._phase == "reasoning":
            markers = (self._close, *self._ends)
        length = max((_shared_length(self._held, marker) for marker in markers), default=0)
        if length >= MIN_CUT_CHARACTERS:
            self._held = self._held[:-length]

    def _read_start(self) -> None:
        text = self._held.lstrip()
        opening = next((marker for marker in REASONING_MARKERS if text.startswith(marker)), None)
        if opening is not None:
            self._close = REASONING_MARKERS[opening]
            self._held = text[len(opening) :]
            self._phase, self._drops_space = "reasoning", True
        elif not any(marker.startswith(text) for marker in REASONING_MARKERS):
            self._begin_answer()

    def _begin_answer(self) -> None:
        self._phase = "answer"
        self._held = self._held[self._skipped :]

    def _read_reasoning(self) -> str:
        closes = (self._close, *self._ends)
        found = [(at, close) for close in closes if (at := self._held.find(close)) >= 0]
        if not found:
            undecided = max(_shared_length(self._held, close) for close in closes)
            return self._read(len(self._held[: len(self._held) - undecided].rstrip()))
        end, close = min(found)
        reasoning = self._read(len(self._held[:end].rstrip()))
        after = self._held.index(close) + (len(close) if close == self._close else 0)
        self._held = self._held[after:]
        self._phase, self._drops_space = "answer", True
        return reasoning

    def _read(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return text


def _shared_length(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if marker.startswith(text[-size:])), 0)


def split_reasoning(text: str, reply_start: str = "") -> tuple[str, str]:
    """Return the reasoning and the answer of a reply.

    Args:
        text: The text of the reply.
        reply_start: See `ReasoningSplitter`. Not included in the result.
    """
    reasoning, answer, _ = ReasoningSplitter(reply_start).finish(text)
    return reasoning, answer
