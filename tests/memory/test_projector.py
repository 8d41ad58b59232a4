"""The planned memory of a projector, compared with its actual allocations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.model.formats.projector import estimate_projector
from tests.backends.tiny_vision import (
    EncoderSizes,
    VisionKind,
    VisionModel,
    picture,
    png_bytes,
    write_projector,
    write_vision_model,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_MEBIBYTE = 1 << 20
# Prints by how much the projector increases the peak of resident memory.
_MEASURE = """
import sys
from edgespec.backends.llamacpp.image_encoder import ImageEncoder
from edgespec.backends.llamacpp.loading import load_weights
from edgespec.model.base import LoadOptions
from edgespec.model.image import Image

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

model, projector, small, *images = sys.argv[1:]
weights = load_weights(model, "tiny", LoadOptions(gpu_layers=0), None)
files = [open(path, "rb").read() for path in images]
Image.read(files[0])  # Load Pillow.
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
encoder = ImageEncoder(projector, weights, 1, 4096, gpu=False, small_images=small == "True")
for file in files[1:]:
    for part in encoder.prepare(Image.read(file)).data:
        encoder.encode(part)
print(status("VmHWM") - before)
"""


# A photo of 12 megapixels. Because it is square, it is reduced to the largest number of patches.
_PHOTO = (3464, 3464)


def _check_near_plan(
    folder: Path, files: VisionModel, sizes: list[tuple[int, int]], small_images: bool, tolerance_bytes: int
) -> None:
    """Check that encoding images of the given sizes, one after the other, takes about the planned memory."""
    images = []
    for seed, size in enumerate([(1, 1), *sizes]):
        images.append(folder / f"{seed}.png")
        images[-1].write_bytes(png_bytes(picture(*size, seed=seed)))
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, *files, str(small_images), *images],
        check=True,
        capture_output=True,
        text=True,
    )
    estimate = estimate_projector(files.projector, on_gpu=False, small_images=small_images)
    planned = sum(part.bytes for part in estimate.parts)
    assert int(measured.stdout) == pytest.approx(planned, rel=0.05, abs=tolerance_bytes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "sizes", "small_images"),
    [
        ("qwen2.5vl", [(1000, 1000), (1100, 900)], True),
        ("qwen2.5vl", [(1000, 1000), _PHOTO], True),
        ("qwen2.5vl", [_PHOTO, _PHOTO], False),
        ("llava", [(4000, 3000)], False),
        ("gemma3", [(4000, 3000)], False),
    ],
)
def test_the_plan_holds_for_large_images(
    kind: VisionKind, sizes: list[tuple[int, int]], small_images: bool, tmp_path: Path
) -> None:
    _check_near_plan(tmp_path, write_vision_model(tmp_path, kind), sizes, small_images, 16 * _MEBIBYTE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "encoder"),
    [
        ("llava", EncoderSizes(1024, 4096, layers=23, side=24, is_half=True)),
        ("gemma3", EncoderSizes(1152, 4304, layers=4, side=64, merge=4, is_half=True)),
        ("qwen2.5vl", EncoderSizes(1280, 3420, layers=4, side=40, is_half=True)),
    ],
)
def test_the_plan_holds_for_large_projectors(kind: VisionKind, encoder: EncoderSizes, tmp_path: Path) -> None:
    """The encoders have the widths of published ones: CLIP ViT-L/14, SigLIP and Qwen2.5-VL's."""
    files = write_vision_model(tmp_path, kind)
    write_projector(files.projector, kind, encoder)
    _check_near_plan(tmp_path, files, [_PHOTO, _PHOTO], kind == "qwen2.5vl", 0)
