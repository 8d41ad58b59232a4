"""Every screen fits terminals of 40 to 300 columns, light and dark, and lines stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import covering
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import ScriptedRuntime, loading

# Maximum length of a readable line of text, in cells.
LONGEST_LINE = 130


def closes(driver: Driver) -> bool:
    """Whether the screen says how to close a dialog."""
    shown = "\n".join(driver.screen_text())
    return "Esc closes" in shown or "Esc cancels" in shown


@pytest.mark.long
@pytest.mark.parametrize(("size", "light"), covering([(40, 20), (200, 60), (300, 80)], [False, True]))
async def test_nothing_is_cut_off(tmp_path: Path, size: tuple[int, int], light: bool) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size, light=light) as d:
        await d.say("How do I list files by size?")
        for key, close in (("f1", "escape"), ("f5", "escape"), ("f6", "escape"), ("f2", "f2"), ("f3", "f3")):
            await d.press(key)
            if key in ("f1", "f5", "f6"):
                await until(d.pilot, lambda: closes(d), f"the dialog of {key}")
            else:
                await d.pilot.pause(0.2)
            shown = d.screen_text()
            assert all(len(line) <= size[0] for line in shown), key
            # Only the header may truncate model names.
            assert not [line for line in shown[1:] if "…" in line], key
            await d.press(close)
            await d.pilot.pause(0.1)


async def test_lines_are_not_as_wide_as_a_wide_terminal(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(300, 80)) as d:
        await d.pilot.pause(0.2)
        lines = [" ".join(line.split()) for line in d.screen_text()[1:] if "─" not in line]
        assert 60 < max(map(len, lines)) <= LONGEST_LINE
