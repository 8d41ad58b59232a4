"""The status line, which shows speed-up, speed, context use and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from edgespec.system.files import format_bytes
from edgespec.tui.numbers import count, percent, rate

__all__ = ["StatusFacts", "StatusLine", "wrapped"]

_GAP = " · "
# The status line shows the context as nearly full when this fraction of it is used.
_NEARLY_FULL = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFacts:
    """Values shown in the status line.

    Attributes:
        speed_up: Two-word summary of the speed-up.
        writing: Whether a reply is being generated.
        tokens_per_second: Speed of the current or last reply. None before the first token.
        acceptance_rate: Fraction of drafted tokens that were accepted. None if nothing was drafted, or if the
            speed-up is off.
        context_used_tokens: Number of tokens in the conversation.
        context_tokens: Context size in tokens.
        memory_bytes: Resident memory of the process.
        dropped_messages: Number of oldest messages that no longer fit in the context.
        tools: Number of tools that the model can call.
        downloads: The running downloads and their progress.
    """

    speed_up: str = ""
    writing: bool = False
    tokens_per_second: float | None = None
    acceptance_rate: float | None = None
    context_used_tokens: int = 0
    context_tokens: int = 0
    memory_bytes: int = 0
    dropped_messages: int = 0
    tools: int = 0
    downloads: str = ""

    @property
    def context_nearly_full(self) -> bool:
        """True if the next turn may not fit in the context."""
        return self.context_tokens > 0 and self.context_used_tokens >= _NEARLY_FULL * self.context_tokens

    def segments(self) -> list[tuple[str, str]]:
        """Return the text and style of each part of the status line, from left to right."""
        used, total = _thousands(self.context_used_tokens), _thousands(self.context_tokens)
        dropped = f"{count(self.dropped_messages, 'old message')} left out" if self.dropped_messages else ""
        parts = [
            (self.speed_up or "starting", "$primary" if self.writing else ""),
            ("" if self.tokens_per_second is None else rate(self.tokens_per_second), ""),
            ("" if self.acceptance_rate is None else f"accepted {percent(self.acceptance_rate)}", ""),
            (f"context {used}/{total}", "$warning" if self.context_nearly_full else ""),
            (dropped, "$warning"),
            (f"{count(self.tools, 'tool')} on" if self.tools else "", ""),
            (f"RAM {format_bytes(self.memory_bytes)}", ""),
            (self.downloads, "$primary"),
        ]
        return [part for part in parts if part[0]]


def wrapped(segments: Sequence[tuple[str, str]], width: int) -> Content:
    """Return the parts of the status line, wrapped to as many lines as they need."""
    lines: list[Content] = []
    for segment in segments:
        part = Content.assemble(segment)
        if lines and lines[-1].cell_length + len(_GAP) + part.cell_length <= width:
            lines[-1] = Content.assemble(lines[-1], (_GAP, "$faint"), part)
        else:
            lines.append(part)
    return Content("\n").join(lines)


def _thousands(tokens: int) -> str:
    return count(tokens) if tokens < 10_000 else f"{tokens / 1000:.3g}k"


class StatusLine(Widget):
    """Live status line, which wraps to two or three lines in a narrow terminal."""

    facts: reactive[StatusFacts] = reactive(StatusFacts, layout=False)

    def watch_facts(self, before: StatusFacts, now: StatusFacts) -> None:
        """Update the layout only if the number of lines changes. An update for every token would flicker."""
        width = self.content_size.width
        if width and _line_count(before, width) != _line_count(now, width):
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return _line_count(self.facts, width)

    def render(self) -> Content:
        return wrapped(self.facts.segments(), self.content_size.width)


def _line_count(facts: StatusFacts, width: int) -> int:
    return wrapped(facts.segments(), width).plain.count("\n") + 1
