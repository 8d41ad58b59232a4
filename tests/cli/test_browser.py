"""`edgespec serve --chat` in Chromium: drawing, replies, the size of the window, and tabs."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import PIL.Image
import pytest

from tests.cli.chat_server import Server, ended, needs_proc, processes, serving

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

pytestmark = [pytest.mark.browser, needs_proc]

QUESTION = "How do I count the lines of a file?"
READY = "Enter sends"
WAIT_SECONDS = 60
# xterm.js draws on a canvas, and the page keeps its terminal in a local variable. The terminal exposes itself
# through this attribute, which gives the tests access to it.
_FIND_TERMINAL = """
Object.defineProperty(Object.prototype, "_addonManager", {
  set(value) {
    window.terminal = this;
    Object.defineProperty(this, "_addonManager", { value });
  },
});
"""
# The buffer keeps the columns of a wider terminal for a while.
_SCREEN = """() => {
  const { buffer, cols, rows } = window.terminal ?? { rows: 0 };
  const text = (row) => buffer.active.getLine(row).translateToString(false, 0, cols);
  return Array.from({ length: rows }, (_, row) => text(row));
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server, which no test ends."""
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
async def browser(server: Server) -> AsyncIterator[Browser]:
    """Chromium without a window."""
    from playwright.async_api import async_playwright

    assert await ended(server.folder)  # The chats of other tests may still be closing.
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=os.environ["CHROMIUM"])
        yield browser
        await browser.close()


@pytest.fixture
async def context(browser: Browser, server: Server) -> AsyncIterator[BrowserContext]:
    """A browser window, whose pages may request nothing from other hosts and have no errors."""
    addresses: list[str] = []
    problems: list[str] = []
    context = await browser.new_context(viewport={"width": 1000, "height": 700})
    await context.add_init_script(_FIND_TERMINAL)
    # Requests that the page's policy blocks are reported too.
    context.on("request", lambda request: addresses.append(request.url))
    context.on("page", lambda page: page.on("websocket", lambda socket: addresses.append(socket.url)))
    context.on("weberror", lambda problem: problems.append(str(problem.error)))
    yield context
    hosts = {urlsplit(address).netloc for address in addresses if not address.startswith("data:")}
    assert hosts == {urlsplit(server.address).netloc}
    assert problems == []


async def screen(page: Page) -> list[str]:
    """Return the rows of a page's terminal, or none while the page is loading."""
    rows: list[str] = await page.evaluate(_SCREEN)
    return rows


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not await condition():
            await asyncio.sleep(0.1)


async def shows(page: Page, text: str) -> None:
    """Wait until the chat in a page has drawn a text."""

    async def is_shown() -> bool:
        return any(text in row for row in await screen(page))

    await wait_until(is_shown)


async def opened(context: BrowserContext, server: Server) -> Page:
    """Open the chat in a tab, and wait until it is ready."""
    page = await context.new_page()
    response = await page.goto(server.address)
    assert response is not None
    assert response.status == 200
    await shows(page, READY)
    return page


async def bright_pixels(page: Page) -> int:
    """Return how many pixels in the page's lower quarter, where the chat's input is, are not dark."""
    picture = PIL.Image.open(io.BytesIO(await page.screenshot())).convert("L")
    lower = picture.crop((0, picture.height * 3 // 4, *picture.size))
    return sum(lower.histogram()[100:])


async def test_a_message_gets_an_answer(context: BrowserContext, server: Server) -> None:
    page = await opened(context, server)
    assert await page.title() == "edgespec"
    assert await bright_pixels(page) > 1000
    # The chat has the focus from the start.
    await page.keyboard.type(QUESTION)
    await page.keyboard.press("Enter")

    async def is_answered() -> bool:
        text = "\n".join(await screen(page)).rpartition(QUESTION)[2].partition("╭")[0]
        return re.search(r"\w{3}", text) is not None

    await wait_until(is_answered)


async def test_the_chat_follows_the_size_of_the_window(context: BrowserContext, server: Server) -> None:
    page = await opened(context, server)
    wide, high = len((await screen(page))[0]), len(await screen(page))
    await page.set_viewport_size({"width": 600, "height": 500})

    async def fits() -> bool:
        rows = await screen(page)
        box = next((row for row in rows if "╭" in row), "").strip()
        # The input of the chat has a margin of one column on each side.
        return len(rows) < high and len(rows[0]) < wide and len(box) == len(rows[0]) - 2

    await wait_until(fits)
    assert READY in "\n".join((await screen(page))[-4:])


@pytest.mark.parametrize("query", ["", "?key=", "?key=wrong"])
async def test_without_the_key_there_is_no_chat(context: BrowserContext, server: Server, query: str) -> None:
    page = await context.new_page()
    response = await page.goto(server.address.partition("?")[0] + query)
    assert response is not None
    assert response.status == 401
    assert await page.locator("script").count() == 0
    assert processes(server.folder) == []


async def test_each_tab_is_a_chat_that_ends_with_it(context: BrowserContext, server: Server) -> None:
    first = await opened(context, server)
    (process,) = processes(server.folder)
    second = await opened(context, server)
    assert len(processes(server.folder)) == 2
    await second.keyboard.type("only here")
    await shows(second, "only here")
    assert "only here" not in "\n".join(await screen(first))
    await first.close()

    async def is_ended() -> bool:
        return process not in processes(server.folder)

    await wait_until(is_ended)
    assert len(processes(server.folder)) == 1
    await second.keyboard.type(" and later")
    await shows(second, "only here and later")
    await second.close()
    assert await ended(server.folder)


async def test_a_chat_that_has_ended_can_be_opened_again(context: BrowserContext, server: Server) -> None:
    page = await opened(context, server)
    (process,) = processes(server.folder)
    again = page.get_by_role("button")
    assert not await again.is_visible()
    await page.keyboard.press("Control+d")
    await again.click()
    await shows(page, READY)
    (other,) = processes(server.folder)
    assert other != process
