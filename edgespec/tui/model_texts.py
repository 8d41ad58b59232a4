"""Format the rows of the model list: each model's size, memory, expected speed and draft model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from textual.content import Content

from edgespec.system.files import format_bytes
from edgespec.tui.numbers import rate

if TYPE_CHECKING:
    from edgespec import AvailableModel, MemoryPlan
    from edgespec.api.sharing.base import ChatModel
    from edgespec.loading.speed_prediction import SpeedPrediction
    from edgespec.tui.downloads import Download

__all__ = ["details_text", "is_match", "is_open", "row_text", "speed_text"]

_PLACES = {
    "embedded": "included in edgespec: a toy model for offline use",
    "hub": "in the Hugging Face cache",
    "ollama": "stored by Ollama",
    "lmstudio": "stored by LM Studio",
    "path": "a file or folder of yours",
    "catalogue": "on Hugging Face",
    "search": "on Hugging Face",
}
# Each column's width, and the minimum row width at which it is shown, both in cells.
_COLUMNS = {"size": (12, 0), "fits": (11, 46), "speed": (14, 58), "draft": (28, 92)}


def row_text(
    model: AvailableModel, width: int, *, is_used: bool, is_default: bool, download: Download | None
) -> Content:
    """Return a model's row in the list, `width` cells wide. Narrow rows omit columns.

    Args:
        model: The model.
        width: Width of the row in cells.
        is_used: Whether the chat uses this model.
        is_default: Whether new chats open with this model.
        download: The download of the model, if there is one.
    """
    values = {
        "size": f"~{_size(model)}" if not model.is_installed and model.size_bytes else _size(model),
        "fits": _fit_text(model),
        "speed": speed_text(model),
        "draft": f"+ {draft}" if (draft := _offered_draft(model)) else "",
    }
    columns = [(name, size) for name, (size, least) in _COLUMNS.items() if width >= least]
    right = "".join(_cell(values[name], size) for name, size in columns)
    if download is not None and not model.is_installed:
        right = f"  {download.state}{download.time_left}".ljust(len(right))
    default = " (default)" if is_default else ""
    name_width = width - len(right) - len(default) - 2
    name = model.reference if len(model.reference) <= name_width else f"…{model.reference[1 - name_width :]}"
    return Content.assemble(
        ("• " if is_used else "  ", "$primary"),
        (name, "" if model.can_run else "$muted"),
        (default, "$primary"),
        " " * (name_width - len(name)),
        (right, "$muted"),
    )


def _fit_text(model: AvailableModel) -> str:
    if not model.size_bytes or model.fits:
        return "fits" if model.size_bytes else ""
    return "from disk" if model.is_streamed else "too large"


def _cell(text: str, width: int) -> str:
    """Pad or shorten a table cell to this width, with two spaces before the text."""
    return f"  {text if len(text) <= width - 2 else f'{text[: width - 3]}…'}".ljust(width)


def _offered_draft(model: AvailableModel) -> str:
    """Return the draft model to load or download with a model, or an empty string if there is none."""
    return "" if model.is_installed and model.download_bytes else model.draft


def _size(model: AvailableModel) -> str:
    return format_bytes(model.size_bytes) if model.size_bytes else "size ?"


def speed_text(model: AvailableModel) -> str:
    """Return the expected speed, such as `12 tok/s`, or an empty string if it is unknown.

    A question mark is appended if other programs were busy during the measurement.
    """
    if model.speed is None:
        return ""
    return _rate_text(model.speed) + ("?" if model.speed.is_disturbed else "")


def _rate_text(speed: SpeedPrediction) -> str:
    return rate(speed.fastest_tokens_per_second)


def details_text(
    model: AvailableModel,
    budget_bytes: int | None,
    *,
    is_used: bool,
    plan: MemoryPlan | None,
    drafters: Sequence[tuple[str, str]] | None,
    is_downloading: bool,
) -> Content:
    """Return the details of the highlighted model, and a description of what Enter does.

    Args:
        model: The model.
        budget_bytes: Memory that models may use, or None if unknown.
        is_used: Whether the chat uses this model.
        plan: The memory plan for this model, or None if it has not been planned yet.
        drafters: Labels and names of the draft model and heads that are used with this model, or None if it
            has not been planned yet.
        is_downloading: Whether the model is being downloaded.
    """
    memory = "Its size is unknown."
    budget = f" edgespec may use {format_bytes(budget_bytes)}." if budget_bytes is not None else ""
    if plan is not None:
        memory = f"It needs {format_bytes(plan.total_bytes)} of memory.{budget}"
    elif model.needed_bytes:
        streamed = (
            " Part of it is read from disk for every token, which is slow." if model.is_streamed else ""
        )
        memory = f"It needs about {format_bytes(model.needed_bytes)} of memory.{budget}{streamed}"
    if drafters is None:
        drafters = [("Draft model", draft)] if (draft := _offered_draft(model)) else []
    names = " and ".join(f"the {label.lower()} {name}" for label, name in drafters)
    action = _action(model, is_downloading)
    if is_used:
        action = f"This chat uses this model{f' with {names}' if names else ''}."
        names = ""
    is_disturbed = model.speed is not None and model.speed.is_disturbed
    doubt = ", but other programs were busy; press Ctrl+S to measure again" if is_disturbed else ""
    if model.speed is None:
        measure = "To see how fast it would be, press Ctrl+S."
        speed = f"It is sped up by {names}. {measure}" if names else measure
    elif names:
        gain = f"{model.speed.speedup:.1f}x as fast as without it"
        speed = f"Expected speed: {_rate_text(model.speed)} with {names}, {gain}{doubt}."
    else:
        speed = f"Expected speed: {_rate_text(model.speed)}{doubt}."
    if plan is not None and plan.streaming is not None:
        memory = f"It is larger than memory: {plan.streaming.text}."
    return Content.assemble(
        (f"{model.reference}, {_place(model)}", "bold"),
        "\n",
        (action, "$primary" if model.can_run else "$warning"),
        f"\n{memory} {speed}",
    )


def _place(model: AvailableModel) -> str:
    is_packaged = model.place == "embedded" and model.entry is not None and model.entry.package
    return "installed with edgespec" if is_packaged else _PLACES[model.place]


def _action(model: AvailableModel, is_downloading: bool) -> str:
    if is_downloading:
        return "Press Enter to stop the download. You can resume it later."
    if not model.is_installed and not model.can_run:
        return "This model is too large for this machine."
    if model.is_installed:
        warning = "" if model.can_run else " It may not fit in memory."
        return f"Press Enter to switch to this model.{warning}"
    size = f" ({format_bytes(model.download_bytes)})" if model.download_bytes else ""
    entry, terms = model.entry, ""
    if entry is not None and entry.is_gated:
        terms = f" First, accept its licence at huggingface.co/{entry.repository}."
    draft = " and its draft model" if size and _offered_draft(model) else ""
    return f"Press Enter to download it{draft}{size} in the background.{terms}"


def is_open(path: Path | None, runtime: ChatModel) -> bool:
    """Return whether the chat uses the model at a path."""
    return path is not None and path.absolute() == Path(runtime.target.path).absolute()


def is_match(query: str, name: str) -> bool:
    """Return whether `name` contains all words of `query`."""
    return all(word in name.lower() for word in query.lower().split())
