"""The tables in docs/chats.md list the same keys and commands as the help page of the chat."""

from __future__ import annotations

from edgespec.tui.chat_screen import ChatScreen
from edgespec.tui.screens.help import CHAT_LIST_PART, MESSAGE_PART, MODEL_LIST_PART, sections
from tests.docs import check_block


def _table(heading: str, pairs: list[tuple[str, str]]) -> str:
    cells = [(left.replace("|", "\\|"), right) for left, right in pairs]
    mark = "`" if heading == "Commands" else ""
    rows = [f"| {mark}{left}{mark} | {right} |" for left, right in cells]
    return "\n".join([f"| {heading.lower()} | effect |", "|---|---|", *rows])


def test_the_documentation_lists_all_keys_and_commands() -> None:
    """To write the page, run this test with WRITE_DOCS=1."""
    tables = {heading: _table(heading, pairs) for heading, pairs in sections(ChatScreen.BINDINGS)}
    for heading, block in (
        (CHAT_LIST_PART, "chat-list-keys"),
        (MODEL_LIST_PART, "model-list-keys"),
        (MESSAGE_PART, "message-keys"),
    ):
        check_block("chats.md", block, f"\n{tables.pop(heading)}\n\n")
    check_block("chats.md", "keys", "\n" + "\n\n".join(tables.values()) + "\n\n")
