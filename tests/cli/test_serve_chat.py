"""`edgespec serve --chat`: access to the chat in a browser, and a separate process for each tab."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.cli.conftest import Run, Start, one_line_error


@pytest.fixture
async def address(start: Start, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a running server, including its key."""
    process = start(
        *("serve", "--chat", "--port", "0", "--json", "--threads", "1"),
        env={"EDGESPEC_DATA_DIR": str(tmp_path / "data")},
    )
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    yield json.loads(line)["chat_url"]
    process.send_signal(signal.SIGINT)
    assert await asyncio.to_thread(process.wait, 30) == 0


async def status(address: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(address, headers=headers) as response:
        return response.status


async def socket_status(address: str, **headers: str) -> int:
    """Return the HTTP status of a web socket request: 101 if it is accepted, otherwise the error."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.ws_connect(address, headers=headers):
                return 101
        except aiohttp.WSServerHandshakeError as error:
            return error.status


async def test_only_the_key_and_this_machine_are_accepted(address: str) -> None:
    place = urlsplit(address).netloc
    base, key = f"http://{place}", urlsplit(address).query.removeprefix("key=")
    assert len(key) >= 32
    assert await status(address) == 200
    assert await status(address, Origin=base) == 200
    for wrong in ("", "?key=", f"?key={key[:-1]}", f"?key={key}x", "download/x", f"ws/{key}x"):
        assert await status(f"{base}/{wrong}") in (401, 404), wrong
    assert await status(address, Host="evil.example") == 403
    assert await status(address, Host=f"evil.example:{place.split(':')[1]}") == 403
    assert await status(address, Origin="http://evil.example") == 403
    assert await status(address, Origin="null") == 403
    assert await status(f"{base}/static/js/textual.js") == 200
    assert await status(f"{base}/static/js/textual.js", Origin="http://evil.example") == 403
    assert await status(f"{base}/static/../server.py") in (401, 404)
    socket = f"ws://{place}/ws"
    assert await socket_status(socket) == 401
    assert await socket_status(f"{socket}/{key[:-1]}") == 401
    assert await socket_status(f"{socket}/{key}", Origin="http://evil.example") == 403
    assert await socket_status(f"{socket}/{key}", Host="evil.example") == 403


async def test_the_page_loads_nothing_from_elsewhere(address: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(address) as response:
        policy = response.headers["Content-Security-Policy"]
        assert response.headers["Referrer-Policy"] == "no-referrer"
        page = await response.text()
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert f"ws://{urlsplit(address).netloc}/ws/" in page


def processes(folder: Path) -> list[int]:
    """Return the chat processes that use this data folder."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            variables = (place / "environ").read_bytes()
        except OSError:
            continue
        if words[1:4] == [b"-m", b"edgespec", b"chat"] and os.fsencode(folder) in variables:
            found.append(int(place.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
async def test_each_tab_has_a_chat_that_ends_with_it(address: str, tmp_path: Path) -> None:
    place = urlsplit(address).netloc
    key = urlsplit(address).query.removeprefix("key=")
    url = f"ws://{place}/ws/{key}?width=80&height=24"
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(url, origin=f"http://{place}") as first:
            screen = ""
            while "Enter sends" not in screen:
                message = await asyncio.wait_for(first.receive(), 60)
                assert message.type == aiohttp.WSMsgType.BINARY, message
                screen += message.data.decode("utf-8", "replace")
            assert len(processes(tmp_path)) == 1
            await first.send_json(["stdin", "/memory\r"])
            while "model files" not in screen:
                screen += (await asyncio.wait_for(first.receive(), 30)).data.decode("utf-8", "replace")
        for _ in range(150):
            if not processes(tmp_path):
                break
            await asyncio.sleep(0.1)
        assert processes(tmp_path) == []


@pytest.mark.parametrize(
    "args",
    [["--host", "0.0.0.0"], ["--allow-origin", "*"], ["--idle-unload", "5"], ["--logit-bias", "5=1"]],
)
def test_options_without_effect_are_refused(run: Run, args: list[str]) -> None:
    error = one_line_error(run("serve", "--chat", *args), 2)
    assert f"{args[0]} cannot be used with --chat" in error


def test_a_port_in_use_is_one_line(run: Run, start: Start) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = one_line_error(run("serve", "--chat", "--port", str(taken.getsockname()[1])), 1)
    assert "--port" in error


def test_the_key_of_the_environment_is_used(start: Start) -> None:
    process = start("serve", "--chat", "--port", "0", "--json", env={"EDGESPEC_API_KEY": "a key/with ?"})
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["chat_url"]
    assert "a key" not in address
    base = address.partition("?")[0]
    assert asyncio.run(status(address)) == 401
    assert asyncio.run(status(f"{base}?key=a%20key%2Fwith%20%3F")) == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert isinstance(process, subprocess.Popen)
