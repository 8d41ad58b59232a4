"""Guard the chat against problems that Textual, its UI library, does not prevent.

- Invalid environment variables are reported.
- Keys are delivered in the order in which they were typed.
- Control characters in model output and chat files do not reach the terminal.
- Invalid bytes from the terminal do not end the chat, and pasted text never acts as key presses. Textual
  decodes the terminal's bytes strictly, so a single byte in another encoding, such as a pasted Latin-1
  character, would end the app. It also treats control characters in pasted text as keys.
"""

from __future__ import annotations

import asyncio
import codecs
import pkgutil
import re
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import COLOR_SYSTEMS
from rich.segment import Segment
from textual import constants
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.color import Color
from textual.driver import Driver
from textual.filter import LineFilter

from edgespec.errors import ConfigurationError
from edgespec.system.files import error_reason
from edgespec.tui.plain_console import CONTROLS

if TYPE_CHECKING:
    from textual import events
    from textual.app import App
    from textual.dom import DOMNode
    from textual.message import Message

# Maximum frame rate. At higher rates, the chat constantly redraws and does not respond to input.
_MAX_FRAMES_PER_SECOND = 1000
# Maximum time in seconds that a key waits for the previous one, so that Esc works while a widget is busy.
_MAX_WAIT_SECONDS = 1.0
# Matches escape sequences, such as those for colours and titles, and all control characters except tabs and
# line breaks.
_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_LINE_BREAK = re.compile(r"\r\n?")


def check_textual_variables() -> None:
    """Validate the TEXTUAL_* environment variables, which Textual itself does not check.

    Raises:
        ConfigurationError: A value would prevent the chat from running.
    """
    colours = ("auto", *COLOR_SYSTEMS)
    if constants.COLOR_SYSTEM not in colours:
        raise ConfigurationError(
            f"the environment variable TEXTUAL_COLOR_SYSTEM is {constants.COLOR_SYSTEM!r}, which is not a"
            " colour system that Textual knows",
            f"unset it, or use one of {', '.join(colours)}",
        )
    if constants.DRIVER is not None and not _is_driver(constants.DRIVER):
        raise ConfigurationError(
            f"the environment variable TEXTUAL_DRIVER is {constants.DRIVER!r}, which is not a Textual driver",
            "unset it, or use a module and class, such as textual.drivers.linux_driver:LinuxDriver",
        )
    if constants.MAX_FPS > _MAX_FRAMES_PER_SECOND:
        raise ConfigurationError(
            f"the environment variable TEXTUAL_FPS is {constants.MAX_FPS}, but the chat can draw at most"
            f" {_MAX_FRAMES_PER_SECOND} frames per second",
            f"unset it, or use a number from 1 to {_MAX_FRAMES_PER_SECOND}",
        )
    if constants.LOG_FILE is not None:
        try:
            open(constants.LOG_FILE, "a").close()
        except OSError as error:
            raise ConfigurationError(
                f"the environment variable TEXTUAL_LOG is {constants.LOG_FILE!r}, but this file"
                f" cannot be opened for writing: {error_reason(error)}",
                "unset it, or use a writable file",
            ) from error
    folder = constants.SCREENSHOT_LOCATION
    if constants.SCREENSHOT_DELAY >= 0 and folder and not Path(folder).is_dir():
        raise ConfigurationError(
            f"the environment variable TEXTUAL_SCREENSHOT_LOCATION is {folder!r}, which is not a folder",
            "unset it, or use an existing folder",
        )


def _is_driver(name: str) -> bool:
    if ":" not in name:
        return False
    try:
        driver = pkgutil.resolve_name(name)
    except Exception:  # Importing the driver's module can raise any exception.
        return False
    return isinstance(driver, type) and issubclass(driver, Driver)


class KeyOrder:
    """Holds each key until the widgets have handled the key before it.

    Owned by the app, and used only in its event loop.

    Textual sends a key to the widget that has the focus at that moment. A key that moves the focus or opens a
    dialog takes effect a little later. Without this class, a fast typist's next keys would reach the wrong
    widget.

    Args:
        app: The app whose widgets handle the keys.
        dispatch: Sends a key or pasted text to the focused widget.
    """

    def __init__(self, app: App[Any], dispatch: Callable[[events.Event], Awaitable[None]]) -> None:
        self._app, self._dispatch = app, dispatch
        self._held: deque[events.Event] = deque()
        # Identifies the key that the widgets are handling, or None if they are waiting for a key.
        self._handled_now: object | None = None

    async def add(self, event: events.Event) -> None:
        """Pass on a key or pasted text once the keys before it have been handled."""
        if self._handled_now is None:
            await self._pass_on(event)
        else:
            self._held.append(event)

    async def _pass_on(self, event: events.Event) -> None:
        key = self._handled_now = object()
        asyncio.get_running_loop().call_later(_MAX_WAIT_SECONDS, self._app.call_later, self._give_up, key)
        path = self._path
        await self._dispatch(event)
        # The widgets may handle a key by posting another message to themselves, so follow the path twice.
        await self._follow(key, deque(path + path), is_last=False)

    @property
    def _path(self) -> list[DOMNode]:
        """The nodes that a key passes through: the focused widget, its ancestors, the screen and the app."""
        return (self._app.focused or self._app.screen).ancestors_with_self

    async def _follow(self, key: object, path: deque[DOMNode], *, is_last: bool) -> None:
        """Wait for each node in the path, in order, to handle the messages in its queue."""
        while path:
            node = path.popleft()
            if node.call_later(self._follow, key, path, is_last=is_last):
                return
            if node is self._app:
                # The app is closing, so no widget will handle any more keys.
                self._held.clear()
        if is_last:
            await self._end(key)
        else:
            # The key may have opened a dialog, so wait until the dialog is ready too.
            await self._follow(key, deque(self._path), is_last=True)

    async def _end(self, key: object) -> None:
        """Pass on the next key, unless `key` is no longer the key that is being handled."""
        if key is self._handled_now:
            self._handled_now = None
            if self._held:
                await self._pass_on(self._held.popleft())

    async def _give_up(self, key: object) -> None:
        """Stop waiting for `key`, which is taking too long, and pass on all keys held back by it."""
        if key is not self._handled_now:
            return
        if self._held:
            await self._dispatch(self._held.popleft())
            # The widgets may have called `Widget.focus`, which moves the focus only when the app is idle.
            self._app.call_later(self._give_up, key)
        else:
            self._handled_now = None


class NoControls(LineFilter):
    """Removes control characters from each line before it is drawn."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002 - textual's
        return [
            segment if segment.control else Segment(CONTROLS.sub("", segment.text), segment.style)
            for segment in segments
        ]


def guard_input(driver: type[Driver]) -> None:
    """Make a driver decode invalid bytes as U+FFFD, and parse its input with `InputParser`.

    Textual has no option for either, so this replaces two names in the driver's module.
    """
    module = sys.modules[driver.__module__]
    for name, guarded in (("XTermParser", InputParser), ("getincrementaldecoder", _lenient_decoder)):
        if hasattr(module, name):
            setattr(module, name, guarded)


def _lenient_decoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
    """Return a decoder factory that replaces invalid bytes. Stands in for `codecs.getincrementaldecoder`."""
    return partial(codecs.getincrementaldecoder(encoding), errors="replace")


def pasted_text(text: str) -> str:
    """Return pasted text with `\\n` as line break, and without escape sequences or control characters."""
    return _SEQUENCES.sub("", _LINE_BREAK.sub("\n", text))


class InputParser(XTermParser):
    """Passes pasted text to Textual's parser only once it is complete, and without control characters.

    Otherwise, an escape character within the text would end the paste, and the rest would be treated as key
    presses. A line break, for example, would send the message.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._pasted: list[str] | None = None
        # The last characters received, kept because a marker can be split across two reads.
        self._tail = ""
        self._found = False
        self._is_first = True

    def feed(self, data: str) -> Iterable[Message]:
        """Parse data from the terminal. An empty string ends the input."""
        if not data:
            yield from super().feed(data)
            return
        if self._is_first:
            # Until Textual takes over, the terminal itself turns Enter into a line feed.
            self._is_first = False
            keys, start, pasted = data.partition(BRACKETED_PASTE_START)
            data = keys.replace("\n", "\r") + start + pasted
        while data:
            if self._pasted is None:
                passed, data = self._split(data, BRACKETED_PASTE_START)
                if passed:
                    yield from super().feed(passed)
                if self._found:
                    self._pasted = []
            else:
                text, data = self._split(data, BRACKETED_PASTE_END)
                self._pasted.append(text)
                if self._found:
                    whole, self._pasted = "".join(self._pasted), None
                    text = pasted_text(whole.removesuffix(BRACKETED_PASTE_END))
                    yield from super().feed(text + BRACKETED_PASTE_END)

    def _split(self, data: str, marker: str) -> tuple[str, str]:
        """Split data after a marker, whose beginning may have arrived in earlier data.

        Sets `_found` to whether the whole marker was found.
        """
        before = len(self._tail)
        end = (self._tail + data).find(marker)
        self._found = end >= 0
        if not self._found:
            self._tail = (self._tail + data)[1 - len(marker) :]
            return data, ""
        self._tail = ""
        position = end + len(marker) - before
        return data[:position], data[position:]
