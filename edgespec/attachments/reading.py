"""Read attached files as text or as images, and reject other binary files.

The text of a PDF file is extracted in a child process, because a malicious file can make the parser hang or
exhaust memory.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeAlias

from edgespec.attachments.finding import find_files, shown_path
from edgespec.chat.message import AttachedFile
from edgespec.errors import AttachmentError, EdgespecError, OptionError
from edgespec.model.image import MAX_IMAGE_BYTES, Image, is_named_like_image, looks_like_image
from edgespec.system.child_process import ChildProcess, module_arguments
from edgespec.system.files import error_reason, format_bytes, regular_file_bytes
from edgespec.system.waiting import wait_for

__all__ = ["ImageSource", "ReadFiles", "as_image", "read_files"]

# Maximum size in bytes of a text file, of a PDF file, and of all text in a folder. The text limits far exceed
# the context of any model.
_MAX_BYTES = 16 << 20
_MAX_PDF_BYTES = 64 << 20
_MAX_TOTAL_BYTES = 32 << 20
# Timeout in seconds for reading a file or all files in a folder. Malicious PDF files can take this long.
_MAX_SECONDS = 60.0
# Number of bytes at the start of a file that are checked to identify its type. The size was chosen to allow
# for data before a PDF file's marker.
_START_BYTES = 1024
_PDF_MARK = b"%PDF-"
# Byte order marks, longest first, because the mark of UTF-32 begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
ImageSource: TypeAlias = Image | bytes | str | PathLike[str]
"""An image, or an image file's contents or path."""
# Maximum memory of the child process in bytes. Python and pypdf use about 60 MiB, and extracting a book uses
# a few times the size of its file.
_PDF_MEMORY_BYTES = 1 << 30
# Maximum size in bytes of the extracted text as JSON.
_MAX_TEXT_BYTES = 32 << 20


class ReadFiles(NamedTuple):
    """The files that a path, a folder or a pattern refers to.

    Attributes:
        files: The files and their text.
        skipped: Number of files skipped because they are images or cannot be attached.
    """

    files: tuple[AttachedFile, ...]
    skipped: int = 0


def read_files(path: str) -> ReadFiles:
    """Read a file, all files in a folder, or all files that match a pattern such as `src/**/*.py`.

    In a folder or with a pattern, images and files that cannot be attached are skipped.

    Raises:
        AttachmentError: The file is missing, unreadable, too large, or contains neither text nor an image; or
            none of several files can be attached, or reading the files takes too long.
    """
    paths = find_files(path)
    if len(paths) == 1:
        return ReadFiles((_read(paths[0], _MAX_SECONDS, takes_images=True),))
    files, total_bytes, problem = [], 0, None
    deadline = monotonic() + _MAX_SECONDS
    for each in paths:
        if (left_seconds := deadline - monotonic()) <= 0:
            raise AttachmentError(
                f"reading the files in {path} took longer than {_MAX_SECONDS:.0f} seconds",
                "attach fewer files",
                code="attachment_too_large",
            )
        try:
            files.append(_read(each, left_seconds, takes_images=False))
        except AttachmentError as error:
            problem = error
            continue
        total_bytes += len(files[-1].text.encode(errors="replace"))
        if total_bytes > _MAX_TOTAL_BYTES:
            raise AttachmentError(
                f"the files in {path} contain more than {format_bytes(_MAX_TOTAL_BYTES)} of text",
                "attach fewer files",
                code="attachment_too_large",
            )
    if problem and not files:
        raise AttachmentError(
            f"edgespec cannot attach any of the {len(paths)} files in {path}: for example, {problem.what}",
            problem.next_step,
            code=problem.code,
        )
    return ReadFiles(tuple(files), len(paths) - len(files))


def _read(path: Path, max_seconds: float, *, takes_images: bool) -> AttachedFile:
    name = shown_path(path)
    data, size_bytes = _content(path, name, _limit_bytes)
    start = data[:_START_BYTES]
    if size_bytes > _limit_bytes(start):
        raise AttachmentError(
            f"{name} is {format_bytes(size_bytes)} in size, which exceeds the limit of"
            f" {format_bytes(_limit_bytes(start))} for attached files",
            "copy the part you need to a smaller file",
            code="attachment_too_large",
        )
    is_pdf = _PDF_MARK in start
    # Let `Image.read` also report invalid images, such as empty files.
    if looks_like_image(start) or (is_named_like_image(name) and not is_pdf):
        if not takes_images:
            raise AttachmentError(
                f"{name} is an image, and folders and patterns attach only text",
                "attach each image separately",
                code="attachment_not_text",
            )
        return AttachedFile(name, "", image=Image.read(data, name))
    return AttachedFile(name, _pdf_text(name, data, max_seconds) if is_pdf else _decoded(name, data))


def _limit_bytes(start: bytes) -> int:
    if looks_like_image(start):
        return MAX_IMAGE_BYTES
    return _MAX_PDF_BYTES if _PDF_MARK in start else _MAX_BYTES


def _decoded(name: str, data: bytes) -> str:
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise AttachmentError(
            f"{name} is not a UTF-8 or UTF-16 text file",
            "if it is text, convert it to UTF-8, for example with iconv",
            code="attachment_not_text",
        )
    return text


def as_image(source: ImageSource) -> Image:
    """Load an image. Raises AttachmentError if that fails, and OptionError if `source` is of another type."""
    if isinstance(source, Image):
        return source
    if isinstance(source, bytes):
        return Image.read(source)
    if not isinstance(source, str | PathLike):
        raise OptionError(
            f"an image must be a path, bytes or an Image, not {type(source).__name__}", "pass the file's path"
        )
    path = Path(os.path.expanduser(source))
    name = shown_path(path)
    # One byte beyond the limit is enough for `Image.read` to reject a larger image.
    return Image.read(_content(path, name, lambda _start: MAX_IMAGE_BYTES)[0], name)


def _content(path: Path, name: str, limit_of: Callable[[bytes], int]) -> tuple[bytes, int]:
    """Return a file's contents, up to one byte beyond its size limit, and its size in bytes.

    Args:
        path: The file to read.
        name: Its name in error messages.
        limit_of: Returns the size limit in bytes, given the first bytes of the file.

    Raises:
        AttachmentError: The path is not a regular file, or the file cannot be read.
    """
    try:
        size_bytes = regular_file_bytes(path)
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
            data = start + file.read(max(0, limit_of(start) + 1 - len(start)))
    except (OSError, ValueError) as error:
        raise AttachmentError(
            f"{name} cannot be read: {error_reason(error)}",
            "choose another file",
            code="attachment_unreadable",
        ) from error
    # A file can grow while it is read.
    return data, max(size_bytes, len(data))


def _pdf_text(name: str, data: bytes, max_seconds: float) -> str:
    """Extract the text of a PDF file.

    Args:
        name: The file's name, for error messages.
        data: The file's contents.
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
            raise _pdf_failure(name, f"extracting the text took longer than {max_seconds:.0f} seconds")
        if process.memory_bytes > _PDF_MEMORY_BYTES:
            raise _pdf_failure(
                name, f"extracting the text needs more than {format_bytes(_PDF_MEMORY_BYTES)} of memory"
            )

    try:
        answer = wait_for(extract, poll)
    finally:
        process.close()
    if len(answer) > _MAX_TEXT_BYTES:
        raise _pdf_failure(name, f"the file contains more than {format_bytes(_MAX_TEXT_BYTES)} of text")
    if not answer:
        raise _pdf_failure(name, "extracting the text needs too much memory or time")
    text, problem = json.loads(answer)
    if problem:
        raise _pdf_failure(name, problem)
    return str(text)


def _pdf_failure(name: str, reason: str) -> AttachmentError:
    return AttachmentError(f"{name} cannot be attached: {reason}", "copy the text you need to a text file")
