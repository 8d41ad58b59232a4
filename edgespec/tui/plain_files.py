"""Files in messages of the plain chat, such as `Explain @src/main.py`."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.chat.message import Message
from edgespec.errors import AttachmentError
from edgespec.tui.files.attachments import Attachment, AttachmentReader
from edgespec.tui.files.references import find_references, missing_files
from edgespec.tui.numbers import count

__all__ = ["with_files"]

# Maximum number of missing files to name.
_MAX_NAMED = 5


def with_files(text: str, reader: AttachmentReader, note: Callable[[str], None]) -> Message:
    """Return a user message with the files that its text refers to.

    Args:
        text: The message.
        reader: Reads the files.
        note: Prints which files are attached, and which do not exist.

    Raises:
        AttachmentError: A file cannot be attached.
    """
    references = find_references(text)
    attachments = reader.read(references) if references else ()
    for each in attachments:
        if (problem := each.problem) is not None:
            raise AttachmentError(f"the message was not sent: {problem.what}", problem.next_step)
    for each in attachments:
        note(_attached_text(each))
    found = {attachment.path for attachment in attachments}
    if missing := [path for path in missing_files(references) if path not in found]:
        names = ", ".join(f"@{path}" for path in missing[:_MAX_NAMED])
        note(f"No file matches {names}, so this is sent as text.")
    files = tuple(file for attachment in attachments for file in attachment.files)
    return Message("user", text, files=files)


def _attached_text(attachment: Attachment) -> str:
    files = "" if len(attachment.files) == 1 else f", {count(len(attachment.files), 'file')}"
    skipped = f", {attachment.skipped} skipped (no text)" if attachment.skipped else ""
    return f"Attached {attachment.path} ({count(attachment.token_count, 'token')}{files}{skipped})."
