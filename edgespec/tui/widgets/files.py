"""The file widgets above the input: the list of paths for completion, and the chips of attached files.

Inside the working folder, a path matches if it contains the typed letters in order. Elsewhere, only the
entries of the typed folder are searched. A chip shows the name of a file and its size in tokens.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from itertools import islice
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import TYPE_CHECKING, Any

from textual import work
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgespec.attachments.finding import list_files
from edgespec.errors import AttachmentError
from edgespec.tui.attachments import Attachment, AttachmentReader
from edgespec.tui.background import CallThread, in_thread
from edgespec.tui.input_syntax import dropped_paths, find_references
from edgespec.tui.numbers import count

if TYPE_CHECKING:
    from edgespec import AttachedFile
    from edgespec.api.sharing.base import ChatModel

# Seconds to wait after the last key press before reading the files that the input refers to.
_PAUSE_SECONDS = 0.15
# Maximum time in seconds to check whether pasted text is a path. Network drives can be slow.
_MAX_DROP_SECONDS = 1.0
# Maximum time in seconds to count the tokens in pasted text. Keys pressed meanwhile have to wait.
_MAX_COUNT_SECONDS = 0.5
# Maximum time in seconds to read the files of a message before it is sent.
_MAX_READ_SECONDS = 120.0
# Maximum number of file chips below a message. One further chip summarises the remaining files.
_MAX_CHIPS = 8
_MAX_NAME_LENGTH = 60
_MAX_FOUND = 50
# Seconds before the list of files in the working folder is refreshed.
_LISTING_SECONDS = 10.0
# Maximum number of entries to read from a folder outside the working folder.
_MAX_ENTRIES = 2_000


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
        # Hide the list when the path is complete. Otherwise, Enter would choose a path instead of sending the
        # message.
        self.display = bool(paths) and paths != [typed]
        self.highlighted = 0 if paths else None

    @property
    def chosen(self) -> str:
        """The highlighted path, or an empty string if the list is hidden or the path is already typed."""
        option = self.highlighted_option if self.display else None
        return "" if option is None or option.id is None or option.id == self._typed else option.id


async def dropped(text: str) -> Sequence[str]:
    """Return the paths in pasted text if it contains only paths. See `dropped_paths`."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(in_thread(partial(dropped_paths, text)), _MAX_DROP_SECONDS)
    return ()


class PathSearch:
    """Finds paths for completion. Folder paths end with `/`. Searching a large folder can take seconds."""

    def __init__(self) -> None:
        self._paths: Sequence[str] = ()
        self._listed_at = -_LISTING_SECONDS
        self._folder = ""

    def find(self, typed: str) -> list[str]:
        """Return the paths that start with `typed` or contain its letters in order, best match first."""
        if re.search(r"[*?]", typed):
            return []
        if os.path.isabs(typed) or typed.startswith(("~", "./", "..")):
            return _entries(typed)
        return _ranked(self._listed(), typed)

    def _listed(self) -> Sequence[str]:
        """Return all files and folders inside the working folder."""
        try:
            folder = os.getcwd()
        except OSError:
            return ()  # The folder has been deleted.
        if folder != self._folder or monotonic() - self._listed_at > _LISTING_SECONDS:
            files: Sequence[str] = ()
            with suppress(OSError):
                files = list_files(Path(folder)).paths
            folders = {f"{parent}/" for path in files for parent in PurePosixPath(path).parents}
            self._paths = [*sorted(folders - {"./"}), *files]
            self._folder, self._listed_at = folder, monotonic()
        return self._paths


def _entries(typed: str) -> list[str]:
    """Return the entries of the typed folder whose names match the text after its last `/`."""
    parent, slash, name = typed.rpartition("/")
    if not slash:
        return [f"{typed}/"] if typed in ("~", "..") else []
    with suppress(OSError), os.scandir(os.path.expanduser(f"{parent}/")) as entries:
        names = [
            f"{entry.name}/" if entry.is_dir() else entry.name for entry in islice(entries, _MAX_ENTRIES)
        ]
        shown = (each for each in names if name.startswith(".") or not each.startswith("."))
        return [f"{parent}/{each}" for each in _ranked(shown, name)]
    return []


def _ranked(paths: Iterable[str], typed: str) -> list[str]:
    sought = typed.casefold()
    ranks = ((_rank(path, sought), path) for path in paths)
    return [path for _, path in nsmallest(_MAX_FOUND, (each for each in ranks if each[0]))]


def _rank(path: str, sought: str) -> tuple[object, ...]:
    """Return a sort key that is smaller for better matches, or an empty tuple if the path does not match."""
    folded = path.casefold()
    # Search letter by letter, because a regular expression could take exponential time.
    first = place = -1
    for letter in sought:
        place = folded.find(letter, place + 1)
        if place < 0:
            return ()
        first = place if first < 0 else first
    name = folded.rstrip("/").rpartition("/")[2]
    return (
        not folded.startswith(sought),
        not name.startswith(sought),
        sought not in name,
        place - first,
        path.rstrip("/").count("/"),
        len(path),
        path,
    )


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
        """Switch to another model for counting tokens and for checking whether the files fit its context."""
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
        chips = _attachment_chips(attachments)
        self.update(chips)
        self.display = bool(chips)

    async def _read(self, references: Sequence[str]) -> Sequence[Attachment]:
        return await self._thread.run(partial(self._reader.read, references))

    async def count_tokens(self, text: str) -> int | None:
        """Return the number of tokens in pasted text, or None if counting takes too long."""
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
                f"reading the attached files took more than {_MAX_READ_SECONDS:.0f} seconds",
                "remove the largest ones, or those on a network drive",
                code="attachment_too_large",
            ) from None
        finally:
            self.reading = False
        for attachment in attachments:
            if attachment.problem:
                raise attachment.problem
        return attachments


def file_chips(files: Sequence[AttachedFile]) -> Content:
    """Return the chips of a message's files."""
    shown = files if len(files) <= _MAX_CHIPS else files[: _MAX_CHIPS - 1]
    chips = [_chip(file.name, file.token_count) for file in shown]
    if rest := files[len(shown) :]:
        chips.append(_chip(f"{len(rest)} more files", sum(file.token_count for file in rest)))
    return _joined(chips)


def _attachment_chips(attachments: Sequence[Attachment]) -> Content:
    """Return the chips for the message in the input, including errors for files that cannot be attached."""
    chips = [_attachment_chip(each) for each in attachments if not each.problem]
    problems = [
        Content.assemble(("✗ ", "$error"), (f"{each.problem.what}", "$error"))
        for each in attachments
        if each.problem
    ]
    return Content("\n").join([part for part in (_joined(chips), *problems) if part])


def _attachment_chip(attachment: Attachment) -> Content:
    number, skipped = len(attachment.files), attachment.skipped
    name = attachment.path if number == 1 else f"{attachment.path} ({number} files)"
    return _chip(name, attachment.token_count, f", {skipped} skipped (no text)" if skipped else "")


def _chip(name: str, token_count: int, note: str = "") -> Content:
    shown = name if len(name) <= _MAX_NAME_LENGTH else f"…{name[1 - _MAX_NAME_LENGTH :]}"
    # Non-breaking spaces keep each chip on one line.
    size = f"{count(token_count, 'token')}{note}".replace(" ", "\N{NO-BREAK SPACE}")
    text = f"\N{NO-BREAK SPACE}{shown.replace(' ', chr(0xA0))}\N{NO-BREAK SPACE}"
    return Content.assemble(
        (text, "$foreground on $panel not bold"), (f"{size}\N{NO-BREAK SPACE}", "$muted on $panel not bold")
    )


def _joined(chips: Iterable[Content]) -> Content:
    return Content(" ").join([*chips])
