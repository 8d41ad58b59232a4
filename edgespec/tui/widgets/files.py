"""The file widgets above the input: the list of paths for completion, and the chips of attached files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from textual import work
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgespec.errors import AttachmentError
from edgespec.tui.background import CallThread
from edgespec.tui.files.attachments import Attachment, AttachmentReader
from edgespec.tui.files.chips import attachment_chips
from edgespec.tui.files.path_search import PathSearch
from edgespec.tui.files.references import dropped_paths, find_references

if TYPE_CHECKING:
    from edgespec.api.sharing.base import ChatModel

__all__ = ["FileChips", "PathList"]

# Seconds to wait after the last key press before reading the files that the input refers to.
_PAUSE_SECONDS = 0.15
# Maximum time in seconds to check whether pasted text is a path. Network drives can be slow.
_MAX_DROP_SECONDS = 1.0
# Maximum time in seconds to count the tokens of a pasted text. Keys typed meanwhile wait.
_MAX_COUNT_SECONDS = 0.5
# Maximum time in seconds for reading the files of a message before it is sent.
_MAX_READ_SECONDS = 120.0


class PathList(OptionList, can_focus=False):
    """List of paths that complete the reference at the cursor. The input handles the keys for this list."""

    def __init__(self, thread: CallThread, **options: Any) -> None:
        super().__init__(**options)
        self._thread = thread
        self._search = PathSearch()
        self._typed: str | None = None

    @dataclass
    class Chosen(Event):
        """Posted when the user clicks a path."""

        path: str

    class Toggled(Event):
        """Posted when the list appears or disappears."""

    def on_show(self) -> None:
        self.post_message(self.Toggled())

    def on_hide(self) -> None:
        self.post_message(self.Toggled())

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        assert event.option.id is not None
        self.post_message(self.Chosen(event.option.id))

    def follow(self, typed: str | None) -> None:
        """Show the paths that complete `typed`, or hide the list if `typed` is None."""
        if typed == self._typed:
            return
        self._typed = typed
        if typed is None:
            self.hide()
        else:
            self._find(typed)

    def hide(self) -> None:
        """Hide the list until the user types another path."""
        self.workers.cancel_node(self)
        self.display = False

    @work(exclusive=True)
    async def _find(self, typed: str) -> None:
        paths = await self._thread.run(partial(self._search.find, typed))
        self.set_options(Option(Content(path), id=path) for path in paths)
        # Hide the list when the path is complete. Otherwise, Enter would choose a path, not send the message.
        self.display = bool(paths) and paths != [typed]
        self.highlighted = 0 if paths else None

    async def dropped(self, text: str) -> Sequence[str]:
        """Return the paths in pasted text if it contains only paths. See `dropped_paths`."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._thread.run(partial(dropped_paths, text)), _MAX_DROP_SECONDS)
        return ()

    @property
    def chosen(self) -> str:
        """The highlighted path. Empty if the list is hidden or the user has already typed that path."""
        option = self.highlighted_option if self.display else None
        return "" if option is None or option.id is None or option.id == self._typed else option.id


class FileChips(Static):
    """The files attached to the message in the input. Deleting a reference in the input removes its chip.

    Attributes:
        reading: Whether the files of a message that the user is sending are being read.
    """

    reading = False

    def __init__(self, thread: CallThread, runtime: ChatModel, **options: Any) -> None:
        super().__init__(**options)
        self._thread = thread
        self._reader = AttachmentReader(runtime)
        self._references: Sequence[str] = ()
        self._shown: Sequence[str] = ()

    def use_runtime(self, runtime: ChatModel) -> None:
        """Count tokens with another model from now on, and check whether the files fit its context."""
        self._reader = AttachmentReader(runtime)
        self._references = ()

    def shows(self, path: str) -> bool:
        """Return whether there is a chip for a path."""
        return path in self._shown

    def follow(self, text: str, typed: str | None) -> None:
        """Show the files that the input refers to, except for the reference that is still being typed."""
        references = [path for path in find_references(text) if path != typed]
        if references != self._references:
            self._references = references
            self._refresh_chips()

    @work(exclusive=True)
    async def _refresh_chips(self) -> None:
        references = self._references
        if references:
            await asyncio.sleep(_PAUSE_SECONDS)
        attachments = await self._read(references) if references else ()
        self._shown = [attachment.path for attachment in attachments]
        chips = attachment_chips(attachments)
        self.update(chips)
        self.display = bool(chips)

    async def _read(self, references: Sequence[str]) -> Sequence[Attachment]:
        return await self._thread.run(partial(self._reader.read, references))

    async def count_tokens(self, text: str) -> int | None:
        """Return the number of tokens of a pasted text, or None if counting takes too long."""
        with suppress(TimeoutError):
            counting = self._thread.run(partial(self._reader.count_tokens, text))
            return await asyncio.wait_for(counting, _MAX_COUNT_SECONDS)
        return None

    async def attachments(self, references: Sequence[str]) -> Sequence[Attachment]:
        """Read the attachments of a message that is about to be sent.

        Raises:
            AttachmentError: A file cannot be attached, or reading the files takes too long.
        """
        self.reading = True
        try:
            attachments = await asyncio.wait_for(self._read(references), _MAX_READ_SECONDS)
        except TimeoutError:
            raise AttachmentError(
                f"reading the attached files takes more than {_MAX_READ_SECONDS:.0f} seconds",
                "remove the largest ones, or those on a network drive",
                code="attachment_too_large",
            ) from None
        finally:
            self.reading = False
        for attachment in attachments:
            if attachment.problem:
                raise attachment.problem
        return attachments
