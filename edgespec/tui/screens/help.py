"""The help page: keys and slash commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.tui.commands import COMMANDS
from edgespec.tui.widgets.pairs import Pairs

__all__ = ["HelpScreen"]

_LABEL_WIDTH = 21
_MAIN = (
    ("Enter", "send"),
    ("Ctrl+J, Shift+Enter", "new line"),
    ("@", "attach a file, a folder or a pattern"),
)
_OTHER = (
    ("Up, Down", "browse sent messages"),
    ("Shift+Up, Shift+Tab", "select a message to edit, re-run, copy, delete or fork"),
    ("Tab", "complete a command or a path"),
    ("Page Up, Page Down", "scroll the chat"),
)


class HelpScreen(ModalScreen[None]):
    """Help screen with the most used keys, the slash commands and all other keys. Esc closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,question_mark,enter", "dismiss", "Close", show=False),
    ]

    def __init__(self, main: Sequence[Binding], other: Sequence[Binding]) -> None:
        super().__init__()
        self._main, self._other = main, other

    def compose(self) -> ComposeResult:
        commands = [(f"/{each.name} {each.arguments}".rstrip(), each.help) for each in COMMANDS]
        with VerticalScroll(classes="dialog -large") as dialog:
            dialog.border_title = "Keys and commands"
            dialog.border_subtitle = "Esc closes"
            yield from _section("Most used", [*_MAIN, *_described(self._main)])
            yield from _section("Commands", commands)
            yield from _section("Other keys", [*_OTHER, *_described(self._other)])
            yield Static(
                "To send a message that begins with a slash, type a space before it.", classes="help-end"
            )

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def _described(keys: Sequence[Binding]) -> list[tuple[str, str]]:
    """Return the names of the keys and what they do."""
    return [(key.key.title().replace("Escape", "Esc").replace(",", ", "), key.description) for key in keys]


def _section(heading: str, pairs: Sequence[tuple[str, str]]) -> ComposeResult:
    yield Static(heading, classes="help-heading")
    padded = [(label.ljust(_LABEL_WIDTH), text) for label, text in pairs]
    yield Pairs(padded, label_style="$primary", stack_below=26)
