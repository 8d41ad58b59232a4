"""`edgespec serve --chat`: access to the chat in a browser, and a separate process for each tab."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from tests.cli.chat_server import Server, ended, needs_proc, processes, serving
from tests.cli.conftest import Run, Start, one_line_error


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server, which no test ends."""
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def address(server: Server) -> str:
    """The address of the running server, including its key."""
    return server.address


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
    assert "https:" not in page
    assert f"ws://{urlsplit(address).netloc}/ws/" in page


async def test_an_invalid_request_writes_nothing_to_the_terminal(address: str, server: Server) -> None:
    place = urlsplit(address)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(b"GET /?key=\xc2\xb2\x1b[31m HTTP/1.1\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    assert (server.folder / "errors.txt").read_bytes() == b""


class Tab:
    """A browser tab with a chat. Collects what the chat draws."""

    def __init__(self, session: aiohttp.ClientSession, address: str, size: str) -> None:
        place, key = urlsplit(address).netloc, urlsplit(address).query.removeprefix("key=")
        self._connecting = session.ws_connect(
            f"ws://{place}/ws/{key}?{size}",
            origin=f"http://{place}",
            max_msg_size=0,
            # A browser does not wait for the server when a tab is closed.
            timeout=aiohttp.ClientWSTimeout(ws_close=0.5),
        )
        self.screen = ""

    async def __aenter__(self) -> Tab:
        self.socket = await self._connecting
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.socket.close()

    async def shows(self, text: str) -> None:
        """Wait until the chat has drawn a text."""
        async with asyncio.timeout(60):
            while text not in self.screen:
                message = await self.socket.receive()
                assert message.type == aiohttp.WSMsgType.BINARY, message
                self.screen += message.data.decode("utf-8", "replace")

    async def end(self) -> int | None:
        """Wait until the server closes the connection, and return the close code."""
        async with asyncio.timeout(30):
            while (await self.socket.receive()).type == aiohttp.WSMsgType.BINARY:
                pass
        return self.socket.close_code


@asynccontextmanager
async def opened(address: str, size: str = "width=80&height=24") -> AsyncIterator[Tab]:
    async with aiohttp.ClientSession() as session, Tab(session, address, size) as tab:
        yield tab


@needs_proc
async def test_each_tab_has_a_chat_that_ends_with_it(address: str, server: Server) -> None:
    assert await ended(server.folder)  # The chats of other tests may still be closing.
    async with opened(address) as tab:
        await tab.shows("Enter sends")
        assert len(processes(server.folder)) == 1
        await tab.socket.send_json(["stdin", "/memory\r"])
        await tab.shows("model weights")
    assert await ended(server.folder)


@pytest.mark.long
@needs_proc
async def test_a_huge_screen_is_limited(address: str, server: Server) -> None:
    async with opened(address, "width=2000000&height=900000") as tab:
        await tab.shows("Enter sends")
        (chat,) = map(psutil.Process, processes(server.folder))
        assert (chat.environ()["COLUMNS"], chat.environ()["ROWS"]) == ("1000", "500")
        for width, height in ((10**9, 10**9), (0, -5), (10**30, 2), (100, 30)):
            await tab.socket.send_json(["resize", {"width": width, "height": height}])
        await tab.socket.send_json(["stdin", "/memory\r"])
        await tab.shows("model weights")
        assert chat.memory_info().rss < 700 * 2**20


@needs_proc
@pytest.mark.parametrize(
    "message",
    [
        *('["stdin", 5]', "[" * 100_000, '["resize", {"width": Infinity, "height": 1}]'),
        *(
            pytest.param(message, marks=pytest.mark.long)
            for message in (
                *("{}", "[]", "[", '["stdin"]', '["stdin", "\\ud800"]', '["resize", {}]'),
                '["resize", {"width": "x", "height": 1}]',
            )
        ),
    ],
    ids=range(10),
)
async def test_a_message_that_is_invalid_ends_the_chat(address: str, server: Server, message: str) -> None:
    async with opened(address) as tab:
        await tab.socket.send_str(message)
        assert await tab.end() == aiohttp.WSCloseCode.PROTOCOL_ERROR
    assert await ended(server.folder)


@pytest.mark.long
@needs_proc
async def test_a_chat_that_hangs_ends_with_its_tab(address: str, server: Server) -> None:
    async with opened(address) as tab:
        await tab.shows("Enter sends")
        (chat,) = processes(server.folder)
        os.kill(chat, signal.SIGSTOP)
        for _ in range(4):
            await tab.socket.send_json(["stdin", "x" * 100_000])
    assert await ended(server.folder)


@pytest.mark.long
@needs_proc
async def test_a_chat_that_ends_closes_its_connection(address: str, server: Server) -> None:
    async with opened(address) as tab:
        await tab.shows("Enter sends")
        os.kill(processes(server.folder)[0], signal.SIGKILL)
        assert await tab.end() == aiohttp.WSCloseCode.OK


@pytest.mark.long
@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_chats_end_with_the_server(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "data") as server:
        async with opened(server.address) as tab, AsyncExitStack() as others:
            if number == signal.SIGTERM:
                await others.enter_async_context(opened(server.address))
            await tab.shows("Enter sends")
            if number == signal.SIGTERM:
                os.kill(processes(server.folder)[0], signal.SIGSTOP)
            server.process.send_signal(number)
            ending = await asyncio.to_thread(server.process.wait, 30)
            assert ending == (0 if number == signal.SIGTERM else -number)
            assert await ended(server.folder)


@pytest.mark.parametrize(
    "args",
    [["--host", "0.0.0.0"], ["--allow-origin", "*"], ["--idle-unload", "5"], ["--logit-bias", "5=1"]],
)
def test_options_without_effect_are_refused(run: Run, args: list[str]) -> None:
    one_line_error(run("serve", "--chat", *args), 2, args[0], "--chat", code="option_invalid")


def test_a_port_in_use_is_one_line(run: Run, start: Start) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = one_line_error(run("serve", "--chat", "--port", str(taken.getsockname()[1])), 1)
    assert "--port" in error


@pytest.mark.long
def test_the_key_of_the_environment_is_used(start: Start) -> None:
    process = start("serve", "--chat", "--port", "0", "--json", env={"EDGESPEC_API_KEY": "a key/with ?"})
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["chat_url"]
    assert "a key" not in address
    base = address.partition("?")[0]
    assert asyncio.run(status(address)) == 401
    assert asyncio.run(status(f"{base}?key=a%20key%2Fwith%20%3F")) == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    assert isinstance(process, subprocess.Popen)
