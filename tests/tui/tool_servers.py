"""Configure the MCP servers of `tests/tools`, and make the demo model call their tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.options.settings_file import quoted
from edgespec.tools.server_config import servers_path
from edgespec.tui.tool_access import ToolAccess

SERVERS = Path(__file__).parent.parent / "tools"


def configure(name: str, script: str, *words: str) -> None:
    """Add a server to the configuration file."""
    args = ", ".join(map(quoted, (str(SERVERS / script), *words)))
    with servers_path().open("a") as file:
        file.write(f"[{name}]\ncommand = {quoted(sys.executable)}\nargs = [{args}]\n")


def force_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of tool names. The model must call one per reply, and none in later replies."""
    names: list[str] = []
    offered = vars(ToolAccess)["options"].fget

    def options(self: ToolAccess) -> dict[str, Any]:
        given = offered(self)
        if not names:
            return {**given, "tool_choice": "none", "max_tokens": 4} if given else {}
        return {**given, "tool_choice": {"type": "function", "function": {"name": names.pop(0)}}}

    monkeypatch.setattr(ToolAccess, "options", property(options))
    return names
