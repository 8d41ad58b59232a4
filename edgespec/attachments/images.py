"""Read images from files and from memory."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from edgespec.attachments.finding import shown_path
from edgespec.errors import AttachmentError, OptionError
from edgespec.model.image import MAX_IMAGE_BYTES, Image
from edgespec.system.files import error_reason, regular_file_bytes

__all__ = ["ImageSource", "as_image"]

ImageSource: TypeAlias = Image | bytes | str | PathLike[str]
"""An image, the contents of an image file, or its path."""


def as_image(source: ImageSource) -> Image:
    """Read an image. Raises AttachmentError if it cannot be read, and OptionError for another type."""
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
    try:
        regular_file_bytes(path)
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise AttachmentError(
            f"{name} cannot be read: {error_reason(error)}",
            "choose another file",
            code="attachment_unreadable",
        ) from error
    return Image.read(data, name)
