"""Chips: small labels with the name of an attached file and its size in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from textual.content import Content

from edgespec.tui.files.attachments import Attachment
from edgespec.tui.numbers import count

if TYPE_CHECKING:
    from edgespec import AttachedFile

__all__ = ["attachment_chips", "file_chips"]

# Maximum number of file chips below a message. One further chip summarises the remaining files.
_MAX_CHIPS = 8
_MAX_NAME_LENGTH = 60


def file_chips(files: Sequence[AttachedFile]) -> Content:
    """Return the chips of a message's files."""
    shown = files if len(files) <= _MAX_CHIPS else files[: _MAX_CHIPS - 1]
    chips = [_chip(file.name, file.token_count) for file in shown]
    if rest := files[len(shown) :]:
        chips.append(_chip(f"{len(rest)} more files", sum(file.token_count for file in rest)))
    return _joined(chips)


def attachment_chips(attachments: Sequence[Attachment]) -> Content:
    """Return the chips of the message in the input, including the errors of files that cannot be attached."""
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
