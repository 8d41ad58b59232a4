"""Images in the chat: their previews, pasting them from the clipboard, and dropping their files."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray
from rich.segment import Segment
from textual import events

import edgespec
from edgespec.attachments.clipboard import delete_pasted_images
from edgespec.model.image import Image
from edgespec.tui.attachments import AttachmentReader
from edgespec.tui.plain import _with_files
from edgespec.tui.widgets.image_preview import ImagePreview, _largest
from edgespec.tui.widgets.messages import UserMessage
from edgespec.tui.worker import Load
from tests.backends.tiny_vision import picture, png_bytes, write_vision_model
from tests.cases import first
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import ScriptedRuntime, loading

Colour = tuple[int, int, int]
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
SHORT = {"max_tokens": 2, "temperature": 0.0}


@pytest.fixture(autouse=True)
def _terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def vision_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgespec.Runtime]:
    files = write_vision_model(tmp_path_factory.mktemp("llava"), "llava")
    with edgespec.load(
        files.model, "none", threads=1, context=512, measure_costs=False, gpu_layers=0
    ) as runtime:
        yield runtime


@pytest.fixture
def vision(vision_runtime: edgespec.Runtime, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a model that sees images only once."""
    monkeypatch.setattr(vision_runtime, "close", lambda: None)
    return lambda progress: vision_runtime


def save_quarters(path: str, width: int = 40, height: int = 20) -> None:
    """Save an image whose quarters are red, green, blue and transparent, row by row."""
    pixels = np.zeros((height, width, 4), np.uint8)
    pixels[: height // 2, : width // 2] = (*RED, 255)
    pixels[: height // 2, width // 2 :] = (*GREEN, 255)
    pixels[height // 2 :, : width // 2] = (*BLUE, 255)
    PIL.Image.fromarray(pixels).save(path)


def cells(segments: list[Segment]) -> list[tuple[str, Colour, Colour]]:
    """Return the character, the colour and the background of each cell."""
    found = []
    for segment in segments:
        style = segment.style
        assert style is not None
        assert style.bgcolor is not None
        below = (*style.bgcolor.get_truecolor(),)
        above = (*style.color.get_truecolor(),) if style.color else below
        found += [(letter, above, below) for letter in segment.text]
    return found


def preview(d: Driver) -> list[list[tuple[str, Colour, Colour]]]:
    """Return the cells of the preview, without the empty cells to the right of it."""
    widget = d.chat.transcript.query_one(ImagePreview)
    rows = [cells([*widget.render_line(y)]) for y in range(widget.size.height)]
    width = max((x for row in rows for x, cell in enumerate(row, 1) if cell[0] == "▀"), default=0)
    return [row[:width] for row in rows]


async def drawn(d: Driver) -> list[list[tuple[str, Colour, Colour]]]:
    await until(d.pilot, lambda: bool(d.chat.transcript.query(ImagePreview)), "the preview")
    await until(d.pilot, lambda: bool(preview(d)[0]), "the image")
    return preview(d)


async def send(d: Driver, text: str) -> None:
    await d.send(text)
    await until(d.pilot, lambda: bool(d.chat.current_chat.entries), "the message")
    await d.settled()


def background(d: Driver) -> Colour:
    return d.chat.transcript.background_colors[1].rgb


async def test_an_image_is_shown_in_half_blocks_and_again_after_a_restart(
    tmp_path: Path, vision: Load
) -> None:
    save_quarters("photo.png")
    async with driving(vision, tmp_path, settings=SHORT) as d:
        await send(d, "@photo.png what is this?")
        rows = await drawn(d)
        assert [len(row) for row in rows] == [40] * 10
        assert rows[0][0] == ("▀", RED, RED)
        assert rows[0][-1] == ("▀", GREEN, GREEN)
        assert rows[-1][0] == ("▀", BLUE, BLUE)
        assert rows[-1][-1] == ("▀", background(d), background(d))
        message = d.chat.transcript.query_one(UserMessage)
        assert message.size.height == 2 + len(rows), "the text, the chip and the image"
        await d.press("f8")
        await until(
            d.pilot, lambda: preview(d)[-1][-1][1] == background(d) != rows[-1][-1][1], "the light theme"
        )
    Path("photo.png").unlink()
    async with driving(vision, tmp_path, resume="last", size=(30, 24)) as d:
        rows = await drawn(d)
        assert len(rows[0]) < 30, "the image is as wide as fits"
        assert len(rows[0]) == pytest.approx(4 * len(rows), abs=4), "and keeps its shape"
        assert (rows[0][0][1], rows[0][-1][1], rows[-1][0][1]) == (RED, GREEN, BLUE)


async def test_several_images_are_side_by_side_and_upright(tmp_path: Path, vision: Load) -> None:
    save_quarters("a.png")
    PIL.Image.new("RGB", (1, 1), RED).save("one.png")
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    turned = PIL.Image.new("RGB", (200, 100), RED)
    turned.paste(BLUE, (0, 0, 100, 100))
    turned.save("turned.jpg", exif=exif, quality=95)
    async with driving(vision, tmp_path, settings=SHORT) as d:
        await send(d, "@turned.jpg @one.png @a.png compare")
        rows = await drawn(d)
        assert len(rows) == 12
        # The stored left half is the upper half of the upright photo, whose width is half its height.
        assert np.allclose([rows[0][0][1], rows[-1][11][2]], [BLUE, RED], atol=9)
        assert rows[0][14] == ("▀", RED, background(d)), "the lower half of the cell is empty"
        assert rows[0][17][1:] == (RED, RED)


@pytest.mark.parametrize("variables", first([{"NO_COLOR": "1"}, {"TERM": "xterm", "COLORTERM": ""}]))
async def test_a_terminal_with_few_colours_shows_name_and_size(
    tmp_path: Path, vision: Load, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    save_quarters("photo.png", 1024, 768)
    async with driving(vision, tmp_path, settings=SHORT) as d:
        await send(d, "@photo.png what is this?")
        await d.sees("photo.png, 1,024 x 768 pixels")
        assert "▀" not in "\n".join(d.screen_text())


@pytest.mark.long
async def test_a_terminal_of_a_few_columns(tmp_path: Path, vision: Load) -> None:
    save_quarters("photo.png")
    async with driving(vision, tmp_path, settings=SHORT) as d:
        await send(d, "@photo.png what is this?")
        await drawn(d)
        for columns in (20, 10, 5, 3, 2, 1, 80):
            await d.pilot.resize_terminal(columns, 24)
            await d.pilot.pause()
        assert len((await drawn(d))[0]) == 40


async def test_a_large_image_does_not_block_typing(
    tmp_path: Path, vision: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, reduced = threading.Event(), Image.reduced

    def slowly(image: Image, width: int, height: int) -> NDArray[np.uint8]:
        release.wait(20)
        return reduced(image, width, height)

    monkeypatch.setattr(Image, "reduced", slowly)
    save_quarters("photo.png")
    async with driving(vision, tmp_path, settings=SHORT) as d:
        await send(d, "@photo.png what is this?")
        height = d.chat.transcript.query_one(UserMessage).size.height
        async with asyncio.timeout(10):
            await d.write("more text")
        assert d.chat.prompt.text == "more text"
        release.set()
        await drawn(d)
        assert d.chat.transcript.query_one(UserMessage).size.height == height, "nothing moves"


@pytest.mark.long
async def test_a_damaged_image_in_a_saved_chat(tmp_path: Path, vision: Load) -> None:
    """The rest of the chat opens, and the model is told that the image is damaged."""
    save_quarters("photo.png")
    async with driving(vision, tmp_path, settings=SHORT) as d:
        await send(d, "@photo.png what is this?")
        (path,) = d.saved()
    chat = json.loads(path.read_text())
    chat["messages"][0]["files"][0]["image"] = "iVBORw0KGgo="
    path.write_text(json.dumps(chat))
    async with driving(vision, tmp_path, resume="last") as d:
        await d.sees("what is this?")
        (file,) = d.chat.current_chat.messages[0].files
        assert file.image is None
        assert "damaged" in file.text


def test_an_image_that_can_no_longer_be_decoded_is_empty() -> None:
    data = png_bytes(picture(400, 300))
    assert not _largest(Image("a.png", data[:1000], 400, 300, "PNG", 1)).any()
    assert _largest(Image.read(data)).any()


@pytest.fixture
def clipboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that a fake `wl-paste` prints. Without the file, the clipboard is empty."""
    if sys.platform == "darwin":
        pytest.skip("macOS has its own clipboard")
    programs, content = tmp_path / "programs", tmp_path / "clipboard"
    programs.mkdir()
    paste = programs / "wl-paste"
    paste.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-t image" ] || exit 2\n'
        f'[ -e {content} ] || {{ echo "Nothing is copied" >&2; exit 1; }}\ncat {content}\n'
    )
    paste.chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    return content


@pytest.mark.parametrize("by_key", [True, False])
async def test_the_image_in_the_clipboard_is_attached(
    tmp_path: Path, vision: Load, clipboard: Path, by_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = picture(32, 16)
    clipboard.write_bytes(png_bytes(pixels))
    async with driving(vision, tmp_path, settings=SHORT) as d:
        await d.write("See")
        if by_key:
            await d.press("ctrl+v")
        else:
            # This is what terminals send when pasting a clipboard without text.
            d.app.post_message(events.Paste(""))
        await until(d.pilot, lambda: len(d.chat.prompt.text) > 3, "the reference")
        await send(d, d.chat.prompt.text + "what is this?")
        message = d.chat.current_chat.messages[0]
        (file,) = message.files
        assert file.image
        assert np.array_equal(file.image.pixels(), np.asarray(pixels))
        assert file.image.format == "PNG"
        await drawn(d)
    (saved,) = (tmp_path / "pasted-images").glob("*.png")
    assert f"@{saved}" in message.content
    assert saved.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path))
    assert delete_pasted_images() > 0
    assert not saved.exists()
    async with driving(vision, tmp_path, resume="last") as d:
        await d.sees("what is this?")
        assert d.chat.current_chat.messages[0].files[0].image == file.image


async def test_a_clipboard_without_an_image(tmp_path: Path, clipboard: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press("ctrl+v")
        await d.sees("The clipboard contains no image.")
        clipboard.write_bytes(b"\x89PNG\r\n damaged")
        await d.press("ctrl+v")
        await d.sees("The clipboard cannot be read:")
        d.app.copy_to_clipboard("a text")
        clipboard.unlink()
        await d.press("ctrl+v")
        await until(d.pilot, lambda: d.chat.prompt.text == "a text", "the text copied in the chat")


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS needs no program to read the clipboard")
@pytest.mark.parametrize(("display", "program"), [("WAYLAND_DISPLAY", "wl-clipboard"), ("DISPLAY", "xclip")])
async def test_a_missing_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, display: str, program: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv(display, "x")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.press("ctrl+v")
        await d.sees(f"Install {program}.")


async def test_a_dropped_image_is_attached(tmp_path: Path, vision: Load) -> None:
    path = Path("my photo.png").absolute()
    save_quarters(str(path))
    spellings = [f"'{path}'", str(path).replace(" ", "\\ "), f"file://{str(path).replace(' ', '%20')}\r\n"]
    async with driving(vision, tmp_path) as d:
        for spelling in spellings:
            d.app.post_message(events.Paste(spelling))
            await until(d.pilot, lambda: d.chat.prompt.text == f'@"{path}" ', spelling, 10)
            await until(d.pilot, lambda: "photo.png\xa09\xa0tokens" in str(d.chat.chips.visual), spelling, 10)
            d.chat.prompt.clear()
            await until(d.pilot, lambda: not d.chat.chips.display, "no chip", 10)


def test_the_plain_chat_says_the_size(vision_runtime: edgespec.Runtime) -> None:
    save_quarters("photo.png", 1024, 768)
    notes: list[str] = []
    message = _with_files("@photo.png what is this?", AttachmentReader(vision_runtime), notes.append)
    assert [file.name for file in message.files] == ["photo.png"]
    assert notes == ["Attached photo.png, 1,024 x 768 pixels (9 tokens)."]
