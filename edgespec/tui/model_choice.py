"""Choose the chat's model: switch to one on this machine, or download another in the background."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import edgespec
from edgespec.errors import EdgespecError, ModelNotFoundError, NotDownloadedError, OptionError
from edgespec.files import format_bytes
from edgespec.tui.downloads import Download
from edgespec.tui.screens.models import ModelsScreen, is_match
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["choose_model", "choose_or_list", "pick_model"]

_TICK_SECONDS = 0.2


async def choose_model(screen: ChatScreen, reference: str) -> None:
    """Switch to the model with this reference, or download it if it is not on this machine.

    Raises:
        OptionError: There is no such model, or its file is unreadable.
    """
    from edgespec.catalog import resolve

    try:
        found = await asyncio.to_thread(resolve, reference, allow_download=False)
    except NotDownloadedError:
        await _download(screen, Download(reference))
        return
    except EdgespecError as error:
        raise OptionError(error.what, error.next_step) from error
    if str(found.path) == screen.runtime.target.path:
        await screen.transcript.note(f"This chat already uses {screen.runtime.target.name}.")
        return
    screen.post_message(screen.ModelChosen(reference))


async def choose_or_list(screen: ChatScreen, typed: str) -> None:
    """Switch to a model. If `typed` is only part of a name, such as `8b`, list the models that contain it.

    Raises:
        OptionError: No model has this name or a name that contains it, or the model's file is unreadable.
    """
    try:
        await choose_model(screen, typed)
    except OptionError as error:
        if not isinstance(error.__cause__, ModelNotFoundError):
            raise
        models = await asyncio.to_thread(edgespec.list_models)
        if not any(is_match(typed, model.reference) for model in models):
            raise
        screen.run_worker(pick_model(screen, typed))


async def pick_model(screen: ChatScreen, typed: str = "") -> None:
    """Let the user choose from the list of models, then switch to the model or download it.

    Args:
        screen: The chat screen.
        typed: Initial text of the list's filter.
    """
    model = await screen.app.push_screen_wait(
        ModelsScreen(
            screen.runtime, screen.plan_model, screen.downloads, is_writing=screen.writing, typed=typed
        )
    )
    if model is None:
        return
    if not model.is_installed:
        draft_bytes = max(0, model.download_bytes - model.size_bytes) if model.draft else 0
        share = draft_bytes / max(model.download_bytes, 1)
        draft = model.draft if draft_bytes else ""
        await _download(screen, Download(model.reference, draft, share, model))
        return
    try:
        await choose_model(screen, model.reference)
    except OptionError as error:
        await screen.show_error(error)


async def _download(screen: ChatScreen, download: Download) -> None:
    """Start a download, and show its result when it ends."""
    name, model = download.reference, download.model
    if screen.downloads.is_running(name):
        await screen.transcript.note(f"{name} is already being downloaded. Press F9 to see the progress.")
        return
    screen.downloads.start(download)
    size = f" ({format_bytes(model.download_bytes)})" if model and model.download_bytes else ""
    await screen.transcript.note(
        f"Downloading {name}{size} in the background. You can keep chatting. Press F9 to stop it."
    )
    screen.run_worker(_watch(screen, download))


async def _watch(screen: ChatScreen, download: Download) -> None:
    while not download.ended.is_set():
        screen.refresh_facts(details=False)
        await asyncio.sleep(_TICK_SECONDS)
    screen.refresh_facts(details=False)
    name, error = download.reference, download.error
    if error is None:
        text = f"{name} is downloaded. To switch to it, type /model {name}"
    elif download.cancelled.is_set():
        text = f"The download of {name} was stopped. To resume it, type /model {name}"
    elif isinstance(error, EdgespecError):
        text = sentences(f"{name} was not downloaded: {error.what}", error.next_step)
    else:
        text = f"{name} was not downloaded: {type(error).__name__}: {error}."
    await screen.transcript.note(" ".join(text.split()))
