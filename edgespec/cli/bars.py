"""Draw the memory plan in the terminal as a bar and a table per memory pool.

This is a module of its own, because importing rich would slow down the help of all commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from edgespec.cli.screen import line_of
from edgespec.options.methods import limit_text
from edgespec.system.files import format_bytes, format_number, format_rate

if TYPE_CHECKING:
    from edgespec.loading.preview import MemoryPlan, Pool, Preview
    from edgespec.loading.workers import SpreadPrediction

__all__ = ["bar", "picture"]

_COLOURS = {
    "target weights": "blue",
    "target cache": "cyan",
    "draft weights": "magenta",
    "draft cache": "bright_magenta",
    "low-bit copy weights": "green",
    "low-bit copy cache": "bright_green",
}
_DRAFT_WITH_ITSELF = (
    "To speed it up without a draft model, run `edgespec prepare lowbit MODEL --for-memory SIZE` once."
)
_OTHER_COLOUR = "yellow"
_FULL, _FREE, _OVER = "█", "░", "▒"
_BAR_COLUMNS = 60
_POOLS = {"memory": "memory", "gpu": "GPU memory"}
# Maps terms in the internal names of memory items to the terms shown to the user.
_SHOWN_TERMS = {
    "target ": "model ",
    "draft ": "draft model ",
    " cache": " KV cache",
    "headroom": "safety margin (--headroom)",
}


def picture(preview: Preview, requested_context_tokens: int | None = None) -> RenderableType:
    """Return the terminal output of `edgespec plan`.

    Args:
        preview: The planned load.
        requested_context_tokens: The requested context length, or None for the default.
    """
    plan = preview.plan
    parts: list[RenderableType] = [
        _line(f"model {preview.target}"),
        _line(f"draft model {preview.draft}" if preview.draft else preview.why_no_draft),
        *(_line(f"head {name}") for name in preview.heads),
        _line(f"context {plan.context_tokens:,} tokens{_about_context(preview, requested_context_tokens)}"),
        _line(f"KV cache type {plan.kv_type}"),
        *([] if preview.spread else [_line(f"expected speed {_expected_speed(preview)}")]),
        *_streaming(plan),
        *([_line(f"experts: {plan.experts.text}")] if plan.experts else []),
    ]
    if preview.draft_window:
        parts.append(_line(f"in longer chats, the draft model sees only {preview.draft_window.description}"))
    for pool in plan.pools:
        planned = f"{format_bytes(plan.planned_bytes(pool))} of {format_bytes(plan.budget_bytes(pool))}"
        chats = plan.prefix_cache_bytes if pool == "memory" else 0
        more = f", plus up to {format_bytes(chats)} for the cache of earlier chats" if chats else ""
        parts += [Text(), bar(plan, pool), Text(f"{planned} {_POOLS[pool]}{more}", "bold")]
    limit = f"memory limit of {format_bytes(plan.budget.bytes)}: {limit_text(plan.budget.source)}"
    parts += [_line(limit, "dim"), Text(), _items(plan)]
    if preview.spread:
        parts += [Text(), _machines(plan, preview.spread), Text(), *map(_line, _spread(preview.spread))]
    if plan.decisions:
        heading = "Changed to save memory:" if plan.fits else "Changed to save memory, but still too large:"
        lines = [f"{each.what} (frees {format_bytes(each.bytes)}): {each.why}" for each in plan.decisions]
        parts += [Text(), Text(heading), Padding(Group(*map(_line, lines)), (0, 0, 0, 2))]
    if plan.streaming:
        parts += [Text(), _line(f"To keep the whole model in memory, {preview.advice}.")]
        if not (
            preview.draft or preview.heads or plan.streaming.substitute_bytes or plan.streaming.expert_bytes
        ):
            parts.append(_line(_DRAFT_WITH_ITSELF))
    if not plan.fits:
        parts += [Text(), _line(f"This does not fit in memory: {preview.advice}.", "bold red")]
    return Group(*parts)


def _expected_speed(preview: Preview) -> str:
    speed, streaming = preview.prediction, preview.plan.streaming
    measure = "to measure this machine, run `edgespec recommend`"
    if speed is None and streaming:
        most = format_rate(1 / streaming.seconds_per_pass)
        return f"at most {most} tokens per second, plus accepted tokens of the draft model; {measure}"
    if speed is None:
        return f"unknown; {measure}"
    drafted = (
        f", {format_rate(speed.fastest_tokens_per_second)} with the draft model" if preview.draft else ""
    )
    disturbed = (
        " (probably too low, because other programs were busy when this machine was measured; run `edgespec"
        " recommend` again when they are idle)"
        if speed.is_disturbed
        else ""
    )
    return f"{format_rate(speed.tokens_per_second)} tokens per second{drafted}{disturbed}"


def _streaming(plan: MemoryPlan) -> list[Text]:
    streaming = plan.streaming
    if streaming is None:
        return []
    if streaming.expert_bytes:
        kept = f"{format_bytes(streaming.kept_expert_bytes)} of {format_bytes(streaming.expert_bytes)}"
        what = (
            f"the experts used most stay in memory ({kept}), and others are read from disk when they are used"
        )
    else:
        kept = f"those of {streaming.kept_layers} stay in memory"
        what = f"the feed-forward weights of {streaming.layers} layers are read from disk, and {kept}"
    return [
        _line(f"larger than memory: {streaming.text}"),
        _line(what),
        *([_line(streaming.warning, "yellow")] if streaming.warning else []),
    ]


def _about_context(preview: Preview, requested_tokens: int | None) -> str:
    tokens, trained = preview.plan.context_tokens, preview.trained_context_tokens
    first = preview.first_context_tokens
    remarks = ["as many as the model was trained for"] if tokens == trained else []
    if requested_tokens is not None and requested_tokens < tokens:
        remarks.append(f"rounded up from {requested_tokens:,} to a multiple of 256")
    if 0 < trained < tokens:
        remarks.append(f"more than the {trained:,} that the model was trained for")
    if first < tokens:
        remarks.append(
            "memory is allocated as the chat grows" + (f", at first for {first:,}" if first else "")
        )
    return f" ({'; '.join(remarks)})" if remarks else ""


def _line(words: str, style: str = "") -> Text:
    """Return a line of text without control characters, which a model's name may contain."""
    return Text(line_of(words), style)


def bar(plan: MemoryPlan, pool: Pool) -> Text:
    """Return a bar chart of a memory pool: its items, then its free or missing memory."""
    planned, budget = plan.planned_bytes(pool), plan.budget_bytes(pool)
    scale = _BAR_COLUMNS / max(planned, budget, 1)
    text = Text()
    end, columns = 0, 0
    of_pool = [item for item in plan.items if item.pool == pool]
    for item in sorted(of_pool, key=lambda item: item.name not in _COLOURS):
        end += item.bytes
        width = round(end * scale) - columns
        columns += width
        text.append((_FULL if end <= budget else _OVER) * width, _COLOURS.get(item.name, _OTHER_COLOUR))
    text.append(_FREE * (_BAR_COLUMNS - columns), "dim")
    return text


def _items(plan: MemoryPlan) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify)
    for item in plan.items:
        share = item.bytes / max(plan.budget_bytes(item.pool), 1)
        table.add_row(
            Text(_FULL, _COLOURS.get(item.name, _OTHER_COLOUR)),
            _label(item.name) + (" (on the GPU)" if item.pool == "gpu" else ""),
            format_bytes(item.bytes),
            f"{share:.1%}" if share < 10 else ">999%",
        )
    return table


def _machines(plan: MemoryPlan, spread: SpreadPrediction) -> Table:
    table = Table.grid(padding=(0, 2))
    for column in ("left", *("right",) * 7):
        table.add_column(justify="left" if column == "left" else "right")
    table.add_row(
        "", "layers", "weights", "cache", "compute", "total", "round trip", "bandwidth", style="bold"
    )
    for share, link in zip(plan.machines, (None, *spread.links), strict=True):
        sizes = (share.weight_bytes, share.cache_bytes, share.compute_bytes, share.total_bytes)
        table.add_row(
            _line(share.name),
            f"{share.layers_text} + output" if share.has_output else share.layers_text,
            *map(format_bytes, sizes),
            "" if link is None else f"{format_number(link.round_trip_seconds * 1e3, 2)} ms",
            "" if link is None else f"{format_rate(link.bytes_per_second / 1e6)} MB/s",
        )
    return table


def _spread(spread: SpreadPrediction) -> list[str]:
    seconds = format_rate(spread.send_seconds)
    lines = [f"Sending the model to the workers takes at least {seconds} s, unless they have cached it."]
    if spread.tokens_per_second is not None:
        speed = format_rate(spread.tokens_per_second)
        lines.append(f"Expected speed without a draft model: about {speed} tokens per second.")
    elif spread.unmeasured:
        lines.append(
            f"The speed is unknown. Run `edgespec recommend` on {', '.join(spread.unmeasured)}, then start"
            " the workers again."
        )
    if spread.disturbed:
        lines.append(
            f"Other programs were busy when the speed of {', '.join(spread.disturbed)} was measured, so it is"
            " probably too low. Run `edgespec recommend` there again."
        )
    lines += [
        f"All layers on {name}: {format_rate(speed)} tokens per second."
        for name, speed in spread.alone.items()
    ]
    if spread.is_faster_here:
        lines.append("This machine alone is faster. Omit --workers.")
    elif spread.faster_alone:
        lines.append(f"{spread.faster_alone} alone is faster. Name only this worker.")
    elif spread.fits_here and not spread.is_measured_here:
        lines.append("The model also fits on this machine alone.")
    return lines


def _label(name: str) -> str:
    for term, shown in _SHOWN_TERMS.items():
        name = name.replace(term, shown)
    return name
