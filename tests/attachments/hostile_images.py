"""Unusual and hostile image files are either read or rejected with a single error."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from tests.backends.tiny_vision import jpeg_bytes, picture, png_bytes

__all__ = ["HOSTILE", "HostileFile"]


class HostileFile(NamedTuple):
    """A file and the code of the error that rejects it, or an empty string for a valid image."""

    write: Callable[[], bytes]
    name: str
    code: str = ""


def _saved(image: PIL.Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _animated(form: str) -> bytes:
    frames = [picture(seed=seed) for seed in range(3)]
    return _saved(frames[0], form, save_all=True, append_images=frames[1:], loop=0)


def _turned() -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = 8
    return jpeg_bytes(picture(), exif=exif)


def _grey_16_bit() -> bytes:
    return png_bytes(PIL.Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27))


def _see_through_palette() -> bytes:
    return png_bytes(picture(mode="P"), transparency=3)


def _pixels_100_million() -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header, row = struct.pack(">IIBBBBB", 10_000, 10_000, 1, 0, 0, 0, 0), bytes(1251)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(row * 10_000, 9)), chunk(b"IEND", b"")]
    )


def _damaged() -> bytes:
    """Return a PNG file whose pixels are overwritten in the middle."""
    data = bytearray(png_bytes(picture(400, 300)))
    middle = len(data) // 2
    data[middle : middle + 20] = bytes(20)
    return bytes(data)


def _text_bomb() -> bytes:
    data = bytearray(png_bytes(picture()))
    bomb = b"zTXtcomment\0\0" + zlib.compress(bytes(8 << 20))
    data[33:33] = struct.pack(">I", len(bomb) - 4) + bomb + struct.pack(">I", zlib.crc32(bomb))
    return bytes(data)


_UNREADABLE, _TOO_LARGE = "attachment_unreadable", "attachment_too_large"
HOSTILE = {
    "narrow": HostileFile(lambda: png_bytes(picture(3, 600)), "a.png"),
    "large": HostileFile(lambda: jpeg_bytes(picture().resize((4000, 3000))), "a.jpg"),
    "1x1": HostileFile(lambda: png_bytes(picture(1, 1)), "a.png"),
    "grey": HostileFile(lambda: png_bytes(picture(mode="L")), "a.png"),
    "grey with opacity": HostileFile(lambda: png_bytes(picture(mode="LA")), "a.png"),
    "black and white": HostileFile(lambda: png_bytes(picture(mode="1")), "a.png"),
    "16-bit": HostileFile(_grey_16_bit, "a.png"),
    "palette": HostileFile(lambda: png_bytes(picture(mode="P")), "a.png"),
    "gif": HostileFile(lambda: _animated("GIF"), "a.gif"),
    "webp": HostileFile(lambda: _animated("WEBP"), "a.webp"),
    "damaged": HostileFile(_damaged, "a.png", _UNREADABLE),
    "truncated": HostileFile(lambda: jpeg_bytes(picture(400, 300))[:2000], "a.jpg", _UNREADABLE),
    "header only": HostileFile(lambda: png_bytes(picture())[:20], "a.png", _UNREADABLE),
    "100 megapixels": HostileFile(_pixels_100_million, "a.png", _TOO_LARGE),
    "wrong extension": HostileFile(lambda: jpeg_bytes(picture()), "a.png"),
    "wrong contents": HostileFile(lambda: b"This is a text.", "a.png", _UNREADABLE),
    "other format": HostileFile(lambda: _saved(picture(), "BMP"), "a.png", _UNREADABLE),
    "no extension": HostileFile(lambda: _saved(picture(), "WEBP"), "a"),
    "opacity": HostileFile(lambda: png_bytes(picture(mode="RGBA")), "a.png"),
    "turned": HostileFile(_turned, "a.jpg"),
    "cmyk": HostileFile(lambda: jpeg_bytes(picture(mode="CMYK")), "a.jpg"),
    "see-through palette": HostileFile(_see_through_palette, "a.png"),
    "text bomb": HostileFile(_text_bomb, "a.png", _UNREADABLE),
    "phone photo": HostileFile(
        lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "a.heic", _UNREADABLE
    ),
    "empty": HostileFile(bytes, "a.png", _UNREADABLE),
}
