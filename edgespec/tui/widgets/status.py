"""The status line, which shows speed-up, speed, context use and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from edgespec.files import format_bytes
from edgespec.tui.numbers import count, percent, rate

if TYPE_CHECKING:
    from edgespec import Stats

__all__ = ["StatusFacts", "StatusLine", "arranged"]

_GAP = "  ·  "
_TIGHT_GAP = " · "
# The context is shown as nearly full from this fraction. One or two more turns may still fit.
_NEARLY_FULL = 0.85


@dataclass(frozen=True, slots=True)
class StatusFacts:
    """Values shown in the status line.

    Attributes:
        speed_up: The speed-up in two words.
        writing: Whether a reply is being generated.
        tokens_per_second: Speed of the current or last reply. None before the first token.
        acceptance_rate: Fraction of drafted tokens that were accepted. None if nothing was drafted.
        context_used_tokens: Number of tokens in the conversation.
        context_tokens: Context size in tokens.
        memory_bytes: Resident memory of the process.
        dropped_messages: Number of oldest messages that no longer fit in the context.
    """

    speed_up: str = ""
    writing: bool = False
    tokens_per_second: float | None = None
    acceptance_rate: float | None = None
    context_used_tokens: int = 0
    context_tokens: int = 0
    memory_bytes: int = 0
    dropped_messages: int = 0

    @classmethod
    def of(
        cls,
        stats: Stats | None,
        *,
        speed_up: str,
        writing: bool,
        context_used_tokens: int,
        context_tokens: int,
        memory_bytes: int,
        dropped_messages: int,
    ) -> StatusFacts:
        """Create the facts, with the speed and acceptance rate taken from `stats`."""
        return cls(
            speed_up=speed_up,
            writing=writing,
            tokens_per_second=stats.tokens_per_second if stats else None,
            acceptance_rate=stats.acceptance_rate if stats else None,
            context_used_tokens=context_used_tokens,
            context_tokens=context_tokens,
            memory_bytes=memory_bytes,
            dropped_messages=dropped_messages,
        )

    @property
    def context_nearly_full(self) -> bool:
        """True if the next turns may not fit in the context."""
        return self.context_tokens > 0 and self.context_used_tokens >= _NEARLY_FULL * self.context_tokens

    def segments(self) -> list[tuple[str, str]]:
        """Return the text and style of each part, from left to right."""
        used, total = _thousands(self.context_used_tokens), _thousands(self.context_tokens)
        parts = [(self.speed_up or "starting", "$primary" if self.writing else "")]
        if self.tokens_per_second is not None:
            parts.append((rate(self.tokens_per_second), ""))
        if self.acceptance_rate is not None:
            parts.append((f"guesses {percent(self.acceptance_rate)} right", ""))
        parts.append((f"context {used}/{total}", "$own" if self.context_nearly_full else ""))
        if self.dropped_messages:
            parts.append((f"{count(self.dropped_messages, 'old message')} left out", "$own"))
        parts.append((format_bytes(self.memory_bytes), ""))
        return parts


def arranged(lengths: Sequence[int], width: int) -> tuple[str, list[list[int]]]:
    """Choose the gap between the parts of the status line, and the parts to show on each line.

    All parts share one line if they fit, with narrow gaps if wide ones do not. Otherwise they are spread over
    several lines, so that nothing is cut off.
    """
    for gap in (_GAP, _TIGHT_GAP):
        if sum(lengths) + len(gap) * (len(lengths) - 1) <= width:
            return gap, [list(range(len(lengths)))]
    lines: list[list[int]] = []
    room = 0
    for place, length in enumerate(lengths):
        if not lines or room < len(_TIGHT_GAP) + length:
            lines.append([place])
            room = width - length
        else:
            lines[-1].append(place)
            room -= len(_TIGHT_GAP) + length
    return _TIGHT_GAP, lines


def _thousands(tokens: int) -> str:
    return count(tokens) if tokens < 10_000 else f"{tokens / 1000:.3g}k"


class StatusLine(Widget):
    """Live status line. In a narrow terminal it wraps to two or three lines."""

    facts: reactive[StatusFacts] = reactive(StatusFacts, layout=False)

    def watch_facts(self, before: StatusFacts, now: StatusFacts) -> None:
        """Update the layout only if the number of lines changes, because doing so per token would flicker."""
        width = self.content_size.width
        if width and self._line_count(before, width) != self._line_count(now, width):
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        """Return the number of lines needed for all parts."""
        return self._line_count(self.facts, width)

    def render(self) -> Content:
        """Return the status text, laid out for the current width."""
        segments = self.facts.segments()
        gap, lines = arranged([Content(text).cell_length for text, _ in segments], self.content_size.width)
        rows = [
            Content.assemble((gap, "$faint")).join([Content.assemble(segments[n]) for n in line])
            for line in lines
        ]
        return Content("\n").join(rows)

    @staticmethod
    def _line_count(facts: StatusFacts, width: int) -> int:
        lengths = [Content(text).cell_length for text, _ in facts.segments()]
        return len(arranged(lengths, width)[1])
