"""Longer texts of the chat screen: the welcome, /show, /memory, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError
from edgespec.files import format_bytes
from edgespec.tui.numbers import count, parameters_text, percent
from edgespec.tui.settings import FIELDS, default_text, shown

if TYPE_CHECKING:
    from edgespec import MemoryPlan, MemoryUse, MethodReport, ModelFacts, PrefixCacheUsage, Stats
    from edgespec.tui.model import RuntimeLike
    from edgespec.tui.open_chat import OpenChat

__all__ = ["error_text", "facts_line", "memory_rows", "notices", "show_rows", "welcome_rows"]


def facts_line(facts: ModelFacts) -> str:
    """A model in one line."""
    parts = [
        facts.name,
        parameters_text(facts.parameters),
        facts.quantisation,
        format_bytes(facts.file_bytes),
    ]
    return " · ".join(part for part in parts if part)


def welcome_rows(runtime: RuntimeLike) -> list[tuple[str, str]]:
    """What is running, in a few lines."""
    rows = [("target", facts_line(runtime.target))]
    if runtime.draft is not None:
        rows.append(("draft", facts_line(runtime.draft)))
    return [*rows, ("method", runtime.method.line)]


def notices(runtime: RuntimeLike) -> list[str]:
    """What should be said about the models, such as that one is a demo."""
    said = [facts.notice for facts in (runtime.target, runtime.draft) if facts is not None and facts.notice]
    return list(dict.fromkeys(said))


def show_rows(
    runtime: RuntimeLike, chat: OpenChat, method: MethodReport, stats: Stats | None
) -> list[tuple[str, str]]:
    """The answer to /show: the models, how replies are made, settings not at their default, the others.

    method, stats: of the running or last reply.
    """
    rows = [("target", facts_line(runtime.target)), ("file", runtime.target.path)]
    if runtime.draft is not None:
        rows.append(("draft", facts_line(runtime.draft)))
    rows.append(("method", method.line))
    if stats is not None and stats.worst_case_loss is not None:
        rows.append(
            ("may lose", f"{percent(stats.worst_case_loss)} of the reply's time at most, by guessing")
        )
    rows += [
        ("takes back", runtime.target.rollback or "–"),
        ("context", _context(runtime.context_tokens, runtime.target.context_tokens)),
        ("memory", format_bytes(runtime.memory_bytes())),
        ("system", chat.system or "none"),
    ]
    rows += [
        (field.name, shown(chat.settings[field.name])) for field in FIELDS if field.name in chat.settings
    ]
    rest = [f"{field.name} {default_text(field)}" for field in FIELDS if field.name not in chat.settings]
    return [*rows, ("defaults", ", ".join(rest))]


def _context(most_tokens: int, tokens_now: int) -> str:
    """How long the text may become, and for how much of it there is memory by now."""
    so_far = f", memory for {count(tokens_now)} so far" if tokens_now < most_tokens else ""
    return f"{count(most_tokens)} tokens{so_far}"


def memory_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """The answer to /memory."""
    kept = use.prefix_cache
    rows = [
        ("weights", format_bytes(use.weight_bytes)),
        ("caches", format_bytes(use.kv_bytes)),
        ("process", format_bytes(use.resident_bytes)),
        *_now_rows(use),
        *_plan_rows(use.plan),
        ("kept", _kept(kept)),
    ]
    if kept.disk_limit_bytes:
        disk = (
            f"{format_bytes(kept.disk_bytes)} of this model, of {format_bytes(kept.disk_limit_bytes)} for all"
        )
        rows.append(("on disk", disk))
    rows.append(
        ("gone back", f"{count(kept.hits, 'time')}, {count(kept.reused_tokens, 'token')} not read again")
    )
    return [*rows, ("trouble", kept.notice)] if kept.notice else rows


def _kept(kept: PrefixCacheUsage) -> str:
    """What is kept of texts in memory, of what may be."""
    texts, limit = count(kept.texts, "text"), format_bytes(kept.memory_limit_bytes)
    return f"{texts}, {format_bytes(kept.memory_bytes)} in memory, of {limit}"


def _now_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """How large the context is by now, what is free, and what other programs were given."""
    rows = []
    if use.context_tokens:
        rows.append(("context", _context(use.max_context_tokens, use.context_tokens)))
    if use.available_bytes:
        rows.append(("free", format_bytes(use.available_bytes)))
    if use.last_reclaim:
        rows.append(("gave way", f"{format_bytes(use.reclaimed_bytes)} so far; {use.last_reclaim}"))
    return rows


def _plan_rows(plan: MemoryPlan | None) -> list[tuple[str, str]]:
    """What was planned, against what there was, and what was given up.

    Texts that are kept stand in a row of their own: they take what they need, up to their bound.
    """
    if plan is None:
        return []
    rows = []
    for pool in plan.pools:
        taken = plan.planned_bytes(pool) - (plan.prefix_cache_bytes if pool == "memory" else 0)
        name = "planned" if pool == "memory" else "on cards"
        rows.append((name, f"{format_bytes(taken)} of {format_bytes(plan.budget_bytes(pool))}"))
    rows.append(("budget", plan.budget.source))
    return [*rows, *(("given up", f"{each.what}: {each.why}") for each in plan.decisions)]


def error_text(error: Exception) -> tuple[str, str]:
    """A title and a body for an error, in words a person can act on."""
    if isinstance(error, EdgespecError):
        what = error.what[:1].upper() + error.what[1:]
        step = error.next_step[:1].upper() + error.next_step[1:]
        return what, step
    said = " ".join(str(error).split())
    name = type(error).__name__
    return f"Unexpected error: {name}", f"{said}\nYour chat is safe. Try again, or report this with the log."
