"""A plan of memory as a picture: one bar for each memory, and what its parts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgespec.cli.screen import line_of
from edgespec.files import format_bytes

if TYPE_CHECKING:
    from edgespec.assembly.preview import MemoryPlan, Pool, Preview

__all__ = ["bar", "picture"]

_COLOURS = {
    "target weights": "blue",
    "target cache": "cyan",
    "draft weights": "magenta",
    "draft cache": "bright_magenta",
    "low-bit copy weights": "green",
    "low-bit copy cache": "bright_green",
    "kept texts, at most": "white",
}
_OTHERS = "yellow"
_FULL, _FREE, _OVER = "█", "░", "▒"
_BAR_COLUMNS = 60
_NAMES = {"memory": "memory", "gpu": "graphics cards"}


def picture(preview: Preview) -> RenderableType:
    """Everything about a plan, for a terminal."""
    plan = preview.plan
    pair = f"{preview.target} with {preview.draft}" if preview.draft else preview.target
    parts: list[RenderableType] = [_line(pair)]
    if not preview.draft:
        parts.append(_line(f"no draft: {preview.why_no_draft}", "dim"))
    context = f"context: {plan.context_tokens:,} tokens{_about_context(preview)}"
    parts.append(_line(f"{context}, its cache of type {plan.kv_type}"))
    if preview.draft_window:
        parts.append(_line(f"of a longer text the draft sees {preview.draft_window.description}"))
    for pool in plan.pools:
        kept = plan.prefix_cache_bytes if pool == "memory" else 0
        taken = f"{format_bytes(plan.planned_bytes(pool) - kept)} of {format_bytes(plan.budget_bytes(pool))}"
        more = f", and up to {format_bytes(kept)} for kept texts" if kept else ""
        parts += [
            Text(),
            bar(plan, pool),
            Text(f"{taken} {_NAMES[pool]}{more}", "bold"),
        ]
    parts += [Text(f"budget: {plan.budget.source}", "dim"), Text(), _items(plan)]
    if plan.decisions:
        parts += [Text(), Text("given up so that it fits:" if plan.fits else "even without all this:")]
        said = [f"{each.what} (frees {format_bytes(each.bytes)}): {each.why}" for each in plan.decisions]
        parts.append(Padding(Group(*map(_line, said)), (0, 0, 0, 2)))
    if not plan.fits:
        parts += [Text(), _line(f"it does not fit: {preview.advice}", "bold red")]
    return Group(*parts)


def _about_context(preview: Preview) -> str:
    """Why it is so long, and how it becomes so."""
    tokens, first, trained = (
        preview.plan.context_tokens,
        preview.first_context_tokens,
        preview.trained_context_tokens,
    )
    said = ["what the model was trained for"] if tokens == trained else []
    if 0 < trained < tokens:
        said.append(f"beyond the {trained:,} that the model was trained for")
    if first < tokens:
        said.append("grows on demand" + (f" from {first:,}" if first else ""))
    return f" ({'; '.join(said)})" if said else ""


def _line(words: str, style: str = "") -> Text:
    """Words with names in them, which may hold anything."""
    return Text(line_of(words), style)


def bar(plan: MemoryPlan, pool: Pool) -> Text:
    """The items of one memory side by side; what is free after them, or what is too much."""
    taken, budget = plan.planned_bytes(pool), plan.budget_bytes(pool)
    scale = _BAR_COLUMNS / max(taken, budget, 1)
    text = Text()
    end, columns = 0, 0
    for item in sorted(
        (item for item in plan.items if item.pool == pool), key=lambda item: item.name not in _COLOURS
    ):
        end += item.bytes
        wide = round(end * scale) - columns
        columns += wide
        text.append((_FULL if end <= budget else _OVER) * wide, _COLOURS.get(item.name, _OTHERS))
    text.append(_FREE * (_BAR_COLUMNS - columns), "dim")
    return text


def _share(part_bytes: int, whole_bytes: int) -> str:
    if part_bytes >= 10 * whole_bytes:
        return ">999%"
    return f"{part_bytes / whole_bytes:.1%}"


def _items(plan: MemoryPlan) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for item in plan.items:
        of = plan.budget_bytes(item.pool)
        where = " (on the card)" if item.pool == "gpu" else ""
        table.add_row(
            Text(_FULL, _COLOURS.get(item.name, _OTHERS)),
            f"{item.name}{where}",
            format_bytes(item.bytes),
            _share(item.bytes, of),
        )
    return table
