"""Validate and decode images to send to models."""

from __future__ import annotations

import base64
import binascii
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import AttachmentError
from edgespec.system.files import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as PillowImage

# Display names of the supported formats, keyed by Pillow's names.
FORMATS = {"PNG": "PNG", "JPEG": "JPEG", "WEBP": "WebP", "GIF": "GIF"}
# "Brands" (file type codes) of HEIC and AVIF, the formats that phones use for photos.
_PHONE_BRANDS = (b"heic", b"heix", b"mif1", b"avif")
# Pillow's format name for multi-picture JPEG files, which some cameras write.
_SEVERAL_JPEGS = "MPO"
# Maximum size of an image file in bytes. A 40-megapixel photo takes about 20 MB.
MAX_IMAGE_BYTES = 32 << 20
# File name extensions of images. `.svg` is missing because SVG files are text.
_SUFFIXES = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
# Maximum number of pixels. Decoding takes up to 6 bytes of memory per pixel, so at most 240 MB.
_MAX_PIXELS = 40_000_000
# EXIF orientation tag, and its value for photos that are stored upright.
_ORIENTATION, _UPRIGHT = 0x0112, 1
# EXIF orientations of at least this value swap width and height.
_FIRST_TRANSPOSED = 5
# Pillow modes in which neighbouring pixel values can be blended.
_REDUCIBLE = ("L", "LA", "RGB", "RGBA", "CMYK")


def is_named_like_image(name: str) -> bool:
    """Return whether a file name has the extension of a common image format, supported or not."""
    return Path(name).suffix.lower() in _SUFFIXES


def looks_like_image(data: bytes) -> bool:
    """Return whether `data` starts with the signature of a common image format, supported or not."""
    return data.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")) or (
        (data.startswith(b"RIFF") and data[8:12] == b"WEBP")
        or (data[4:8] == b"ftyp" and data[8:12] in _PHONE_BRANDS)
    )


@dataclass(frozen=True)
class Image:
    """A validated image file. Create one with `read`.

    Attributes:
        name: Display name, such as the file's path.
        data: The file's contents.
        width, height: Size in pixels, after the rotation that the file specifies.
        format: One of the values of `FORMATS`.
        orientation: EXIF orientation, from 1 to 8. 1 if the file specifies none.
    """

    name: str
    data: bytes = field(repr=False)
    width: int = field(compare=False)
    height: int = field(compare=False)
    format: str = field(compare=False)
    orientation: int = field(compare=False)

    @classmethod
    def read(cls, data: bytes, name: str = "the image") -> Image:
        """Create an image from the contents of a file. Models see only the first frame of an animation.

        Raises:
            AttachmentError: The file is not an image in a supported format, is damaged, or is too large.
        """
        _check_size(name, len(data), MAX_IMAGE_BYTES)
        image = _opened(name, data)
        if image.width * image.height > _MAX_PIXELS:
            raise AttachmentError(
                f"{name} has {image.width:,} x {image.height:,} pixels, but edgespec supports at most"
                f" {_MAX_PIXELS // 10**6} megapixels",
                "reduce its size with an image editor",
                code="attachment_too_large",
            )
        form = FORMATS["JPEG" if image.format == _SEVERAL_JPEGS else str(image.format)]
        _load(name, image)
        orientation = _orientation(image)
        width, height = image.size[::-1] if orientation >= _FIRST_TRANSPOSED else image.size
        return cls(name, data, width, height, form, orientation)

    @classmethod
    def from_base64(cls, text: str, name: str = "the image") -> Image:
        """Create an image from base64 or a `data:` URL. Raises AttachmentError if it is unusable."""
        if text.startswith("data:"):
            header, comma, text = text.partition(",")
            if not comma or not header.endswith(";base64"):
                raise AttachmentError(
                    f"the data: URL of {name} is not base64-encoded",
                    "use `data:image/png;base64,` followed by the base64-encoded file",
                    code="attachment_unreadable",
                )
        _check_size(name, len(text) * 3 // 4, MAX_IMAGE_BYTES)
        try:
            return cls.read(base64.b64decode(text, validate=True), name)
        except (binascii.Error, ValueError) as error:
            raise AttachmentError(
                f"{name} is not valid base64", "encode the file in base64", code="attachment_unreadable"
            ) from error

    @cached_property
    def digest(self) -> bytes:
        """A hash of the file's contents."""
        return sha256(self.data).digest()

    @property
    def label(self) -> str:
        """Name and size, such as `photo.png, 1,024 x 768 pixels`."""
        return f"{self.name}, {self.width:,} x {self.height:,} pixels"

    def pixels(self) -> NDArray[np.uint8]:
        """Return the upright image as uint8 [height, width, 3], without transparency."""
        import numpy as np  # Imported lazily, because the first screen of the chat needs no NumPy.

        image = _opened(self.name, self.data)
        _load(self.name, image)
        return self.upright(np.asarray(image.convert("RGB")))

    def reduced(self, width: int, height: int) -> NDArray[np.uint8]:
        """Return the upright image, resized, as uint8 [height, width, 4] with an alpha channel.

        Large JPEG files are decoded at a fraction of their size.

        Args:
            width: Target width in pixels, at most the image's own width.
            height: Target height in pixels, at most the image's own height.

        Raises:
            AttachmentError: The image is damaged.
        """
        import numpy as np  # Imported lazily, because the first screen of the chat needs no NumPy.
        import PIL.Image

        size = (height, width) if self.orientation >= _FIRST_TRANSPOSED else (width, height)
        image = _opened(self.name, self.data)
        image.draft(None, (2 * size[0], 2 * size[1]))
        _load(self.name, image)
        if image.mode.startswith("I"):
            # Scale 16-bit values to 8 bits, because Pillow would clip them at 255.
            image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode not in _REDUCIBLE:
            # Pillow cannot average palette indices, so convert them to colours first.
            image = image.convert("RGBA")
        return self.upright(np.asarray(image.resize(size, reducing_gap=2.0).convert("RGBA")))

    def upright(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Rotate and mirror the stored pixels [height, width, channels] as the file specifies."""
        if self.orientation >= _FIRST_TRANSPOSED:
            pixels = pixels.swapaxes(0, 1)
        # The EXIF value encodes which sides of the stored image are the upright image's top and left sides.
        flips_rows, flips_columns = self.orientation in (3, 4, 7, 8), self.orientation in (2, 3, 6, 7)
        return pixels[:: -1 if flips_rows else 1, :: -1 if flips_columns else 1].copy()


def _check_size(name: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise AttachmentError(
            f"{name} is {format_bytes(size_bytes)} in size, which exceeds the limit of"
            f" {format_bytes(limit_bytes)} for images",
            "reduce its size with an image editor",
            code="attachment_too_large",
        )


def _opened(name: str, data: bytes) -> PillowImage:
    """Open an image file without decoding it. Raises AttachmentError."""
    import PIL.Image

    if not data:
        raise AttachmentError(f"{name} is empty", "choose another file", code="attachment_unreadable")
    # Ignore Pillow's warning about large images, because edgespec has its own, lower limit.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        try:
            return PIL.Image.open(BytesIO(data), formats=tuple(FORMATS))
        except PIL.Image.DecompressionBombError:
            size = f"far more than {_MAX_PIXELS // 10**6} megapixels"
        except Exception:
            # Pillow's parsers raise many exception types.
            size = ""
    if size:
        raise AttachmentError(
            f"{name} has {size}", "reduce its size with an image editor", code="attachment_too_large"
        )
    raise AttachmentError(
        f"{name} is damaged, or is not an image that edgespec can read",
        "convert it to PNG, JPEG or WebP",
        code="attachment_unreadable",
    )


def _orientation(image: PillowImage) -> int:
    """Return an image's EXIF orientation, or `_UPRIGHT` if it is missing or invalid."""
    try:
        value = image.getexif().get(_ORIENTATION)
    except Exception:
        # The metadata is damaged, but the image is not.
        return _UPRIGHT
    return value if isinstance(value, int) and 1 <= value <= 8 else _UPRIGHT


def _load(name: str, image: PillowImage) -> None:
    """Decode an opened image. Raises AttachmentError if it is damaged."""
    try:
        image.load()
    except Exception as error:
        # Pillow's decoders raise many exception types.
        raise AttachmentError(
            f"{name} is damaged: {error}",
            "open it in an image editor and save it again",
            code="attachment_unreadable",
        ) from error
