"""The planned memory of a projector, compared with its actual allocations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.model.formats.projector import estimate_projector
from tests.backends.tiny_vision import VisionKind, picture, png_bytes, write_vision_model

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


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "sizes", "small_images"),
    [
        ("qwen2.5vl", [(1000, 1000), (1100, 900)], True),
        pytest.param("qwen2.5vl", [(1000, 1000), (4000, 3000)], True, marks=pytest.mark.long),
        pytest.param("qwen2.5vl", [(1000, 1000), (4000, 3000)], False, marks=pytest.mark.long),
        pytest.param("llava", [(4000, 3000)], False, marks=pytest.mark.long),
        pytest.param("gemma3", [(4000, 3000)], False, marks=pytest.mark.long),
    ],
)
def test_the_plan_holds_for_large_images(
    kind: VisionKind, sizes: list[tuple[int, int]], small_images: bool, tmp_path: Path
) -> None:
    files = write_vision_model(tmp_path, kind)
    images = []
    for seed, size in enumerate([(1, 1), *sizes]):
        images.append(tmp_path / f"{seed}.png")
        images[-1].write_bytes(png_bytes(picture(*size, seed=seed)))
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, *files, str(small_images), *images],
        check=True,
        capture_output=True,
        text=True,
    )
    estimate = estimate_projector(files.projector, on_gpu=False, small_images=small_images)
    planned = sum(part.bytes for part in estimate.parts)
    assert int(measured.stdout) == pytest.approx(planned, rel=0.05, abs=16 * _MEBIBYTE)
