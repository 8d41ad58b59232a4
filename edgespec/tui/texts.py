"""Longer texts of the chat screen, such as the welcome, the output of /show and /memory, and errors."""

from __future__ import annotations

import re
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
    "in_chat_words",
    "loss_limit_text",
    "memory_rows",
    "method_text",
    "not_set",
    "notices",
    "show_rows",
    "speed_up_short",
    "speed_up_text",
    "welcome_rows",
]

# Words used on screen for the source of the guessed tokens, by drafter.
_SOURCES = {
    "layerskip": "first layers of the model",
    "lookahead": "parallel guesses",
    "lowbit": "a low-precision copy of the model",
    "model": "helper model",
    "ngram": "repeated text",
    "suffix": "repeated text",
    "swift": "some layers of the model",
}
_NAME = rf"(?:{'|'.join(_SOURCES)})"
# Replacements, applied in order, that reword edgespec's reasons and notes for the screen.
# Names of files and options, such as demo-draft and --draft, stay.
_CHAT_WORDS = (
    (
        rf"{_NAME}(?:\+{_NAME})* found no draft likely to save time, in (\d+ \w+)",
        r"\1 found no guess likely to save time",
    ),
    (rf"{_NAME}(?:\+{_NAME})* is retried", "it is retried"),
    (r"(?<![\w/.-])draft model(?![\w/-])", "helper model"),
    (r"(?<![\w/.-])drafting(?![\w/-])", "guessing"),
    (r"(?<![\w/.-])drafts(?![\w/-])", "guesses"),
    (r"(?<![\w/.-])draft(?![\w/-])", "guess"),
)
# Added to the welcome text when the demo model is loaded.
_DEMO_EXPLANATION = (
    " This demo is so small that guessing often costs more than it saves. It then switches itself off"
    " (F3 says why)."
)


def facts_line(facts: ModelFacts) -> str:
    """Describe a model in one line: name, parameters, quantisation and file size."""
    file_size = format_bytes(facts.file_bytes)
    parts = [facts.name, parameters_text(facts.parameters), facts.quantisation, file_size]
    return " · ".join(part for part in parts if part)


def speed_up_text(method: MethodReport) -> str:
    """Describe whether the speed-up is on, where its guesses come from, and how much faster replies are."""
    if method.effective == "none":
        return "off" if method.requested == "none" else f"off for now: {in_chat_words(method.reason)}"
    sources = _sources(method)
    mode = "automatic" if method.requested == "auto" else "on"
    factor = "" if method.gain is None else f"{1 + method.gain:.1f}× as fast · "
    return f"{factor}{mode} ({sources})"


def _sources(method: MethodReport) -> str:
    """Describe where the guesses come from, such as `helper model + repeated text`."""
    return " + ".join(dict.fromkeys(_SOURCES.get(name, name) for name in method.effective.split("+")))


def method_text(method: MethodReport) -> str:
    """Describe the speed-up and the reason for it, for the details panel."""
    reason = in_chat_words(method.reason)
    if method.effective == "none":
        state = "off" if method.requested == "none" else "off for now"
        slower = f"; trying guesses cost {method.loss_text} of the speed" if method.loss_text else ""
        return f"Speed-up {state}: {reason}{slower}"
    mode = "automatic" if method.requested == "auto" else "on"
    speed_up = f"speed-up {method.speed_up_text}; " if method.speed_up_text else ""
    return f"Speed-up {mode} ({_sources(method)}): {speed_up}{reason}"


def in_chat_words(text: str) -> str:
    """Reword a reason or note for the chat: `guess` replaces draft, `helper model` replaces draft model."""
    for pattern, replacement in _CHAT_WORDS:
        text = re.sub(pattern, replacement, text)
    return text


def loss_limit_text(limits: tuple[float, float] | None, stats: Stats) -> str:
    """Describe the loss limit, such as `2% + 2 tokens (12% of this reply)`, or return an empty string.

    Args:
        limits: The share of a reply's time that guessing may cost, and an additional number of token times.
            None if there is no limit.
        stats: Stats of the reply.
    """
    if limits is None or stats.worst_case_loss is None:
        return ""
    share, tokens = limits
    noun = "token" if tokens == 1 else "tokens"
    return f"{100 * share:g}% + {tokens:g} {noun} ({percent(stats.worst_case_loss)} of this reply)"


def speed_up_short(method: MethodReport) -> str:
    """Describe the speed-up in two words, for the status line."""
    if method.effective == "none":
        return "speed-up off"
    return "speed-up on" if method.gain is None else f"speed-up {1 + method.gain:.1f}×"


def welcome_rows(runtime: RuntimeLike) -> list[tuple[str, str]]:
    """Return the rows shown above an empty chat: the models, the speed-up and how it works."""
    method = runtime.method
    rows = [("Model", facts_line(runtime.target))]
    if runtime.draft is not None:
        rows.append(("Helper model", facts_line(runtime.draft)))
    elif method.requested == "auto" and method.effective != "none":
        rows.append(("Helper model", f"none: {in_chat_words(method.reason)}"))
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
        f"{_DEMO_EXPLANATION if runtime.target.name == 'demo' else ''}"
    )


def notices(runtime: RuntimeLike) -> list[str]:
    """Return notices about the models, such as that one is a demo."""
    texts = [facts.notice for facts in (runtime.target, runtime.draft) if facts is not None and facts.notice]
    return list(dict.fromkeys(texts))


def show_rows(
    runtime: RuntimeLike, chat: OpenChat, method: MethodReport, stats: Stats | None
) -> list[tuple[str, str]]:
    """Return the rows that /show displays: models, speed-up, context and settings.

    Args:
        runtime: The loaded models.
        chat: The open chat, whose settings are listed.
        method: The drafting method of the current or last reply.
        stats: Stats of that reply, if there was one.
    """
    rows = [("model", facts_line(runtime.target)), ("file", runtime.target.path)]
    if runtime.draft is not None:
        rows.append(("helper model", facts_line(runtime.draft)))
    rows.append(("speed-up", speed_up_text(method)))
    if method.effective != "none":
        rows.append(("reason", in_chat_words(method.reason)))
    if stats is not None and (loss_limit := loss_limit_text(runtime.loss_limits, stats)):
        rows.append(("loss limit", f"wrong guesses cost at most {loss_limit}"))
    rows += [
        ("context", _context(runtime.context_tokens, runtime.target.context_tokens)),
        ("memory", format_bytes(runtime.memory_bytes())),
        ("system prompt", chat.system or "none"),
    ]
    for field in FIELDS:
        if field.name in chat.settings:
            value = shown(chat.settings[field.name])
        else:
            default = runtime.method.requested if field.name == "method" else default_text(field)
            value = f"{default} (default)"
        rows.append((field.name, value))
    return rows


def _context(max_tokens: int, current_tokens: int) -> str:
    allocated = f", memory for {count(current_tokens)} so far" if current_tokens < max_tokens else ""
    return f"{count(max_tokens)} tokens{allocated}"


def memory_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """Return the rows that /memory displays."""
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
    rows.append(("reused", f"{hits}, which saved reading {tokens}" if cache.hits else "not yet"))
    return [*rows, ("problem", cache.notice)] if cache.notice else rows


def _prefix_cache(cache: PrefixCacheUsage) -> str:
    used, limit = format_bytes(cache.memory_bytes), format_bytes(cache.memory_limit_bytes)
    return f"{count(cache.sequences, 'prompt')} cached, {used} in memory, at most {limit}"


def _current_rows(use: MemoryUse) -> list[tuple[str, str]]:
    """Return the rows on the context size, the free memory, and the memory freed for other programs."""
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
        rows.append((name, f"{format_bytes(planned)}; limit {format_bytes(plan.budget_bytes(pool))}"))
    rows.append(("limit set by", plan.budget.source))
    return [*rows, *(("left out", f"{each.what}: {each.why}") for each in plan.decisions)]


def not_set(error: Exception) -> str:
    """Return a sentence that says that a setting was not changed, and why."""
    text = f"Not set: {error}"
    return text if text.endswith("?") else f"{text}."


def error_text(error: Exception) -> tuple[str, str]:
    """Return a title for an error, and a body that includes what the user can do about it."""
    if isinstance(error, EdgespecError):
        title = error.what[:1].upper() + error.what[1:]
        return title, error.next_step[:1].upper() + error.next_step[1:]
    message = " ".join(str(error).split())
    return (
        f"Unexpected error: {type(error).__name__}",
        f"{message}\nYour chat is saved. Try again, or report this error with the log.",
    )
