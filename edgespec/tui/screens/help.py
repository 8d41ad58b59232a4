"""The help page: keys and slash commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.tui.commands import table
from edgespec.tui.widgets.message_widget import MESSAGE_KEYS
from edgespec.tui.widgets.pairs import Pairs

__all__ = ["MOST_USED", "OTHER_KEYS", "HelpScreen", "sections"]

MOST_USED, OTHER_KEYS = Binding.Group("Most used"), Binding.Group("Other keys")
"""The sections of the help page that list key bindings. A binding without a group is not listed."""

_LABEL_WIDTH = 21
_MOST_USED = (
    ("Enter", "send"),
    ("Ctrl+J, Shift+Enter", "new line"),
    ("@", "attach a file, a folder, or all files that match a pattern"),
)
_OTHER_KEYS = (
    ("Up, Down", "browse sent messages"),
    ("Shift+Up, Shift+Tab", "select a message to edit, re-run, copy, delete or fork"),
    ("Tab", "complete a command or a path"),
    ("Page Up, Page Down", "scroll the chat"),
)
_SELECTION_KEYS = (
    *((each.key.title() if len(each.key) > 1 else each.key, each.help) for each in MESSAGE_KEYS),
    ("Enter", "expand or collapse its reasoning or a tool call"),
    ("Esc", "return to the input"),
)


def sections(bindings: Sequence[BindingType]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of the help page: a heading, and keys or commands with their descriptions.

    Args:
        bindings: The key bindings of the chat screen.
    """
    commands = [(each.usage, each.help) for each in table.COMMANDS]
    return [
        ("Most used", [*_MOST_USED, *_described(bindings, MOST_USED)]),
        ("Commands", commands),
        ("Other keys", [*_OTHER_KEYS, *_described(bindings, OTHER_KEYS)]),
        ("Keys for the selected message", [*_SELECTION_KEYS]),
    ]


class HelpScreen(ModalScreen[None]):
    """Help screen with the most used keys, the slash commands and all other keys. Esc closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c,f1,q,question_mark,enter", "dismiss", "Close", show=False),
    ]

    def __init__(self, bindings: Sequence[BindingType]) -> None:
        super().__init__()
        self._bindings_of_chat = bindings

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -large") as dialog:
            dialog.border_title = "Keys and commands"
            dialog.border_subtitle = "Esc closes"
            for heading, pairs in sections(self._bindings_of_chat):
                yield from _section(heading, pairs)
            yield Static(
                "To send a message that begins with a slash, type a space before it.", classes="help-end"
            )

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def _described(bindings: Sequence[BindingType], group: Binding.Group) -> list[tuple[str, str]]:
    """Return the names and descriptions of the keys in a group."""
    keys = [key for key in bindings if isinstance(key, Binding) and key.group is group]
    return [(key.key.title().replace("Escape", "Esc").replace(",", ", "), key.description) for key in keys]


def _section(heading: str, pairs: Sequence[tuple[str, str]]) -> ComposeResult:
    yield Static(heading, classes="help-heading")
    padded = [(label.ljust(_LABEL_WIDTH), text) for label, text in pairs]
    yield Pairs(padded, label_style="$primary", stack_below=26)
