"""The status line and the details panel, which show the speed and memory of replies.

The status line shows speed-up, speed, context use and memory. The panel adds accepted tokens per position,
time per phase, and a sparkline of the speed over time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from edgespec.system.files import format_bytes
from edgespec.tui.numbers import bar, count, percent, rate, seconds_text
from edgespec.tui.texts import (
    exactness_sentence,
    is_too_short,
    reason_text,
    sentences,
    speed_up_text,
    was_cpu_busy,
    worst_case,
)

if TYPE_CHECKING:
    from edgespec import Exactness, MethodReport, Reply, Stats

_MAX_POSITIONS = 16
_BARS = "▁▂▃▄▅▆▇█"
# Initial duration of one bar of the sparkline, in seconds. It doubles when a reply exceeds `_MAX_BARS` bars.
_BAR_SECONDS = 0.25
_MAX_BARS = 64
# Minimum number of bars of a sparkline. Fewer bars would show mostly noise.
_MIN_BARS = 6
_GAP = " · "
# The status line shows the context as nearly full when this fraction of it is used.
_NEARLY_FULL = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFacts:
    """Values shown in the status line.

    Attributes:
        speed_up: Short summary of the speed-up. Empty if there is nothing to say about it.
        writing: Whether a reply is being generated.
        tokens_per_second: Speed of the current or last reply. None before the first token.
        acceptance_rate: Fraction of drafted tokens that were accepted. None if nothing was drafted, or if the
            speed-up is off.
        context_used_tokens: Number of tokens in the conversation.
        context_tokens: Context size in tokens, or 0 before it is known.
        memory_bytes: Resident memory of the process, or 0 before it is known.
        dropped_messages: Number of messages at the start that no longer fit in the context.
        tools: Number of tools that the model can call.
        downloads: The running downloads and their progress.
    """

    speed_up: str = "starting"
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
            (self.speed_up, "$primary" if self.writing else ""),
            ("" if self.tokens_per_second is None else rate(self.tokens_per_second), ""),
            ("" if self.acceptance_rate is None else f"accepted {percent(self.acceptance_rate)}", ""),
            (
                f"context {used}/{total}" if self.context_tokens else "",
                "$warning" if self.context_nearly_full else "",
            ),
            (dropped, "$warning"),
            (f"{count(self.tools, 'tool')} on" if self.tools else "", ""),
            (f"RAM {format_bytes(self.memory_bytes)}" if self.memory_bytes else "", ""),
            (self.downloads, "$primary"),
        ]
        return [part for part in parts if part[0]]


class StatusLine(Widget):
    """Live status line, which wraps to two or three lines in a narrow terminal."""

    facts: reactive[StatusFacts] = reactive(StatusFacts, layout=False)

    def watch_facts(self, before: StatusFacts, now: StatusFacts) -> None:
        """Update the layout only if the number of lines changes, to avoid flicker with every token."""
        width = self.content_size.width
        if width and _line_count(before, width) != _line_count(now, width):
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return _line_count(self.facts, width)

    def render(self) -> Content:
        return wrapped(self.facts.segments(), self.content_size.width)


def _line_count(facts: StatusFacts, width: int) -> int:
    return wrapped(facts.segments(), width).plain.count("\n") + 1


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
    """Format 9999 as '9,999', 32768 as '32.8k' and 1048576 as '1.05M'."""
    if tokens < 10_000:
        return count(tokens)
    return f"{tokens / 1e3:.3g}k" if tokens < 999_500 else f"{tokens / 1e6:.3g}M"


class Details(VerticalScroll):
    """The details panel to the right of the chat. Every update redraws the whole panel."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual's own name
        self._text = Static()
        super().__init__(self._text, id=id)
        self._draw: Callable[[int], Content] | None = None

    def show(self, draw: Callable[[int], Content]) -> None:
        """Show the result of `draw(width)` now, and redraw it after every resize."""
        self._draw = draw
        self.on_resize()

    def on_resize(self) -> None:
        width = self.scrollable_content_region.width
        if self._draw is not None and width:
            self._text.update(self._draw(width))


def details_content(
    stats: Stats | None,
    width: int,
    *,
    method: MethodReport,
    drafters: Sequence[tuple[str, str]] = (),
    reply: Reply | None,
    rates: list[float],
    memory_bytes: int,
    loss_limits: tuple[float, float] | None,
    exactness: Exactness | None = None,
) -> Content:
    """Return the contents of the details panel, laid out for `width` cells."""
    parts = [Content.assemble(_speed_up(method, stats), *(_row(*each, width) for each in drafters))]
    if exactness is not None:
        parts.append(Content(exactness_sentence(exactness) + "\n"))
    if stats is None or not (stats.generated_tokens or stats.prompt_tokens):
        parts.append(Content("The numbers appear with the first reply.\n").stylize("$muted"))
    else:
        parts.append(_speed(stats, width, method, reply, loss_limits, rates))
        parts += [_positions(stats, width), _phases(stats, width)]
    parts.append(_memory(stats, memory_bytes, width))
    return Content("\n").join([part for part in parts if part])


def _speed_up(method: MethodReport, stats: Stats | None) -> Content:
    lines = [
        speed_up_text(method, stats),
        reason_text(method) if method.effective != "none" else "",
        method.note,
    ]
    return Content.assemble(_heading("Speed-up"), *(f"{sentences(line)}\n" for line in lines if line))


def _heading(text: str) -> Content:
    return Content(text + "\n").stylize("bold")


def _row(label: str, value: str, width: int) -> Content:
    fits = len(label) + len(value) < width
    gap = " " * (width - len(label) - len(value)) if fits else "\n" + " " * max(0, width - len(value))
    return Content.assemble((label, "$muted"), gap, value, "\n")


def _speed(
    stats: Stats,
    width: int,
    method: MethodReport,
    reply: Reply | None,
    loss_limits: tuple[float, float] | None,
    rates: list[float],
) -> Content:
    cached = stats.cached_prompt_tokens
    read = f"{count(stats.prompt_tokens - cached)} of {count(stats.prompt_tokens)}"
    rows = [
        ("Speed", rate(stats.tokens_per_second)),
        ("Time to first token", seconds_text(stats.ttft_seconds)),
        ("Time per token", seconds_text(stats.tpot_seconds)),
        ("Tokens generated", count(stats.generated_tokens)),
        ("Prompt read", f"{read} ({count(cached)} cached)" if cached else read),
    ]
    if stats.drafted_tokens:
        share = f"{count(stats.accepted_tokens)} of {count(stats.drafted_tokens)}"
        rows.append(("Guesses accepted", f"{share} ({percent(stats.acceptance_rate)})"))
    if stats.tokens_per_target_pass is not None:
        rows.append(("Tokens at a time", f"{stats.tokens_per_target_pass:.2f}"))
    is_measured = not is_too_short(stats)
    if is_measured and method.speed_up_text and method.effective != "none":
        rows.append(("Speed-up", method.speed_up_text))
    elif is_measured and method.gain is None and stats.drafted_tokens and stats.speedup_estimate is not None:
        rows.append(("Speed-up", f"{stats.speedup_estimate:.2f}x"))
    lines = [_row(label, value, width) for label, value in rows]
    if line := sparkline(rates, width - 1):
        lines.insert(1, Content.assemble((line, "$primary"), "\n"))
    if worst := worst_case(stats, method, loss_limits):
        share, why = worst
        lines += [
            _row("Slowdown at worst", share, width),
            Content(f"allowed: {why}\n").stylize("$muted"),
        ]
    if stats.threads:
        lines.append(_row("CPU threads", str(stats.threads), width))
    if was_cpu_busy(stats):
        lines.append(
            Content("fewer than usual, because other programs use the processor\n").stylize("$muted")
        )
    if reply is not None:
        lines.append(_row("Seed", str(reply.seed), width))
    return Content.assemble(_heading("This reply"), *lines)


def _positions(stats: Stats, width: int) -> Content:
    # The model thread extends these lists during a reply, so copy them.
    drafted, accepted = list(stats.drafted_per_position), list(stats.accepted_per_position)
    pairs = [(a, d) for a, d in zip(accepted, drafted, strict=False) if d]
    if not pairs:
        return Content("")
    rows = [_heading("Guesses accepted, by position")]
    for place, (right, guessed) in enumerate(pairs[:_MAX_POSITIONS], 1):
        share = right / guessed
        rows.append(_bar_row(f"{place:>2}", share, percent(share), "$success", width))
    if len(pairs) > _MAX_POSITIONS:
        rows.append(Content(f"   and {len(pairs) - _MAX_POSITIONS} more\n").stylize("$muted"))
    return Content.assemble(*rows)


def _phases(stats: Stats, width: int) -> Content:
    phases = (
        ("read prompt", stats.prefill_seconds),
        ("guess", stats.draft_seconds),
        ("check", stats.verify_seconds),
        ("undo", stats.rollback_seconds),
        ("other", stats.sampling_seconds + stats.overhead_seconds),
    )
    total = sum(seconds for _, seconds in phases)
    if not total:
        return Content("")
    rows = (
        _bar_row(f"{name:<11}", seconds / total, seconds_text(seconds), "$primary", width)
        for name, seconds in phases
    )
    return Content.assemble(_heading("Time"), *rows)


def _bar_row(label: str, share: float, value: str, style: str, width: int) -> Content:
    room = max(4, width - len(label) - 10)
    return Content.assemble(
        (label, "$muted"), " ", (bar(share, room), f"{style} on $faint 40%"), f"{value:>9}", "\n"
    )


def _memory(stats: Stats | None, memory_bytes: int, width: int) -> Content:
    rows = [_heading("Memory"), _row("Now", format_bytes(memory_bytes), width)]
    if stats is not None:
        peak_bytes = max(stats.peak_memory_bytes, memory_bytes) if stats.peak_memory_bytes else 0
        named = (
            ("Peak", peak_bytes),
            ("Draft model weights", stats.draft_weight_bytes),
            ("Draft model cache", stats.draft_kv_bytes),
            ("Tables of repeated text", stats.draft_other_bytes),
        )
        rows += [_row(label, format_bytes(size), width) for label, size in named if size]
    return Content.assemble(*rows)


class SpeedHistory:
    """The number of tokens generated in each time interval of a reply.

    An interval lasts a quarter of a second at first. Its length doubles whenever there would be more than
    64 intervals.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._bar_seconds = _BAR_SECONDS
        self._began: float | None = None

    def add(self, tokens: int, now: float | None = None) -> None:
        """Add tokens that arrived at `now` (default: the current time). The first call starts the clock."""
        now = monotonic() if now is None else now
        if self._began is None:
            self._began = now
        while (place := int((now - self._began) / self._bar_seconds)) >= _MAX_BARS:
            self._tokens += [0] * (len(self._tokens) % 2)
            self._tokens = [sum(self._tokens[i : i + 2]) for i in range(0, len(self._tokens), 2)]
            self._bar_seconds *= 2
        self._tokens += [0] * (place + 1 - len(self._tokens))
        self._tokens[place] += tokens

    def rates(self) -> list[float]:
        """Return the tokens per second in each complete interval, or an empty list if there are too few."""
        complete = self._tokens[:-1]
        return [tokens / self._bar_seconds for tokens in complete] if len(complete) >= _MIN_BARS else []


def sparkline(rates: list[float], width: int) -> str:
    """Return at most `width` bars, oldest rate first. Their heights are relative to the highest rate."""
    if not rates or width < 1:
        return ""
    count = min(width, len(rates))
    groups = [rates[i * len(rates) // count : (i + 1) * len(rates) // count] for i in range(count)]
    means = [sum(group) / len(group) for group in groups]
    highest = max(means) or 1.0
    return "".join(_BARS[round(mean / highest * (len(_BARS) - 1))] for mean in means)
