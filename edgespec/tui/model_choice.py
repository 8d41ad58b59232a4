"""Choose the model of the chat by its name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError, OptionError

if TYPE_CHECKING:
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["choose_model"]


async def choose_model(screen: ChatScreen, reference: str) -> None:
    """Switch to the model with this reference. Raises OptionError if it is not on this machine."""
    from edgespec.catalog import resolve

    try:
        found = await asyncio.to_thread(resolve, reference, allow_download=False)
    except EdgespecError as error:
        raise OptionError(error.what, error.next_step) from error
    if str(found.path) == screen.runtime.target.path:
        await screen.transcript.note(f"This chat already uses {screen.runtime.target.name}.")
        return
    screen.post_message(screen.ModelChosen(reference))
