"""Save the image in the clipboard as a file that a message can refer to."""

from __future__ import annotations

import os
import warnings
from io import BytesIO
from pathlib import Path

from edgespec.errors import AttachmentError
from edgespec.model.image import Image
from edgespec.system.files import (
    data_folder,
    delete_files,
    error_reason,
    make_private_folder,
    write_advice,
    write_private_file,
)

__all__ = ["clipboard_files", "delete_pasted_images"]

_FOLDER_NAME = "pasted-images"
# Number of pasted images to keep. Their files are needed only for messages that the user resends or edits,
# because saved chats contain their images.
_MAX_IMAGES = 100
# Pillow image modes that PNG supports.
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


def clipboard_files(folder: Path) -> list[str]:
    """Save the image in the clipboard as a PNG file, and return its path.

    Args:
        folder: Parent of the folder for pasted images, normally the user's data folder.

    Returns:
        A list with the path of the saved image, or with the paths of the files if the clipboard contains
        files instead. Empty if it contains neither.

    Raises:
        AttachmentError: The clipboard cannot be read, or the image is too large or cannot be saved.
    """
    content = _clipboard()
    if content is None or isinstance(content, list):
        return content or []
    image = Image.read(content, "the image in the clipboard")
    path = folder / _FOLDER_NAME / f"image-{image.digest.hex()[:8]}.png"
    try:
        make_private_folder(path.parent)
        write_private_file(path, image.data)
        newest_first = sorted(path.parent.glob("*.png"), key=lambda each: -each.stat().st_mtime)
        delete_files(newest_first[_MAX_IMAGES:])
    except OSError as error:
        raise AttachmentError(
            f"the image in the clipboard cannot be saved: {error_reason(error)}",
            write_advice(error, path.parent),
            code="file_not_written",
        ) from error
    return [str(path)]


def _clipboard() -> bytes | list[str] | None:
    """Return the clipboard's image as PNG data, or its file paths, or None. Raises AttachmentError."""
    import PIL.ImageGrab
    import PIL.ImageOps

    try:
        with warnings.catch_warnings():
            # Ignore Pillow's warning, because `Image.read` has a lower limit on the number of pixels.
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            image = PIL.ImageGrab.grabclipboard()
            if image is None or isinstance(image, list):
                return image
            image = PIL.ImageOps.exif_transpose(image)
            file = BytesIO()
            (image if image.mode in _PNG_MODES else image.convert("RGB")).save(file, "PNG")
            return file.getvalue()
    except NotImplementedError:
        # Pillow found no program that reads the clipboard.
        reason, advice = "no clipboard tool is installed", f"install {_helper()}"
    except Exception as error:
        # Pillow's parsers can raise almost any exception.
        reason, advice = (
            " ".join(error_reason(error).split()),
            "save the image to a file, and attach the file",
        )
    raise AttachmentError(f"the clipboard cannot be read: {reason}", advice, code="attachment_unreadable")


def _helper() -> str:
    if os.environ.get("WAYLAND_DISPLAY"):
        return "wl-clipboard"
    return "xclip" if os.environ.get("DISPLAY") else "wl-clipboard (Wayland) or xclip (X11)"


def delete_pasted_images() -> int:
    """Delete all pasted images, and return the number of bytes freed. Raises OSError."""
    return delete_files((data_folder() / _FOLDER_NAME).glob("*.png"))
