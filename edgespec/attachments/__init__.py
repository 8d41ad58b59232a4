"""Read files to attach to a message: text, code, PDF files and images."""

from __future__ import annotations

from pathlib import Path

from edgespec.attachments.reading import ImageSource, ReadFiles, as_image, read_files
from edgespec.chat.message import with_files
from edgespec.errors import AttachmentError

__all__ = ["ImageSource", "ReadFiles", "as_image", "attach", "read_files"]


def attach(prompt: str, *paths: str | Path) -> str:
    """Prepend files to a prompt, each as a code block under the file's name.

    Args:
        prompt: The instructions for the model.
        *paths: Files, folders, or patterns such as `src/**/*.py`. `~` is the home directory. In folders,
            files that Git ignores and files without text are skipped. The text of PDF files is extracted.

    Raises:
        AttachmentError: A file is missing, unreadable or too large, or contains no text.
    """
    files = [file for path in paths for file in read_files(str(path)).files]
    for file in files:
        if file.image:
            raise AttachmentError(
                f"{file.name} is an image, and images cannot be part of the prompt's text",
                "pass it in the `images` argument of `generate` or `stream`",
                code="attachment_not_text",
            )
    return with_files(prompt, files)
