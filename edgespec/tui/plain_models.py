"""Download and switch models in the plain chat."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError
from edgespec.tui.downloads import Download
from edgespec.tui.numbers import percent
from edgespec.tui.texts import rounding_warning, sentences

if TYPE_CHECKING:
    from edgespec.tui.plain import PlainChat

__all__ = ["download_model", "switch_model"]

_WAIT_SECONDS = 0.1
# Fraction of a download between two reports of its progress.
_REPORTED_SHARE = 0.1


def download_model(chat: PlainChat, reference: str) -> bool:
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


def switch_model(chat: PlainChat, reference: str) -> None:
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
        if warning := rounding_warning(switched.runtime):
            chat.note(warning)
        return
    if isinstance(switched.failure, EdgespecError):
        chat.note(sentences(switched.failure.what, switched.failure.next_step))
    else:
        chat.note(sentences(f"{reference} was not loaded: {switched.failure}"))
    chat.answer(f"This chat still uses {name}.")
