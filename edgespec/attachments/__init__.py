"""Read files to attach to a message: text, code and PDF files."""

from __future__ import annotations

from pathlib import Path

from edgespec.attachments.reading import ReadFiles, read_files
from edgespec.chat.attached_file import with_files

__all__ = ["ReadFiles", "attach", "read_files"]


def attach(prompt: str, *paths: str | Path) -> str:
    """Prepend the text of files to a prompt, each as a code block with the file's name above it.

    Args:
        prompt: The instructions for the model.
        *paths: Files, folders, or patterns such as `src/**/*.py`. `~` is the home folder. In folders,
            files that Git ignores and files without text are skipped. The text of PDF files is extracted.

    Raises:
        AttachmentError: A file is missing, unreadable or too large, or contains no text.
    """
    return with_files(prompt, [file for path in paths for file in read_files(str(path)).files])
