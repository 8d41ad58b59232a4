"""Export chats as Markdown, JSON and HTML files."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from markdown_it import MarkdownIt

from edgespec.chat.message import Message, with_system
from edgespec.chat.saved_chat import SavedChat, title_of
from edgespec.errors import OptionError
from edgespec.system.files import error_reason

__all__ = ["FORMATS", "as_html", "as_json", "as_markdown", "messages_as_markdown", "write_export"]

_NAMES = {"user": "You", "assistant": "Model", "system": "System", "tool": "Tool"}
# Content security policy that blocks remote images in replies, because loading them would reveal to other
# servers that the page was opened.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
    ":root{color-scheme:light dark}"
    "section{border-top:1px solid #8886;padding-top:1rem}h2{font-size:1rem;opacity:.7}"
    "pre{background:#8882;padding:.75rem;overflow-x:auto}.user{white-space:pre-wrap}"
)


def messages_as_markdown(messages: Sequence[Message], *, reasoning: bool = False) -> str:
    """Format messages as Markdown, each preceded by its author's name.

    Args:
        messages: The messages. Attached files are included only by name.
        reasoning: Whether to include the model's reasoning, as block quotes.
    """
    return "\n\n".join(_message_as_markdown(message, reasoning) for message in messages)


def _message_as_markdown(message: Message, reasoning: bool) -> str:
    parts = [f"**{_NAMES[message.role]}:**"]
    if message.files:
        parts.append(_attached([_code(file.name) for file in message.files]))
    if reasoning and message.reasoning:
        lines = ("**Reasoning:**", "", *message.reasoning.strip().splitlines())
        parts.append("\n".join(f"> {line}".rstrip() for line in lines))
    parts.append(message.content.strip())
    parts += [_called(_code(call.name), _code(call.arguments)) for call in message.tool_calls]
    return "\n\n".join(filter(None, parts))


def as_markdown(chat: SavedChat) -> str:
    """Format the messages on a chat's current branch as Markdown, including the model's reasoning."""
    messages = with_system(chat.system, chat.messages)
    return f"# {_title(chat)}\n\n{messages_as_markdown(messages, reasoning=True)}\n"


def as_html(chat: SavedChat) -> str:
    """Format the messages on a chat's current branch as a self-contained HTML page.

    The model's reasoning is collapsed.
    """
    # With `html` off, tags in a reply are shown as text, so the page cannot run scripts written by a model.
    markdown = MarkdownIt("gfm-like", {"html": False, "linkify": False})
    sections = "".join(
        f"<section><h2>{_NAMES[message.role]}</h2>{_message_as_html(message, markdown)}</section>\n"
        for message in with_system(chat.system, chat.messages)
    )
    title = html.escape(_title(chat))
    return (
        f'<!doctype html>\n<html><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n{sections}</body></html>\n"
    )


def _message_as_html(message: Message, markdown: MarkdownIt) -> str:
    page = ""
    if message.files:
        page += f"<p>{_attached([f'<code>{html.escape(file.name)}</code>' for file in message.files])}</p>"
    if message.reasoning:
        page += f"<details><summary>Reasoning</summary>{markdown.render(message.reasoning)}</details>"
    content = html.escape(message.content) if message.role == "user" else markdown.render(message.content)
    page += f'<div class="{message.role}">{content}</div>'
    for call in message.tool_calls:
        name, arguments = (f"<code>{html.escape(text)}</code>" for text in (call.name, call.arguments))
        page += f"<p>{_called(name, arguments)}</p>"
    return page


def _attached(names: list[str]) -> str:
    return f"Attached files: {', '.join(names)}"


def _called(name: str, arguments: str) -> str:
    return f"Called {name} with {arguments}"


def _code(text: str) -> str:
    """Return `text` as Markdown inline code, on a single line."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"


def as_json(chat: SavedChat) -> str:
    """Return a chat, including all versions of its messages, as JSON that edgespec can import."""
    return json.dumps(chat.to_json(), ensure_ascii=False, indent=1) + "\n"


FORMATS: dict[str, Callable[[SavedChat], str]] = {".md": as_markdown, ".json": as_json, ".html": as_html}
"""Export functions, keyed by file extension."""


def write_export(chat: SavedChat, file: str) -> Path:
    """Write a chat to a new file. The file extension selects the format.

    Args:
        chat: The chat.
        file: The path of the file. If empty, a Markdown file named after the chat is written to the current
            folder.

    Returns:
        The absolute path of the file.

    Raises:
        OptionError: The format is unknown, or the file exists or cannot be written.
    """
    name = re.sub(r"[^\w -]", "", _title(chat)).strip() or "chat"
    path = Path(os.path.expanduser(file or f"{name}.md"))
    export = FORMATS.get(path.suffix.lower())
    if export is None:
        raise OptionError(
            f"cannot tell from the name {path.name!r} which format to export to",
            f"use a file name that ends in {' or '.join(FORMATS)}, such as chat.md",
        )
    data = export(chat).encode("utf-8", "replace")
    is_created = False
    try:
        with path.open("xb") as opened:
            is_created = True
            opened.write(data)
    except FileExistsError:
        raise OptionError(
            f"the file {path} already exists", "choose another file name", code="output_exists"
        ) from None
    except (OSError, ValueError) as error:
        # If the name contains a NUL character, `open` raises ValueError and creates nothing.
        if is_created:
            with suppress(OSError):
                path.unlink()
        raise OptionError(
            f"cannot write {path}: {error_reason(error)}", "choose another file", code="file_not_written"
        ) from None
    return path.resolve()


def _title(chat: SavedChat) -> str:
    return chat.title or title_of(chat.messages)
