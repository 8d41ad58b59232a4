"""Longer texts of the chat screen: the welcome, /show, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError
from edgespec.tui.numbers import bytes_text, count, parameters_text
from edgespec.tui.settings import FIELDS, default_text, shown

if TYPE_CHECKING:
    from edgespec import MethodReport, ModelFacts
    from edgespec.tui.model import RuntimeLike
    from edgespec.tui.session import Session

__all__ = ["error_text", "facts_line", "notices", "show_rows", "welcome_rows"]


def facts_line(facts: ModelFacts) -> str:
    """A model in one line."""
    parts = [facts.name, parameters_text(facts.parameters), facts.quantisation, bytes_text(facts.file_bytes)]
    return " · ".join(part for part in parts if part)


def welcome_rows(runtime: RuntimeLike) -> list[tuple[str, str]]:
    """What is running, in a few lines."""
    rows = [("target", facts_line(runtime.target))]
    if runtime.draft is not None:
        rows.append(("draft", facts_line(runtime.draft)))
    reason = f": {runtime.method.reason}" if runtime.method.reason else ""
    return [*rows, ("method", _method_name(runtime.method) + reason)]


def notices(runtime: RuntimeLike) -> list[str]:
    """What should be said about the models, such as that one is a demo."""
    said = [facts.notice for facts in (runtime.target, runtime.draft) if facts is not None and facts.notice]
    return list(dict.fromkeys(said))


def _method_name(method: MethodReport) -> str:
    return "plain decoding" if method.effective == "none" else method.effective


def show_rows(runtime: RuntimeLike, session: Session) -> list[tuple[str, str]]:
    """The answer to /show: the models, then every setting that is not at its default, then the others."""
    method = runtime.method
    rows = [("target", facts_line(runtime.target)), ("file", runtime.target.path)]
    if runtime.draft is not None:
        rows.append(("draft", facts_line(runtime.draft)))
    asked = f" (asked for {method.requested})" if method.requested != method.effective else ""
    rows += [
        ("method", _method_name(method) + asked),
        ("why", method.reason or "–"),
        ("takes back", runtime.target.rollback or "–"),
        ("context", f"{count(runtime.context_tokens)} tokens"),
        ("memory", bytes_text(runtime.memory_bytes())),
        ("system", session.system or "none"),
    ]
    rows += [
        (field.name, shown(session.settings[field.name]))
        for field in FIELDS
        if field.name in session.settings
    ]
    rest = [f"{field.name} {default_text(field)}" for field in FIELDS if field.name not in session.settings]
    return [*rows, ("defaults", ", ".join(rest))]


def error_text(error: Exception) -> tuple[str, str]:
    """A title and a body for an error, in words a person can act on."""
    if isinstance(error, EdgespecError):
        what = error.what[:1].upper() + error.what[1:]
        step = error.next_step[:1].upper() + error.next_step[1:]
        return what, step
    said = " ".join(str(error).split())
    name = type(error).__name__
    return f"Unexpected error: {name}", f"{said}\nYour chat is safe. Try again, or report this with the log."
