"""Image files of all kinds are decoded as by llama.cpp, or rejected with a single clear error."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from numpy.typing import NDArray

from edgespec.backends.llamacpp.image_encoder import ImageEncoder
from edgespec.backends.llamacpp.loading import load_weights
from edgespec.backends.llamacpp.native import library
from edgespec.errors import AttachmentError
from edgespec.model.base import LoadOptions
from edgespec.model.image import Image
from tests.backends.tiny_vision import jpeg_bytes, picture, png_bytes, write_vision_model
from tests.raising import raises


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageEncoder]:
    files = write_vision_model(tmp_path_factory.mktemp("llava"), "llava")
    weights = load_weights(str(files.model), "tiny", LoadOptions(gpu_layers=0), None)
    encoder = ImageEncoder(str(files.projector), weights, 1, 512, gpu=False)
    yield encoder
    encoder.close()
    library().llama_model_free(weights)


def seen(encoder: ImageEncoder, image: Image) -> NDArray[np.uint8]:
    """Return the pixels that the model sees, as uint8 [height, width, 3]."""
    lib, bitmap = encoder._mtmd, encoder._bitmap(image)
    try:
        shape = lib.mtmd_bitmap_get_ny(bitmap), lib.mtmd_bitmap_get_nx(bitmap), 3
        flat = np.ctypeslib.as_array(lib.mtmd_bitmap_get_data(bitmap), (int(np.prod(shape)),))
        pixels: NDArray[np.uint8] = flat.reshape(shape).copy()
        return pixels
    finally:
        lib.mtmd_bitmap_free(bitmap)


def saved(image: PIL.Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_png_files(encoder: ImageEncoder, mode: str) -> None:
    stored = picture(mode=mode)
    image = Image.read(png_bytes(stored))
    assert (image.width, image.height, image.format) == (60, 40, "PNG")
    # Transparency is dropped, as by llama.cpp.
    assert np.array_equal(seen(encoder, image), np.asarray(stored.convert("RGB")))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30, "subsampling": 2}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_files(encoder: ImageEncoder, mode: str, options: dict[str, Any]) -> None:
    stored = jpeg_bytes(picture(mode=mode), **options)
    decoded = np.asarray(PIL.Image.open(io.BytesIO(stored)).convert("RGB")).astype(int)
    pixels = seen(encoder, Image.read(stored)).astype(int)
    # Decoders of JPEG may round differently.
    assert np.abs(pixels - decoded).mean() < 3


def test_webp_files(encoder: ImageEncoder) -> None:
    stored = picture()
    image = Image.read(saved(stored, "WEBP", lossless=True))
    assert image.format == "WebP"
    assert np.array_equal(seen(encoder, image), np.asarray(stored))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_models_see_the_first_frame_of_animations(encoder: ImageEncoder, form: str) -> None:
    frames = [picture(seed=seed, mode="L").convert("RGB") for seed in range(3)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = saved(frames[0], form, save_all=True, append_images=frames[1:], **options)
    pixels = seen(encoder, Image.read(data)).astype(int)
    assert np.abs(pixels - np.asarray(frames[0]).astype(int)).mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_photos_are_turned_upright(encoder: ImageEncoder, orientation: int, form: str) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if form == "WEBP" else {"quality": 98} if form == "JPEG" else {}
    data = saved(picture(), form, exif=exif.tobytes(), **options)
    image = Image.read(data)
    upright = np.asarray(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))))
    assert (image.height, image.width) == upright.shape[:2]
    pixels = seen(encoder, image)
    assert np.abs(pixels.astype(int) - upright.astype(int)).mean() < 3


def test_a_tiny_image(encoder: ImageEncoder) -> None:
    image = Image.read(png_bytes(picture(1, 1)))
    assert seen(encoder, image).shape == (1, 1, 3)


def test_the_name_of_a_file_does_not_matter() -> None:
    assert Image.read(jpeg_bytes(picture()), "photo.png").format == "JPEG"


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_damaged_file_is_refused(form: str) -> None:
    data = saved(picture(400, 300), form)
    with raises(AttachmentError, "a.png", code="attachment_unreadable"):
        Image.read(data[: len(data) * 2 // 3], "a.png")


@pytest.mark.parametrize("data", [b"", b"text", b"%PDF-1.7", saved(picture(), "BMP")])
def test_other_files_are_refused(data: bytes) -> None:
    with raises(AttachmentError, "a.png", code="attachment_unreadable"):
        Image.read(data, "a.png")


def huge_png(width: int, height: int) -> bytes:
    """Return a small PNG file with a huge image of one colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(height * (1 + -(-width // 8))), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.long
@pytest.mark.parametrize("size", [(10_000, 10_000), (30_000, 30_000)])
def test_a_huge_image_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    with raises(AttachmentError, "a.png", code="attachment_too_large"):
        Image.read(huge_png(*size), "a.png")


def test_a_huge_file_is_refused() -> None:
    with raises(AttachmentError, "a.png", code="attachment_too_large"):
        Image.read(bytes(33 << 20), "a.png")


def test_base64() -> None:
    data = png_bytes(picture())
    text = base64.b64encode(data).decode()
    assert Image.from_base64(text) == Image.from_base64(f"data:image/png;base64,{text}") == Image.read(data)
    for wrong in ("data:image/png,abc", "data:image/png;base64", "???"):
        with raises(AttachmentError, code="attachment_unreadable"):
            Image.from_base64(wrong)


def test_the_name_is_no_part_of_the_content(tmp_path: Path) -> None:
    data = png_bytes(picture())
    assert Image.read(data, "a").digest == Image.read(data, "b").digest
    assert Image.read(data).digest != Image.read(png_bytes(picture(seed=1))).digest
