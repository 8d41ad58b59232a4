"""The details panel: speed-up, speed, accepted tokens per position, time per phase, and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from edgespec.system.files import format_bytes
from edgespec.tui.numbers import bar, count, percent, rate, seconds_text
from edgespec.tui.speed_history import sparkline
from edgespec.tui.texts import (
    exactness_sentence,
    reason_text,
    sentences,
    speed_up_text,
    was_cpu_busy,
    worst_case,
)

if TYPE_CHECKING:
    from edgespec import Exactness, MethodReport, Reply, Stats

__all__ = ["Details", "details_content"]

_MAX_POSITIONS = 16


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
    parts = [Content.assemble(_speed_up(method), *(_row(*each, width) for each in drafters))]
    if exactness is not None:
        parts.append(Content(exactness_sentence(exactness) + "\n"))
    if stats is None or not (stats.generated_tokens or stats.prompt_tokens):
        parts.append(Content("The numbers appear with the first reply.\n").stylize("$muted"))
    else:
        parts.append(_speed(stats, width, method, reply, loss_limits, rates))
        parts += [_positions(stats, width), _phases(stats, width)]
    parts.append(_memory(stats, memory_bytes, width))
    return Content("\n").join([part for part in parts if part])


def _speed_up(method: MethodReport) -> Content:
    lines = [speed_up_text(method), reason_text(method) if method.effective != "none" else "", method.note]
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
    if method.speed_up_text and method.effective != "none":
        rows.append(("Speed-up", method.speed_up_text))
    elif method.gain is None and stats.drafted_tokens and stats.speedup_estimate is not None:
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
    # Copy the lists, because the model thread extends them during a reply.
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
