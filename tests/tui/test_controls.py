"""Control characters in saved chats do not reach the terminal."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from textual.geometry import Region
from textual.widget import Widget

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from tests.tui.driving import Driver, driving
from tests.tui.scripted import ScriptedRuntime, loading

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2067"


def drawn(d: Driver) -> str:
    """All that the widgets of the screen draw."""
    widgets = [widget for widget in d.app.screen.walk_children(Widget) if widget.size.area]
    strips = [line for w in widgets for line in w.render_lines(Region(0, 0, *w.size))]
    return "\n".join(strip.text for strip in strips)


@pytest.mark.long
async def test_control_characters_in_a_saved_chat_are_not_drawn(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    messages = (Message("user", f"asked{EVIL}"), Message("assistant", f"said{EVIL}\n\n```\ncode{EVIL}\n```"))
    ChatStore(tmp_path / "chats").save(
        SavedChat("evil", MessageTree.linear(messages), now, now, title=f"title{EVIL}" + "x" * 5000)
    )
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="evil", size=(120, 40)) as d:
        await d.said("asked")
        await d.pilot.press("f2")
        await d.pilot.pause(0.1)
        shown = drawn(d)
    for word in ("asked", "said", "code", "title"):
        assert word in shown
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert shown.count("x") < 500
