"""The base class of the widgets that show a message, which can be selected with the keyboard."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from edgespec.tui.selection import ACTIONS

__all__ = ["MessageWidget"]


class MessageWidget(Widget, can_focus=True):
    """A message in the transcript. It is selected while it has the focus.

    Attributes:
        place: The message's place in the chat's `MessageTree`. None until the message is part of it.
    """

    # A click must not select a message, because the next letters that the user types would be its keys.
    FOCUS_ON_CLICK = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.select_message(-1)", show=False),
        Binding("down", "screen.select_message(1)", show=False),
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
        *(Binding(each.key, f"screen.message_key('{each.key}')", show=False) for each in ACTIONS),
    ]

    place: int | None = None
