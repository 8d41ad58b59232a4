"""The command `/model` of the plain chat: list, download and switch models."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

import edgespec
from edgespec.errors import EdgespecError, NotDownloadedError
from edgespec.files import format_bytes
from edgespec.tui.downloads import Download
from edgespec.tui.model_texts import speed_text
from edgespec.tui.numbers import count, percent
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec import AvailableModel
    from edgespec.tui.plain import PlainChat

__all__ = ["choose_model", "list_models"]

_WAIT_SECONDS = 0.1
# Fraction of a download between two reports of its progress.
_REPORTED_SHARE = 0.1


def list_models(chat: PlainChat) -> None:
    """Print the models on this machine, and say how to see those that can be downloaded."""
    plan = chat.runtime.plan
    models = edgespec.list_models(memory=plan.budget.total_bytes if plan else None)
    chat.answer("On this machine:")
    for model in models:
        if model.is_installed:
            chat.answer(_line(model, is_used=str(model.path) == chat.runtime.target.path))
    number = count(sum(not model.is_installed and model.fits for model in models), "model")
    chat.answer(f"{number} that you can download fit in memory. `edgespec models list` shows them.")
    chat.note("To switch to a model or to download it, type /model and its name.")


def _line(model: AvailableModel, *, is_used: bool) -> str:
    parts = (
        "in use" if is_used else "",
        format_bytes(model.size_bytes) if model.size_bytes else "",
        "" if model.fits else "too large for this machine",
        speed_text(model),
        f"draft model {model.draft}" if model.draft else "",
    )
    return f"{model.reference}: {', '.join(filter(None, parts))}"


def choose_model(chat: PlainChat, reference: str) -> None:
    """Switch to a model. Download it first if it is not on this machine.

    Raises:
        EdgespecError: There is no such model, or it could not be downloaded.
    """
    from edgespec.catalog import resolve

    try:
        found = resolve(reference, allow_download=False)
    except NotDownloadedError:
        if not _download(chat, reference):
            return
        found = resolve(reference, allow_download=False)
    if str(found.path) == chat.runtime.target.path:
        chat.answer(f"This chat already uses {chat.runtime.target.name}.")
        return
    _switch(chat, reference)


def _download(chat: PlainChat, reference: str) -> bool:
    """Download a model, and print the progress. Return False if the user stopped the download."""
    chat.note(f"Downloading {reference}. Press Ctrl-C to stop.")
    download, reported = Download(reference), 0.0
    chat.interrupted.clear()
    chat.downloads.start(download)
    while not download.ended.wait(_WAIT_SECONDS):
        if chat.interrupted.is_set():
            download.cancelled.set()
        if download.fraction >= reported + _REPORTED_SHARE:
            reported = download.fraction
            chat.note(f"Downloaded {percent(reported)}.")
    if download.cancelled.is_set() and download.error is not None:
        chat.note(f"The download was stopped. To resume it, type /model {reference}")
        return False
    if isinstance(download.error, EdgespecError):
        raise download.error
    if download.error is not None:
        raise EdgespecError(
            f"{reference} was not downloaded: {type(download.error).__name__}: {download.error}", "try again"
        ) from download.error
    return True


def _switch(chat: PlainChat, reference: str) -> None:
    """Load another model. If that fails or the user stops it, the old model is loaded again."""
    chat.note(f"Loading {reference}.")
    chat.interrupted.clear()
    job = chat.model_thread.switch(chat.load_other(reference))
    while not wait([job], _WAIT_SECONDS).done:
        if chat.interrupted.is_set():
            chat.interrupted.clear()
            chat.model_thread.cancel_load()
    switched = job.result()
    chat.use_runtime(switched.runtime)
    name = switched.runtime.target.name
    if switched.failure is None:
        chat.switched_to = chat.model_name = reference
        chat.answer(f"This chat now uses {name}.")
        return
    if isinstance(switched.failure, EdgespecError):
        chat.note(sentences(switched.failure.what, switched.failure.next_step))
    else:
        chat.note(sentences(f"{reference} was not loaded: {switched.failure}"))
    chat.answer(f"This chat still uses {name}.")
