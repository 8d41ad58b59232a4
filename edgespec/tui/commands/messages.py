"""Commands that act on the messages of the open chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgespec.chat.exporting import messages_as_markdown
from edgespec.errors import OptionError
from edgespec.tui.commands.results import Action, Command, Context, Copy, Generate, Nothing, Open, Result
from edgespec.tui.numbers import count
from edgespec.tui.open_chat import OpenChat, code_blocks
from edgespec.tui.tool_access import unanswered_calls

if TYPE_CHECKING:
    from edgespec.chat.tool_calls.calls import ToolCall
    from edgespec.tui.open_chat import RunningTurn

_SEND = "Send a message first"


def _regen(context: Context) -> Result:
    if context.chat.last_place("user") is None and not context.writing:
        return Nothing("There is no reply to regenerate yet", _SEND)
    return Generate(_regenerated, "/regen")


def _regenerated(chat: OpenChat) -> RunningTurn | None:
    place = chat.last_place("user")
    return None if place is None else chat.regenerate(place)


def _continue(context: Context) -> Result:
    """Finish the last reply. If this chat is empty, open the newest unfinished chat first."""
    if context.writing:
        return Nothing("The reply is not finished yet", "Wait until it ends")
    if context.chat.entries:
        return Generate(_continued, "/continue")
    unfinished = next((chat for chat in context.archive.list() if chat.unfinished), None)
    if unfinished is None:
        return Nothing("There is no unfinished reply to continue", "Type /load for the list of chats")
    return Open(unfinished), Generate(_continued, "/continue")


def _continued(chat: OpenChat) -> RunningTurn | Sequence[ToolCall] | None:
    if calls := unanswered_calls(chat):
        return calls
    place = chat.last_place("user", "tool", "assistant")
    return None if place is None else chat.continue_reply(place)


def _edit(_context: Context) -> Result:
    return Action("edit")


def _fork(context: Context) -> Result:
    chat = context.chat
    if chat.tree.tip is None:
        return Nothing("There is nothing to fork: the chat is empty", _SEND)
    fork = chat.forked(chat.tree.tip)
    return Open(fork, chat.fork_text(fork))


def _delete(context: Context) -> Result:
    if context.chat.last_place("user") is None and not context.writing:
        return Nothing("There is no message to delete", _SEND)
    return Action("delete")


def _undo(context: Context) -> Result:
    chat_deleted_at = max(context.archive.hidden.values(), default=0.0)
    messages_deleted_at = max(context.chat.deletion_times, default=0.0)
    if chat_deleted_at > messages_deleted_at:
        return Action("restore_chat")
    if not context.chat.tree.deleted and not context.writing:
        return Nothing("There is nothing to restore", "/undo restores messages that you deleted with /delete")
    return Action("undo")


def _copy(context: Context) -> Result:
    part, _, number = context.argument.lower().partition(" ")
    number, reply = number.strip(), context.chat.last_reply
    if part in ("chat", "all"):
        return Copy(messages_as_markdown(context.chat.messages_so_far), "chat")
    if part in ("", "reply", "last"):
        return Copy(reply.content.strip() if reply is not None else "", "last reply")
    if part not in ("code", "block"):
        raise OptionError(
            f"Unknown argument {context.argument!r} for /copy",
            "Type /copy for the last reply, /copy code for its last code block, or /copy chat for everything",
        )
    blocks = code_blocks(reply.content) if reply is not None else []
    if not number:
        return Action("copy_code", otherwise=lambda: _block(blocks, str(len(blocks))))
    return _block(blocks, number)


def _block(blocks: Sequence[str], number: str) -> Copy:
    """Return the code block with this number, counted from 1. Raises OptionError if there is none."""
    if not blocks:
        raise OptionError(
            "The last reply has no code block", "Type /copy to copy all of it", code="command_unavailable"
        )
    if not (number.isdecimal() and 1 <= int(number) <= len(blocks)):
        raise OptionError(
            f"There is no code block {number}. The last reply has {count(len(blocks), 'code block')}",
            "Type /copy code for the last one, or a number, such as /copy code 1",
            code="command_unavailable",
        )
    which = f"code block ({int(number)} of {len(blocks)})" if len(blocks) > 1 else "code block"
    return Copy(blocks[int(number) - 1].rstrip("\n"), which)


def _editor(context: Context) -> Result:
    if context.chat.last_reply is None:
        return Nothing("There is no reply to open yet", _SEND)
    return Action("read_reply")


COMMANDS = (
    Command(
        "regen", "", "generate another reply to your last message", _regen, ("regenerate", "retry", "again")
    ),
    Command(
        "continue",
        "",
        "finish an interrupted reply in this chat or the previous one",
        _continue,
        slow="reads",
    ),
    Command(
        "edit",
        "",
        "edit and resend your last message",
        _edit,
        instead="Type /delete, then send the edited message",
    ),
    Command("fork", "", "start a new chat with the messages of this one", _fork, ("branch",)),
    Command("delete", "", "delete your last message and the reply to it", _delete),
    Command(
        "undo",
        "",
        "restore the last deleted messages or chat",
        _undo,
        in_plain="restore the last deleted messages",
    ),
    Command(
        "copy",
        "[code [n]|chat]",
        "copy the last reply, a code block from it, or the whole chat",
        _copy,
        in_plain="print the last reply, a code block from it, or the whole chat",
    ),
    Command(
        "editor",
        "",
        "open the last reply in your text editor",
        _editor,
        ("view",),
        instead="Type /copy to print the last reply",
    ),
)
