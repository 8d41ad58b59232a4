"""Toolboxes with real and hostile MCP servers, over stdio and HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import edgespec.tools.connection
from edgespec.tools.connection import Toolbox
from edgespec.tools.server_config import ServerConfig
from edgespec.tools.tool import Tool, ToolResult, limited, visible

HERE = Path(__file__).parent
SECONDS = 60


def good(**changes: object) -> ServerConfig:
    """The real server over stdio."""
    options = {"command": sys.executable, "args": (str(HERE / "good_server.py"), "stdio"), **changes}
    return ServerConfig("good", **options)  # type: ignore[arg-type]


def hostile(mode: str, **changes: object) -> ServerConfig:
    options = {"command": sys.executable, "args": (str(HERE / "hostile_server.py"), mode), **changes}
    return ServerConfig("bad", **options)  # type: ignore[arg-type]


@pytest.fixture
def boxes() -> Iterator[list[Toolbox]]:
    """Toolboxes to close at the end."""
    opened: list[Toolbox] = []
    yield opened
    for box in opened:
        began = time.monotonic()
        box.close()
        assert time.monotonic() - began < 10


def started(boxes: list[Toolbox], config: ServerConfig) -> Toolbox:
    box = Toolbox([config])
    boxes.append(box)
    box.start(config.name).result(SECONDS)
    return box


def call(box: Toolbox, tool_name: str, /, **arguments: object) -> ToolResult:
    (server,) = box.servers
    found = next((each for each in box.tools if each.name == tool_name), None)
    tool = found or Tool(server, tool_name, "", {})
    return box.call(tool, arguments).result(SECONDS)


@pytest.fixture
def http() -> Iterator[str]:
    """The address of the real server over HTTP."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "good_server.py"), "http", str(port)], stderr=subprocess.DEVNULL
    )
    for _ in range(300):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_a_real_server_over_stdio(boxes: list[Toolbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "private")
    box = started(boxes, good(env={"SECRET": "42"}, timeout=5.0))
    assert box.servers["good"].problem == ""
    assert [tool.call_name for tool in box.tools][:2] == ["good_add", "good_colour"]
    add = box.tools[0]
    assert (add.description, add.schema["required"]) == ("Add two numbers.", ["a", "b"])
    assert add.definition["function"]["name"] == "good_add"
    assert call(box, "add", a=2, b=40).text == "42"
    failed = call(box, "fail")
    assert failed.failed
    assert failed.text == "Error: Error executing tool fail"
    assert call(box, "add", a="x").failed
    assert call(box, "environment", name="SECRET").text == "42"
    assert call(box, "environment", name="HF_TOKEN").text == "not set"
    assert "image/png: models in this chat can read only text" in call(box, "picture").text
    assert len(call(box, "long_text", characters=1_000_000).text) == 1_000_000
    sleep = next(tool for tool in box.tools if tool.name == "sleep")
    box.call(sleep, {"seconds": 3}).cancel()
    assert call(box, "add", a=1, b=1).text == "2"
    box.stop("good").result(SECONDS)
    assert not box.tools
    assert call(box, "missing").failed


def test_a_real_server_over_http(boxes: list[Toolbox], http: str) -> None:
    box = started(boxes, ServerConfig("web", url=http))
    assert box.servers["web"].problem == ""
    assert call(box, "add", a=2, b=40).text == "42"
    # A result that exceeds the limit fails the call, but does not end the chat.
    result = call(box, "long_text", characters=20_000_000)
    assert result.failed
    assert "more than 8 MiB" in result.text or "ended" in result.text


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (ServerConfig("bad", command="no-such-program-anywhere"), "there is no program"),
        (hostile("ends"), "the program ended with status 1: cannot read the settings"),
        (hostile("silent"), "it did not start within 1 seconds"),
        (hostile("blares"), "the server sent more than 8 MiB at once"),
        (
            ServerConfig("bad", url="http://127.0.0.1:9/mcp?key=1"),
            "nothing answers at http://127.0.0.1:9/mcp",
        ),
    ],
    ids=["missing", "ends", "silent", "blares", "refused"],
)
def test_servers_that_do_not_start(
    boxes: list[Toolbox], monkeypatch: pytest.MonkeyPatch, config: ServerConfig, problem: str
) -> None:
    if config == hostile("silent"):
        monkeypatch.setattr(edgespec.tools.connection, "_START_SECONDS", 1.0)
    box = started(boxes, config)
    assert problem in box.servers["bad"].problem
    assert not box.servers["bad"].running
    result = call(box, "act")
    assert result.failed
    assert "is not running" in result.text


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("hangs", "act did not answer within 2 seconds"),
        ("dies", "the program ended with status 3: out of \\x1b[31mmemory"),
        ("huge", "the server sent more than 8 MiB at once"),
        ("floods", "the server sent more than 8 MiB at once"),
        ("pings", ""),
        ("wrong", "Input should be a valid list"),
    ],
)
def test_servers_that_misbehave_during_a_call(boxes: list[Toolbox], mode: str, problem: str) -> None:
    # The `pings` server keeps a core busy until the call times out.
    box = started(boxes, hostile(mode, timeout={"hangs": 2.0, "pings": 0.5}.get(mode, 30.0)))
    began = time.monotonic()
    result = call(box, "act")
    assert time.monotonic() - began < 20
    assert result.failed
    assert problem in visible(result.text)
    # The model still sees the tools of a server that has exited, and the next call restarts it.
    assert box.tools
    box.start("bad").result(SECONDS)
    assert box.servers["bad"].running
    box.stop("bad").result(SECONDS)
    assert not box.tools


@pytest.mark.parametrize("mode", ["garbage", "evil"])
def test_garbage_does_not_end_the_connection(boxes: list[Toolbox], mode: str) -> None:
    box = started(boxes, hostile(mode))
    result = call(box, "act")
    assert not result.failed
    assert call(box, "act").text == result.text


def test_a_server_that_sends_too_much_between_calls_is_cut_off(boxes: list[Toolbox]) -> None:
    box = started(boxes, hostile("chatters"))
    for _ in range(500):
        if not box.servers["bad"].running:
            break
        time.sleep(0.02)
    assert box.servers["bad"].problem == "the server sent more than 8 MiB at once"


@pytest.mark.long
def test_ten_thousand_tools(boxes: list[Toolbox]) -> None:
    box = started(boxes, hostile("many"))
    assert (len(box.tools), box.servers["bad"].left_out) == (100, 9_900)


def test_endless_pages_of_tools(boxes: list[Toolbox]) -> None:
    assert len(started(boxes, hostile("pages")).tools) == 100


def test_names_and_descriptions_are_not_trusted(boxes: list[Toolbox]) -> None:
    box = started(boxes, hostile("names"))
    assert [tool.name for tool in box.tools] == ["good", "deep"]
    assert box.servers["bad"].left_out == 6
    assert box.tools[0].description == r"\x1b[2J\u202eApproved\u200b \x07[bold]run[/bold]"


def test_a_server_that_ignores_signals_is_killed(boxes: list[Toolbox]) -> None:
    box = started(boxes, hostile("ignores"))
    before = _children()
    assert before
    box.close()
    assert not before & _children()


def _children() -> set[str]:
    """Return the process IDs of the running hostile servers."""
    found = subprocess.run(
        ["ps", "-eww", "-o", "pid,ppid,stat,args"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 3) for line in found.stdout.splitlines()[1:]]
    return {
        pid
        for pid, parent, state, words in rows
        if parent == str(os.getpid()) and "hostile_server" in words and "Z" not in state
    }


def test_nothing_is_started_before_the_first_use() -> None:
    box = Toolbox([good()])
    assert "edgespec-tools" not in [thread.name for thread in threading.enumerate()]
    box.close()


def test_results_keep_the_texts_of_links() -> None:
    from mcp.types import CallToolResult, ResourceLink, TextContent

    link = ResourceLink(type="resource_link", uri="http://a.b/", name="ls", description="A man page")
    result = CallToolResult(content=[link, TextContent(type="text", text="See above.")])
    assert ToolResult.of(result, 0.0).text == "[link to http://a.b/; ls; A man page]\nSee above."


def test_long_results_are_limited() -> None:
    assert limited("short", 10) == "short"
    text = limited("x" * 3000, 1000)
    assert text.startswith("x" * 1000 + "\n[This result has 3,000 characters. The last 2,000 are left out")


@pytest.mark.long
def test_the_chat_does_not_import_the_sdk_before_its_first_use() -> None:
    code = "import sys, edgespec.tui.app; sys.exit(bool({'mcp', 'httpx2', 'anyio'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_line_ends_of_windows_are_line_ends() -> None:
    assert visible("one\r\ntwo\rthree\n") == "one\ntwo\\rthree\n"
