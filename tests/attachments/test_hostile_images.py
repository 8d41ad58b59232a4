"""Hostile image files in the chat, the command line and the server: a reply or one clear error."""

from __future__ import annotations

import base64
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.program import program
from edgespec.model.image import Image
from edgespec.tui.attachments import AttachmentReader
from edgespec.tui.widgets.image_preview import _fitted
from tests.attachments.hostile_images import HOSTILE, HostileFile
from tests.backends.tiny_vision import VisionModel, write_vision_model
from tests.cases import first
from tests.cli.conftest import NO_TRIALS
from tests.server.conftest import running

OPTIONS: dict[str, Any] = {"gpu_layers": 0, "context": 1024, "exactness": "off", "measure_costs": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return write_vision_model(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def runtime(model: VisionModel) -> Iterator[edgespec.Runtime]:
    with edgespec.load(model.model, "none", threads=1, **OPTIONS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def http(model: VisionModel) -> Iterator[httpx.Client]:
    with (
        running(target=str(model.model), draft="none", load_options=OPTIONS) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> HostileFile:
    return HOSTILE[request.param]


@pytest.mark.long
def test_the_chat(runtime: edgespec.Runtime, hostile: HostileFile, tmp_path: Path) -> None:
    path = tmp_path / hostile.name
    path.write_bytes(hostile.write())
    (attachment,) = AttachmentReader(runtime).read([str(path)])
    if hostile.code:
        assert attachment.problem is not None
        assert attachment.problem.code == hostile.code
    else:
        image = attachment.files[0].image
        assert image is not None
        width, height = _fitted(image, 80)
        assert image.reduced(width, height).shape == (height, width, 4)
        reply = runtime.generate("the file", images=[image], max_tokens=4, temperature=0)
        assert reply.stats.generated_tokens > 0


def test_a_16_bit_image_keeps_its_brightness_in_the_preview() -> None:
    grey = Image.read(HOSTILE["16-bit"].write()).reduced(60, 40)[..., 0]
    assert grey[0].max() < 10
    assert grey[-1].min() > 240


@pytest.mark.long
@pytest.mark.parametrize("name", first(dict.fromkeys(["truncated", "cmyk", "100 megapixels", *HOSTILE]), 3))
def test_the_server(http: httpx.Client, name: str) -> None:
    hostile = HOSTILE[name]
    url = f"data:image/png;base64,{base64.b64encode(hostile.write()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "the file"}]
    answer = http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0},
    )
    if hostile.code:
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == hostile.code
    else:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", first([*HOSTILE], 2))
def test_the_command_line(model: VisionModel, name: str, tmp_path: Path) -> None:
    path = tmp_path / HOSTILE[name].name
    path.write_bytes(HOSTILE[name].write())
    options = [
        "--target",
        str(model.model),
        "--draft",
        "none",
        "--threads",
        "1",
        "--gpu-layers",
        "0",
        "-n",
        "2",
    ]
    result = CliRunner().invoke(
        program,
        ["generate", *options, "-n", "4", "--temperature", "0", "--image", str(path), "the file"],
        env=NO_TRIALS,
    )
    if HOSTILE[name].code:
        assert result.exit_code == 1
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert str(path) in line
    else:
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip()


def test_a_hostile_image_takes_little_memory() -> None:
    """Refusing an image of 100 megapixels does not decode it."""
    if sys.platform != "linux":
        pytest.skip("ru_maxrss has other units")
    data = HOSTILE["100 megapixels"].write()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(edgespec.errors.AttachmentError):
        Image.read(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000
