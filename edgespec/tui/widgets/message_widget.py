"""The base class of the widgets that show a message. They can be selected with the keyboard."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Collapsible

from edgespec.tui.selection import ACTIONS

__all__ = ["MessageWidget"]


class MessageWidget(Widget, can_focus=True):
    """A message in the transcript. It is selected while it has focus.

    Attributes:
        place: The message's index in the chat's `MessageTree`. None until the message is part of it.
    """

    # A click must not select a message. Otherwise, letters typed afterwards would trigger message actions.
    FOCUS_ON_CLICK = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.select_message(-1)", show=False),
        Binding("down", "screen.select_message(1)", show=False),
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
        Binding("enter", "unfold", show=False),
        *(Binding(each.key, f"screen.message_key('{each.key}')", show=False) for each in ACTIONS),
    ]

    # By default, Textual lays out and draws all messages again when the size of one changes. Only widgets
    # that scroll need that.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0), repaint=False)

    place: int | None = None

    @property
    def fold_hint(self) -> str:
        """What Enter does with the message's reasoning or tool call. Empty if there is none."""
        folds = [fold for fold in self.query(Collapsible) if fold.display]
        if not folds:
            return ""
        return "Enter unfold" if folds[0].collapsed else "Enter fold"

    def action_unfold(self) -> None:
        """Unfold the message's reasoning or tool call, or fold it again."""
        for fold in self.query(Collapsible):
            fold.collapsed = not fold.collapsed
