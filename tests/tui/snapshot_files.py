"""Compare the screen with the text in a file, in dark and light colours."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.tui.driving import Driver

KEPT = Path(__file__).parent / "snapshots"


async def check_screen(d: Driver, name: str) -> None:
    """Compare the screen with `snapshots/NAME-WIDTHxHEIGHT.txt`. The colours must not change its text."""
    columns, rows = d.app.size
    text = await _text(d)
    assert all(len(line) <= columns for line in text.splitlines())
    path = KEPT / f"{name}-{columns}x{rows}.txt"
    if os.environ.get("EDGESPEC_UPDATE_SNAPSHOTS"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")
    dark = _save_picture(d, path.stem)
    d.chat.preferences.theme = "light"
    d.chat.post_message(d.chat.PreferencesChanged())
    assert await _text(d) == text
    assert _save_picture(d, f"{path.stem}-light") != dark


async def _text(d: Driver) -> str:
    await d.pilot.pause(0.3)
    # Remove the ends of scrollbar handles, whose positions depend on when the screen was last painted.
    lines = (re.sub("[▁▂▃▄▅▆▇]", " ", line).rstrip() for line in d.screen_text())
    return "\n".join(lines) + "\n"


def _save_picture(d: Driver, name: str) -> str:
    """Return a picture of the screen. Also save it if EDGESPEC_PICTURES names a folder."""
    picture = d.app.export_screenshot()
    if folder := os.environ.get("EDGESPEC_PICTURES"):
        Path(folder, f"{name}.svg").write_text(picture, "utf-8")
    return picture
