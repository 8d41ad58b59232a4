"""Download models in the background of the full-screen chat."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError
from edgespec.system.files import format_bytes
from edgespec.tui.downloads import Download
from edgespec.tui.texts import sentences

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["start_download"]

_TICK_SECONDS = 0.2


async def start_download(screen: ChatScreen, download: Download) -> None:
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
