"""Extract text from PDF files in a child process, because a malicious file can hang or exhaust memory."""

from __future__ import annotations

import json
from contextlib import suppress
from time import monotonic

from edgespec.errors import AttachmentError, EdgespecError
from edgespec.system.child_process import ChildProcess, module_arguments
from edgespec.system.files import format_bytes
from edgespec.system.waiting import wait_for

__all__ = ["pdf_text"]

# Maximum memory of the child process in bytes. Python and pypdf use about 60 MiB, and extracting a book uses
# a few times the size of its file.
_MEMORY_BYTES = 1 << 30
# Maximum size in bytes of the extracted text as JSON.
_MAX_TEXT_BYTES = 32 << 20


def pdf_text(name: str, data: bytes, max_seconds: float) -> str:
    """Return the text of a PDF file.

    Args:
        name: The name of the file, for error messages.
        data: The contents of the file.
        max_seconds: Time limit for the extraction. A page of text takes about 20 ms.

    Raises:
        AttachmentError: The file is damaged, encrypted or too large, or contains no text.
    """
    try:
        process = ChildProcess(module_arguments("edgespec.attachments.pdf_worker"))
    except EdgespecError as error:
        raise AttachmentError(
            f"{name} cannot be read: {error.what}", error.next_step, code=error.code
        ) from error
    deadline = monotonic() + max_seconds

    def extract() -> bytes:
        with suppress(OSError, ValueError):
            process.stdin.write(data)
            process.stdin.close()
            return process.stdout.read(_MAX_TEXT_BYTES + 1)
        return b""

    def poll() -> None:
        if monotonic() > deadline:
            raise _failure(name, f"extracting the text takes more than {max_seconds:.0f} seconds")
        if process.memory_bytes > _MEMORY_BYTES:
            raise _failure(
                name, f"extracting the text needs more than {format_bytes(_MEMORY_BYTES)} of memory"
            )

    try:
        answer = wait_for(extract, poll)
    finally:
        process.close()
    if len(answer) > _MAX_TEXT_BYTES:
        raise _failure(name, f"the file contains more than {format_bytes(_MAX_TEXT_BYTES)} of text")
    if not answer:
        raise _failure(name, "extracting the text needs too much memory or time")
    text, problem = json.loads(answer)
    if problem:
        raise _failure(name, problem)
    return str(text)


def _failure(name: str, reason: str) -> AttachmentError:
    return AttachmentError(f"{name} cannot be attached: {reason}", "copy the text you need to a text file")
