"""Prompts for `verify` and `bench`: the built-in ones or a JSONL file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.api.runtime import Runtime
from edgespec.chat.message import Message
from edgespec.chat.prompt import PromptBuilder
from edgespec.chat.tokenizing import tokenize_whole
from edgespec.errors import OptionError, shorten
from edgespec.store.catalogue import models_folder
from edgespec.system.files import error_reason, format_bytes

__all__ = ["Prompt", "prompt_tokens", "read_prompts"]

# Maximum size of a prompt file in bytes. Bounds memory use when reading a device or pipe that never ends.
_MAX_BYTES = 1 << 28
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for `verify` and `bench`.

    Attributes:
        name: Name of the prompt in reports.
        messages: The chat, ending with a user message.
        category: The kind of text, such as `code`.
        schema: The JSON schema that the reply must satisfy, as JSON text, or None.
    """

    name: str
    messages: tuple[Message, ...]
    category: str = "other"
    schema: str | None = None


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Read prompts from a JSONL file.

    Each line is an object with `prompt` (a string) or `messages`, and optionally `id`, `category` (or
    `skill`) and `schema` (an object). The default category is the part of the id before the last dash.

    Args:
        path: The file. None reads the built-in prompts.

    Raises:
        OptionError: The file cannot be read or contains no prompts, or a line is invalid.
    """
    file = Path(path) if path is not None else models_folder() / "eval_prompts.jsonl"
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error_reason(error)
        raise OptionError(
            f"cannot read prompts from {file}: {reason}", "check the path", code="file_not_read"
        ) from error
    if len(data) > _MAX_BYTES:
        raise OptionError(
            f"{file} has more than {format_bytes(_MAX_BYTES)} of prompts",
            "use fewer prompts",
            code="input_too_large",
        )
    prompts = [_prompt(line, at, file) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise OptionError(f"{file} contains no prompts", 'write one per line, such as {"prompt": "Hello"}')
    return prompts


def _prompt(line: str, number: int, file: Path) -> Prompt:
    try:
        entry: Any = json.loads(line)
        messages = _messages(entry)
        schema = _schema(entry)
    except (ValueError, RecursionError) as error:
        is_json = not isinstance(error, json.JSONDecodeError | RecursionError)
        reason = shorten(error) if is_json else "the line is not JSON"
        raise OptionError(
            f"line {number} of {file} is not a valid prompt: {reason}",
            'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        ) from error
    name = str(entry.get("id", f"line {number}"))
    category = entry.get("category") or entry.get("skill") or name.rpartition("-")[0] or "other"
    return Prompt(name, messages, str(category), schema)


def _messages(entry: Any) -> tuple[Message, ...]:
    if not isinstance(entry, dict) or not entry.keys() & {"prompt", "messages"}:
        raise ValueError("the line has neither a prompt nor messages")
    items = entry.get("messages", [{"role": "user", "content": entry.get("prompt")}])
    is_list = isinstance(items, list) and all(isinstance(item, dict) for item in items)
    if not is_list or not all(isinstance(item.get("content"), str) for item in items):
        raise ValueError("the prompt or the content of a message is not a string")
    broken = [item for item in items if item.get("role") not in _ROLES or not item["content"].strip()]
    if broken or not items or items[-1]["role"] != "user":
        raise ValueError("the last message must have the role user, and no message may be empty")
    return tuple(Message(item["role"], item["content"]) for item in items)


def _schema(entry: dict[str, Any]) -> str | None:
    schema = entry.get("schema")
    if not isinstance(schema, dict | None):
        raise ValueError("the schema is not an object")
    return json.dumps(schema) if schema is not None else None


def prompt_tokens(runtime: Runtime, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt. Without a chat template, its messages are joined by newlines."""
    if runtime.template is None:
        text = "\n".join(message.content for message in prompt.messages)
        return tokenize_whole(runtime.vocabulary, text)
    return PromptBuilder(runtime.template, runtime.vocabulary).build(prompt.messages).tokens
