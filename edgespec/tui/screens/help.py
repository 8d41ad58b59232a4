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
from edgespec.tui.widgets.messages import MESSAGE_KEYS, Pairs

MOST_USED, OTHER_KEYS = Binding.Group("Most used"), Binding.Group("Other keys")
"""The sections of the help page that list key bindings. Bindings without a group are not listed."""

COMMANDS_PART, MESSAGE_PART = "Commands", "Keys for the selected message"
CHAT_LIST_PART, MODEL_LIST_PART = "Keys for the list of chats", "Keys for the list of models"
"""Headings at which the help page can open."""

_LABEL_WIDTH = 21
_MOST_USED = (
    ("Enter", "send"),
    ("Ctrl+J, Shift+Enter", "new line"),
    ("@", "attach a file, a folder, or all files that match a pattern"),
)
_OTHER_KEYS = (
    ("Up, Down", "go through the messages that you have sent"),
    ("Shift+Up, Shift+Tab", "select a message to edit, re-run, copy, delete or fork"),
    ("Tab", "complete a command or a path"),
    ("Ctrl+V", "attach the image in the clipboard"),
    ("Page Up, Page Down", "scroll the chat"),
    ("Ctrl+_, Ctrl+/", "undo typing or, in the list of chats, restore a deleted chat"),
    ("Ctrl+Z", "pause edgespec and return to the shell; type fg there to come back"),
)
_CHAT_LIST_KEYS = (
    ("Letters", "search the titles, messages and attached files"),
    ("Enter", "open the chat"),
    ("Ctrl+R", "rename it"),
    ("Ctrl+P", "pin it to the top of the list, or unpin it"),
    ("Del", "delete it"),
    ("Ctrl+_, Ctrl+/", "restore the chat that you deleted last, within a minute"),
)
_MODEL_LIST_KEYS = (
    ("Letters", "filter the list, and search on Hugging Face"),
    ("Enter", "switch to the model or download it, or stop its download"),
    ("Ctrl+D", "make this model the default for new chats, or undo that"),
    ("Ctrl+S", "measure this machine to see how fast each model would be"),
)
_SELECTION_KEYS = (
    *((each.key.title() if len(each.key) > 1 else each.key, each.help) for each in MESSAGE_KEYS),
    ("Enter", "expand or collapse its reasoning or a tool call"),
    ("Esc", "return to the input"),
)


def sections(bindings: Sequence[BindingType]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of the help page, each with a heading and descriptions of keys or commands.

    Args:
        bindings: The key bindings of the chat screen.
    """
    commands = [(each.usage, each.help) for each in table.COMMANDS]
    return [
        ("Most used", [*_MOST_USED, *_described(bindings, MOST_USED)]),
        (COMMANDS_PART, commands),
        ("Other keys", [*_OTHER_KEYS, *_described(bindings, OTHER_KEYS)]),
        (CHAT_LIST_PART, [*_CHAT_LIST_KEYS]),
        (MODEL_LIST_PART, [*_MODEL_LIST_KEYS]),
        (MESSAGE_PART, [*_SELECTION_KEYS]),
    ]


class HelpScreen(ModalScreen[None]):
    """Help screen with the most used keys, the slash commands and all other keys. Esc closes it.

    Args:
        bindings: The key bindings of the chat screen.
        part: The heading of the part to show first. Empty for the top.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c,f1,q,question_mark,enter", "dismiss", "Close", show=False),
    ]

    def __init__(self, bindings: Sequence[BindingType], part: str = "") -> None:
        super().__init__()
        self._bindings_of_chat = bindings
        self._part = part

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
        if self._part:
            self.call_after_refresh(self._show_part)

    def _show_part(self, tries: int = 20) -> None:
        """Scroll to the part once it has been laid out."""
        parts = [each for each in self.query(".help-heading").results(Static) if self._part == each.content]
        if parts and parts[0].size:
            parts[0].scroll_visible(top=True, animate=False)
        elif tries:
            self.call_after_refresh(self._show_part, tries - 1)


def _described(bindings: Sequence[BindingType], group: Binding.Group) -> list[tuple[str, str]]:
    """Return the names and descriptions of the keys in a group."""
    keys = [key for key in bindings if isinstance(key, Binding) and key.group is group]
    return [(key.key.title().replace("Escape", "Esc").replace(",", ", "), key.description) for key in keys]


def _section(heading: str, pairs: Sequence[tuple[str, str]]) -> ComposeResult:
    yield Static(heading, classes="help-heading")
    padded = [(label.ljust(_LABEL_WIDTH), text) for label, text in pairs]
    yield Pairs(padded, label_style="$primary", stack_below=26)
