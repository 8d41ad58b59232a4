"""The help page: keys and slash commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edgespec.tui.commands import COMMANDS
from edgespec.tui.widgets.pairs import Pairs

__all__ = ["KEYS", "HelpScreen"]

_LABEL_WIDTH = 21

KEYS = (
    (
        "Writing",
        (
            ("Enter", "send"),
            ("Ctrl+J, Shift+Enter", "new line"),
            ("Up, Down", "messages you sent before"),
            ("Tab", "complete a command"),
        ),
    ),
    (
        "Replies",
        (
            ("Esc", "stop the reply, or stop editing"),
            ("Ctrl+R", "generate the last reply again"),
            ("Ctrl+P", "edit your last message"),
            ("Ctrl+Y", "copy the last reply"),
            ("Ctrl+O", "copy its last code block"),
            ("Page Up, Page Down", "scroll; Ctrl+End goes to the end"),
        ),
    ),
    (
        "Chats",
        (
            ("Ctrl+N", "new chat"),
            ("Ctrl+L", "new chat with the same settings"),
            ("F2, Ctrl+B", "list of saved chats"),
            ("F5", "system prompt"),
            ("F6, Ctrl+S", "settings"),
        ),
    ),
    (
        "View",
        (
            ("F3", "details: speed, guesses, time, memory"),
            ("F4, Ctrl+T", "colour the words that were guessed right"),
            ("F8", "switch between light and dark"),
            ("F1, ?", "this page"),
            ("Ctrl+C", "copy the selection or stop; twice quits"),
            ("Ctrl+Q", "quit; the chat is saved"),
        ),
    ),
)


class HelpScreen(ModalScreen[None]):
    """Help screen that lists keys and slash commands. Esc closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,question_mark,enter", "dismiss", "Close", show=False),
    ]

    def compose(self) -> ComposeResult:
        """Create the help page."""
        with VerticalScroll(classes="dialog -large") as dialog:
            dialog.border_title = "Keys and commands"
            dialog.border_subtitle = "Esc closes"
            for heading, keys in KEYS:
                yield Static(Content(heading), classes="help-heading")
                yield _rows(keys)
            yield Static("Commands", classes="help-heading")
            yield _rows(
                [(f"/{command.name} {command.arguments}".rstrip(), command.help) for command in COMMANDS]
            )
            yield Static(
                "A blank in front sends a text that begins with a slash as a message.", classes="help-end"
            )

    def on_mount(self) -> None:
        """Focus the page so that the arrow keys scroll it."""
        self.query_one(VerticalScroll).focus()


def _rows(pairs: Sequence[tuple[str, str]]) -> Pairs:
    # All groups use the same label width, so that their columns line up.
    padded = [(label.ljust(_LABEL_WIDTH), text) for label, text in pairs]
    return Pairs(padded, label_style="$primary", stack_below=26)
