"""The status line: what runs, how fast, how much was accepted, how full the context is, memory."""

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


@dataclass(frozen=True, slots=True)
class StatusFacts:
    """Everything the status line says. A rate is None before there is anything to divide.

    method: what runs, with what that gains.
    """

    method: str = ""
    writing: bool = False
    tokens_per_second: float | None = None
    acceptance_rate: float | None = None
    tokens_per_pass: float | None = None
    context_used_tokens: int = 0
    context_tokens: int = 0
    memory_bytes: int = 0
    unseen_messages: int = 0

    @classmethod
    def of(
        cls,
        stats: Stats | None,
        *,
        method: str,
        writing: bool,
        context_used_tokens: int,
        context_tokens: int,
        memory_bytes: int,
        unseen_messages: int,
    ) -> StatusFacts:
        """The facts with the rates of these stats."""
        return cls(
            method=method,
            writing=writing,
            tokens_per_second=stats.tokens_per_second if stats else None,
            acceptance_rate=stats.acceptance_rate if stats else None,
            tokens_per_pass=stats.tokens_per_target_pass if stats else None,
            context_used_tokens=context_used_tokens,
            context_tokens=context_tokens,
            memory_bytes=memory_bytes,
            unseen_messages=unseen_messages,
        )

    @property
    def context_is_tight(self) -> bool:
        """True when the next turn or two may not fit."""
        return self.context_tokens > 0 and self.context_used_tokens >= 0.85 * self.context_tokens

    def segments(self) -> list[tuple[str, str]]:
        """Text and style of each part, in reading order."""
        used, total = _thousands(self.context_used_tokens), _thousands(self.context_tokens)
        parts = [(self.method or "starting", "$primary" if self.writing else "")]
        if self.tokens_per_second is not None:
            parts.append((rate(self.tokens_per_second), ""))
        if self.acceptance_rate is not None:
            parts.append((f"{percent(self.acceptance_rate)} accepted", ""))
        if self.tokens_per_pass is not None:
            parts.append((f"{self.tokens_per_pass:.1f}/pass", ""))
        parts.append((f"{used}/{total} ctx", "$own" if self.context_is_tight else ""))
        if self.unseen_messages:
            parts.append((f"{self.unseen_messages} unseen", "$own"))
        parts.append((format_bytes(self.memory_bytes), ""))
        return parts


def arranged(lengths: Sequence[int], width: int) -> tuple[str, list[list[int]]]:
    """How to lay parts of these lengths out at `width`: the gap, and the parts of each line.

    One line with wide gaps if they fit, with tight gaps if not, else as many lines as it takes:
    nothing is ever cut.
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
    """The live status, on one line or, where the terminal is narrow, on two or three."""

    facts: reactive[StatusFacts] = reactive(StatusFacts, layout=False)

    def watch_facts(self, before: StatusFacts, now: StatusFacts) -> None:
        """Take another line only when needed: a new layout for every token would flicker."""
        width = self.content_size.width
        if width and self._line_count(before, width) != self._line_count(now, width):
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        """As many lines as the parts need."""
        return self._line_count(self.facts, width)

    def render(self) -> Content:
        """The parts, laid out for the present width."""
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
