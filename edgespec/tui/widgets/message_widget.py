"""The base class of the widgets that show a message, and the keys for the selected message."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Collapsible

__all__ = ["MESSAGE_KEYS", "MessageKey", "MessageWidget", "message_key_hint"]


class MessageKey(NamedTuple):
    """A key for the selected message. The screen runs its action.

    Attributes:
        key: Textual's name of the key.
        action: The name of what the key does.
        label: The key and the action in the hint line. Empty if the hint line does not show them.
        help: Description on the help page.
    """

    key: str
    action: str
    label: str
    help: str


MESSAGE_KEYS = (
    MessageKey("e", "edit", "e edit", "edit it; Enter saves a new version"),
    MessageKey("r", "rerun", "r re-run", "generate another reply"),
    MessageKey("g", "go_on", "g go on", "continue the reply from where it stopped"),
    MessageKey("c", "copy", "c copy", "copy it"),
    MessageKey("d", "delete", "d delete", "delete it and the messages after it"),
    MessageKey("f", "fork", "f fork", "start a new chat with the messages up to this one"),
    MessageKey("b", "copy_code", "b copy code", "copy its last code block; press again for the one before"),
    MessageKey("o", "open_in_editor", "o open in editor", "read it in your text editor"),
    MessageKey("u", "undo", "", "restore the messages that were deleted last"),
    MessageKey("left", "older_version", "", "show the previous version"),
    MessageKey("right", "newer_version", "", "show the next version"),
)
"""The keys for the selected message, in the order of the help page."""


def message_key_hint(width: int, *, versions: bool, fold: str) -> str:
    """Return the hint line for a selected message: as many keys as fit. F1 lists the others.

    Args:
        width: Maximum width of the hint in cells.
        versions: Whether the message has other versions.
        fold: What Enter does. Empty if the message contains neither reasoning nor a tool call.
    """
    first = [*(["←→ version"] if versions else []), *([fold] if fold else [])]
    keys = [*first, *(each.label for each in MESSAGE_KEYS if each.label)]
    for number in range(len(keys), 0, -1):
        more = ["F1 more"] if number < len(keys) else []
        text = " · ".join((*keys[:number], *more, "Esc back"))
        if len(text) <= width:
            return text
    return "Esc back"


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
        *(Binding(each.key, f"screen.message_action('{each.action}')", show=False) for each in MESSAGE_KEYS),
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
