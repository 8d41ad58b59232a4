"""The help page: keys and slash commands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
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
# Keys handled by the text input, which are not bindings of the chat screen.
_WRITING = (
    ("Enter", "send"),
    ("Ctrl+J, Shift+Enter", "new line"),
    ("Up, Down", "browse sent messages"),
    ("Tab", "complete a command"),
    ("Page Up, Page Down", "scroll the chat"),
)


class HelpScreen(ModalScreen[None]):
    """Help screen that lists the given key bindings and the slash commands. Esc closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,question_mark,enter", "dismiss", "Close", show=False),
    ]

    def __init__(self, keys: Sequence[Binding]) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -large") as dialog:
            dialog.border_title = "Keys and commands"
            dialog.border_subtitle = "Esc closes"
            yield from _section("Writing", _WRITING)
            for heading, keys in groupby(
                self._keys, key=lambda key: key.group.description if key.group else ""
            ):
                yield from _section(
                    heading,
                    [
                        (key.key.title().replace("Escape", "Esc").replace(",", ", "), key.description)
                        for key in keys
                    ],
                )
            commands = [(f"/{each.name} {each.arguments}".rstrip(), each.help) for each in COMMANDS]
            yield from _section("Commands", commands)
            yield Static(
                "To send a message that begins with a slash, type a space before it.", classes="help-end"
            )

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def _section(heading: str, pairs: Sequence[tuple[str, str]]) -> ComposeResult:
    yield Static(heading, classes="help-heading")
    # All sections use the same label width, so that the columns line up.
    padded = [(label.ljust(_LABEL_WIDTH), text) for label, text in pairs]
    yield Pairs(padded, label_style="$primary", stack_below=26)
