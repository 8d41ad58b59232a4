"""The terminal chat as an app: it loads the model, shows the chat, and leaves without hanging."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import App
from textual.filter import LineFilter
from textual.timer import Timer

from edgespec.chat.store import ChatStore, Setting
from edgespec.errors import CancelledError
from edgespec.tui.chat_screen import ChatScreen
from edgespec.tui.controls import NoControls
from edgespec.tui.preferences import Preferences
from edgespec.tui.screens.loading import LoadingScreen
from edgespec.tui.slash import run_command
from edgespec.tui.themes import DARK, THEMES
from edgespec.tui.worker import Loaded, LoadFailed, LoadingProgress, ModelThread

if TYPE_CHECKING:
    from edgespec.tui.model import Load

__all__ = ["ChatApp", "run_chat"]

_TICK_SECONDS = 1 / 25
_PATIENCE_SECONDS = 5.0
_SWITCH_SECONDS = 5e-5
_NO_CONTROLS = NoControls()


class ChatApp(App[None]):
    """The chat. `load` is called in the model thread.

    After `run`, `load_error` holds what went wrong while loading, if anything.
    """

    TITLE = "edgespec"
    CSS_PATH = "chat.tcss"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 - the base class wants a list
        (0, "-narrow"),
        (64, "-medium"),
        (110, "-wide"),
    ]

    def __init__(
        self,
        load: Load,
        *,
        model_name: str = "",
        system: str | None = None,
        settings: Mapping[str, Setting] | None = None,
        resume: str | None = None,
        store: ChatStore | None = None,
        light: bool | None = None,
    ) -> None:
        super().__init__()
        self.load_error: Exception | None = None
        self.model_thread = ModelThread(load)
        self.store = store if store is not None else ChatStore()
        self.preferences = Preferences.read(self._preferences_path)
        if light is not None:
            self.preferences.light = light
        self._model_name = model_name
        self._system = system
        self._settings = dict(settings or {})
        self._resume = resume
        self._loading: LoadingScreen | None = None
        self._leaving = False
        self._tick_timer: Timer | None = None
        for theme in THEMES.values():
            self.register_theme(theme)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """What every line goes through before it is drawn."""
        return [*super().get_line_filters(), _NO_CONTROLS]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our own colour names, for the moments when another theme is on."""
        return DARK.variables

    @property
    def _preferences_path(self) -> Path:
        return self.store.folder.parent / "preferences.json"

    def on_mount(self) -> None:
        """Begin to load, and show that."""
        self._show_theme()
        self._loading = LoadingScreen(self._model_name)
        self.push_screen(self._loading)
        self.model_thread.start()
        self._tick_timer = self.set_interval(_TICK_SECONDS, self._follow_loading)

    def on_chat_view_preferences_changed(self) -> None:
        """Follow the preferences, and keep them."""
        self._show_theme()
        self.preferences.write(self._preferences_path)

    def _show_theme(self) -> None:
        self.theme = THEMES["light" if self.preferences.light else "dark"].name

    async def _follow_loading(self) -> None:
        # Once the chat is there, the events are for it.
        if self._loading is None:
            return
        for event in self.model_thread.take_events():
            if isinstance(event, LoadingProgress):
                self._loading.show(event.what, event.fraction)
            elif isinstance(event, LoadFailed):
                self.load_error = event.error
                self.exit()
            elif isinstance(event, Loaded):
                typed, self._loading = self._loading.typed, None
                chat = ChatScreen(
                    self.model_thread,
                    event.runtime,
                    self.store,
                    self.preferences,
                    system=self._system,
                    settings=self._settings,
                    run_command=run_command,
                    typed=typed,
                )
                self._leaving = False
                await self.switch_screen(chat)
                if self._tick_timer is not None:
                    self._tick_timer.pause()
                if self._resume is not None:
                    await chat.resume(self._resume)
                return

    def on_loading_screen_cancel_wanted(self) -> None:
        """Stop loading; leave at once when asked twice."""
        if self._leaving:
            self.load_error = CancelledError("loading was cancelled")
            self.exit()
        self._leaving = True
        self.model_thread.cancel_load()

    async def action_quit(self) -> None:
        """Stop the reply, save, and leave. Asked twice, leave at once."""
        if self._loading is not None:
            self._loading.action_cancel()
            return
        if self._leaving:
            self.exit()
            return
        self._leaving = True
        self.run_worker(self._leave(), exclusive=True)

    async def _leave(self) -> None:
        chat = next((screen for screen in self.screen_stack if isinstance(screen, ChatScreen)), None)
        if chat is not None:
            await chat.finish(_PATIENCE_SECONDS)
        self.model_thread.close()
        deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
        while self.model_thread.alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self.exit()


def run_chat(
    load: Load,
    *,
    model_name: str = "",
    system: str | None = None,
    settings: Mapping[str, Setting] | None = None,
    resume: str | None = None,
    store: ChatStore | None = None,
    light: bool | None = None,
) -> None:
    """Run the chat until the person leaves.

    resume: the id or part of the title of a saved chat to open, or `last`.
    Raises what `load` raised, CancelledError when loading was cancelled.
    """
    app = ChatApp(
        load,
        model_name=model_name,
        system=system,
        settings=settings,
        resume=resume,
        store=store,
        light=light,
    )
    # The model thread needs the interpreter after every pass; by default it would wait up to 5 ms
    # for the screen to let go of it, longer than a small model's pass takes.
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        app.run()
    finally:
        sys.setswitchinterval(before)
        app.model_thread.close()
    if not app.model_thread.join(_PATIENCE_SECONDS):
        # The thread is inside a native call that does not return. Tearing the interpreter down
        # under it could crash; everything is saved, so leave without that.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    if app.load_error is not None:
        raise app.load_error
