"""Divide the messages of a chat into pages that fill the view, and create the widgets of a page."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Size

from edgespec.chat.saved_chat import MessageTree
from edgespec.tui.open_chat import ChatEntry, version_label
from edgespec.tui.tool_access import saved_result
from edgespec.tui.widgets.long_texts import drawing_seconds
from edgespec.tui.widgets.message_widget import MessageWidget
from edgespec.tui.widgets.messages import ReplyMessage, SystemMessage, UserMessage
from edgespec.tui.widgets.tool_call import ToolCallMessage

__all__ = ["PAGE_MESSAGES", "message_widgets", "page_end"]

PAGE_MESSAGES = 40
"""Maximum number of messages that are added at once. Each message takes several milliseconds."""

# Maximum time in seconds to spend on drawing the messages that are added at once.
_PAGE_SECONDS = 1.0
# Rows of a message besides those of its text: the space above it and its padding. Chosen low, because a page
# with too many messages is better than one that does not fill the view.
_OTHER_ROWS = 1


def page_end(
    entries: Sequence[ChatEntry], start: int, step: int, view: Size, most: int = PAGE_MESSAGES
) -> int:
    """Return the index at which a page ends. It contains as many messages as fill the view.

    Args:
        entries: The messages of the current branch.
        start: The index at which the page starts.
        step: 1 for a page of messages from `start` on, -1 for one of messages before `start`.
        view: Width and height of the view in cells.
        most: Maximum number of messages in the page.
    """
    place, seconds, rows = start, 0.0, 0
    width = max(1, view.width)
    while 0 <= (following := place + step) <= len(entries) and abs(place - start) < most:
        content = entries[min(place, following)].content
        seconds += drawing_seconds(content)
        if place != start and (seconds > _PAGE_SECONDS or rows >= view.height):
            break
        rows += _OTHER_ROWS + sum(
            1 + len(line) // (2 * width) for line in content.splitlines() if line.strip()
        )
        place = following
    return place


def message_widgets(
    tree: MessageTree[ChatEntry], start: int, end: int, *, origin: bool
) -> list[MessageWidget]:
    """Create the widgets for messages `start` (inclusive) to `end` (exclusive) of the current branch.

    Args:
        tree: The messages of the chat.
        start: The index of the first message in the branch.
        end: The index after the last message.
        origin: Whether replies are coloured by the origin of their tokens.
    """
    return [_widget(tree, place, origin) for place in tree.path[start:end]]


def _widget(tree: MessageTree[ChatEntry], place: int, origin: bool) -> MessageWidget:
    entry, versions = tree.messages[place], version_label(tree, place)
    widget: MessageWidget
    if entry.role == "user":
        widget = UserMessage(entry.content, entry.message.files, versions)
    elif entry.role == "tool":
        calls = (call for each in tree.path for call in tree.messages[each].message.tool_calls)
        call = next((call for call in calls if call.id == entry.message.tool_call_id), None)
        widget = ToolCallMessage(call, saved_result(entry.content))
    elif entry.role == "system":
        widget = SystemMessage(entry.content)
    else:
        widget = ReplyMessage(
            entry.content,
            reasoning=entry.reasoning,
            thought_seconds=entry.thought_seconds,
            chunks=entry.chunks,
            reply=entry.reply,
            calls_tools=bool(entry.message.tool_calls),
            origin=origin,
            versions=versions,
            ended_early=entry.message.ended_early,
        )
    widget.place = place
    return widget
