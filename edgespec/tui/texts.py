"""Longer texts of the chat screen: the welcome, /show, /memory, the speed-up, and errors."""

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

__all__ = [
    "error_text",
    "facts_line",
    "memory_rows",
    "notices",
    "show_rows",
    "speed_up_short",
    "speed_up_text",
    "welcome_rows",
]

# Where guesses come from, in the words of the screen.
_SOURCES = {
    "layerskip": "first layers of the model",
    "lookahead": "parallel guesses",
    "lowbit": "a low-precision copy of the model",
    "model": "helper model",
    "ngram": "repeated text",
    "suffix": "repeated text",
    "swift": "some layers of the model",
}


def facts_line(facts: ModelFacts) -> str:
    """Return name, parameters, quantisation and file size of a model in one line."""
    file_size = format_bytes(facts.file_bytes)
    parts = [facts.name, parameters_text(facts.parameters), facts.quantisation, file_size]
    return " · ".join(part for part in parts if part)


def speed_up_text(method: MethodReport) -> str:
    """Return whether the speed-up is on, where the guesses come from, and how much faster replies are."""
    if method.effective == "none":
        return "off" if method.requested == "none" else f"off now: {method.reason}"
    sources = " + ".join(dict.fromkeys(_SOURCES.get(name, name) for name in method.effective.split("+")))
    mode = "automatic" if method.requested == "auto" else "on"
    factor = "" if method.gain is None else f"{1 + method.gain:.1f}× as fast · "
    return f"{factor}{mode} ({sources})"


def speed_up_short(method: MethodReport) -> str:
    """Return the speed-up in two words, for the status line."""
    if method.effective == "none":
        return "speed-up off"
    return "speed-up on" if method.gain is None else f"speed-up {1 + method.gain:.1f}×"


def welcome_rows(runtime: RuntimeLike) -> list[tuple[str, str]]:
    """Return the rows above an empty chat: the models, the speed-up, and an explanation of it."""
    method = runtime.method
    rows = [("Model", facts_line(runtime.target))]
    if runtime.draft is not None:
        rows.append(("Helper model", facts_line(runtime.draft)))
    elif method.requested == "auto" and method.effective != "none":
        rows.append(("Helper model", f"none: {method.reason}"))
    rows.append(("Speed-up", speed_up_text(method)))
    if explanation := _explanation(runtime):
        rows += [("", ""), ("", explanation)]
    return rows


def _explanation(runtime: RuntimeLike) -> str:
    if runtime.method.effective == "none":
        return ""
    uses_helper = "model" in runtime.method.effective.split("+")
    guesser = "The smaller helper model guesses" if uses_helper else "edgespec guesses"
    return (
        f"{guesser} the next words, and {runtime.target.name} checks several guesses at once. Correct guesses"
        " make replies faster. Wrong guesses are thrown away, so the answers do not change."
        " The line at the bottom shows the speed-up."
    )


def notices(runtime: RuntimeLike) -> list[str]:
    """Return what the user should know about the models, such as that one is a demo."""
    texts = [facts.notice for facts in (runtime.target, runtime.draft) if facts is not None and facts.notice]
    return list(dict.fromkeys(texts))


def show_rows(
    runtime: RuntimeLike, chat: OpenChat, method: MethodReport, stats: Stats | None
) -> list[tuple[str, str]]:
    """Return the rows of /show: models, speed-up, context and settings.

    Args:
        runtime: The loaded models.
        chat: The open chat, whose settings are listed.
        method: The method of the running or last reply.
        stats: Stats of that reply, if there was one.
    """
    rows = [("model", facts_line(runtime.target)), ("file", runtime.target.path)]
    if runtime.draft is not None:
        rows.append(("helper model", facts_line(runtime.draft)))
    rows.append(("speed-up", speed_up_text(method)))
    if method.effective != "none":
        rows.append(("reason", method.reason))
    if stats is not None and stats.worst_case_loss is not None:
        rows.append(
            ("loss limit", f"wrong guesses cost at most {percent(stats.worst_case_loss)} of a reply's time")
        )
    rows += [
        ("cache rollback", runtime.target.rollback or "–"),
        ("context", _context(runtime.context_tokens, runtime.target.context_tokens)),
        ("memory", format_bytes(runtime.memory_bytes())),
        ("system prompt", chat.system or "none"),
    ]
    rows += [
        (field.name, shown(chat.settings[field.name])) for field in FIELDS if field.name in chat.settings
    ]
    defaults = [f"{field.name} {default_text(field)}" for field in FIELDS if field.name not in chat.settings]
    return [*rows, ("defaults", ", ".join(defaults))]


def _context(max_tokens: int, current_tokens: int) -> str:
    allocated = f", memory for {count(current_tokens)} so far" if current_tokens < max_tokens else ""
    return f"{count(max_tokens)} tokens{allocated}"


def memory_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """Return the rows of /memory."""
    cache = use.prefix_cache
    rows = [
        ("model files", format_bytes(use.weight_bytes)),
        ("KV caches", format_bytes(use.kv_bytes)),
        ("whole program", format_bytes(use.resident_bytes)),
        *_current_rows(use),
        *_plan_rows(use.plan),
        ("earlier chats", _prefix_cache(cache)),
    ]
    if cache.disk_limit_bytes:
        used, limit = format_bytes(cache.disk_bytes), format_bytes(cache.disk_limit_bytes)
        rows.append(("on disk", f"{used} for this model, at most {limit} for all models"))
    hits, tokens = count(cache.hits, "time"), count(cache.reused_tokens, "token")
    rows.append(("reused", f"{hits}, which saved reading {tokens}"))
    return [*rows, ("problem", cache.notice)] if cache.notice else rows


def _prefix_cache(cache: PrefixCacheUsage) -> str:
    used, limit = format_bytes(cache.memory_bytes), format_bytes(cache.memory_limit_bytes)
    return f"{count(cache.sequences, 'prompt')} cached, {used} in memory, at most {limit}"


def _current_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """Return the rows about the context size, the free memory, and memory freed for other programs."""
    rows = []
    if use.context_tokens:
        rows.append(("context", _context(use.max_context_tokens, use.context_tokens)))
    if use.available_bytes:
        rows.append(("free", format_bytes(use.available_bytes)))
    if use.last_reclaim:
        freed = format_bytes(use.reclaimed_bytes)
        rows.append(("freed", f"{freed} for other programs so far; last: {use.last_reclaim}"))
    return rows


def _plan_rows(plan: MemoryPlan | None) -> list[tuple[str, str]]:
    """Return the planned memory of each pool, without the prefix cache, and what the planner left out."""
    if plan is None:
        return []
    rows = []
    for pool in plan.pools:
        planned = plan.planned_bytes(pool)
        name = "planned" if pool == "memory" else "on the GPU"
        rows.append((name, f"{format_bytes(planned)} of {format_bytes(plan.budget_bytes(pool))}"))
    rows.append(("limit set by", plan.budget.source))
    return [*rows, *(("left out", f"{each.what}: {each.why}") for each in plan.decisions)]


def error_text(error: Exception) -> tuple[str, str]:
    """Return a title and a body for an error, with what the user can do about it."""
    if isinstance(error, EdgespecError):
        title = error.what[:1].upper() + error.what[1:]
        return title, error.next_step[:1].upper() + error.next_step[1:]
    message = " ".join(str(error).split())
    return (
        f"Unexpected error: {type(error).__name__}",
        f"{message}\nYour chat is saved. Try again, or report this error with the log.",
    )
