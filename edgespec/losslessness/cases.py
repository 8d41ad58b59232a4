"""Enumerate the cases that `verify` compares, count their replies, and load prompts.

The prompts are built in or come from a JSONL file. `bench` uses them too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.api.runtime import Runtime
from edgespec.chat.message import Message
from edgespec.chat.prompt import PromptBuilder
from edgespec.chat.tokenizing import tokenize_whole
from edgespec.errors import OptionError, shorten
from edgespec.store.catalogue import models_folder
from edgespec.system.files import error_reason, format_bytes

__all__ = [
    "DEFAULT_SAMPLES",
    "Case",
    "Prompt",
    "all_cases",
    "check_at_once",
    "count_case_replies",
    "count_replies",
    "prompt_tokens",
    "read_prompts",
]

# Default number of replies per prompt, method, temperature and draft length in rejection mode.
DEFAULT_SAMPLES = 200
# Maximum size of a prompt file in bytes. Bounds memory use if the file is an endless device or pipe.
_MAX_BYTES = 1 << 28
_ROLES = ("system", "user", "assistant")


class Case(NamedTuple):
    method: str
    prompt: Prompt
    temperature: float
    draft_length: int

    def is_sampled(self, acceptance: str) -> bool:
        """Return whether `verify` compares the distribution of replies instead of their tokens."""
        return acceptance == "rejection" and self.temperature > 0


def all_cases(
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    temperatures: Sequence[float],
    draft_lengths: Sequence[int],
) -> list[Case]:
    """Return one case per prompt, temperature, method and draft length."""
    return [
        Case(method, prompt, temperature, draft_length)
        for prompt in prompts
        for temperature in temperatures
        for method in methods
        for draft_length in (draft_lengths if method != "none" else draft_lengths[:1])
    ]


def count_replies(
    prompts: Sequence[Prompt],
    *,
    methods: Sequence[str],
    temperatures: Sequence[float],
    draft_lengths: Sequence[int],
    acceptance: str = "invariant",
    samples: int = DEFAULT_SAMPLES,
) -> int:
    """Return the number of replies that `verify` generates with these arguments.

    Args:
        prompts: The prompts to reply to.
        methods: The methods to compare.
        temperatures: The sampling temperatures.
        draft_lengths: The draft lengths to compare.
        acceptance: The acceptance rule: `invariant` or `rejection`.
        samples: Number of replies per case in rejection mode, as for `verify`.
    """
    return sum(
        count_case_replies(all_cases(prompts, methods, temperatures, draft_lengths), acceptance, samples)
    )


def count_case_replies(cases: Sequence[Case], acceptance: str, samples: int) -> tuple[int, int]:
    """Return how many replies are compared token by token, and how many are sampled."""
    sampled = [case for case in cases if case.is_sampled(acceptance)]
    plain = {(case.prompt.name, case.temperature) for case in cases if not case.is_sampled(acceptance)}
    return len(plain) + len(cases) - len(sampled), samples * len(sampled)


def check_at_once(acceptance: str, cases: int) -> None:
    """Raise OptionError if `verify` cannot generate concurrent replies with these arguments.

    Args:
        acceptance: The acceptance rule.
        cases: The number of cases.
    """
    if acceptance != "invariant":
        raise OptionError(
            f"--acceptance {acceptance} cannot be combined with --parallel",
            "omit one of them, because concurrent replies are compared token by token",
            option="acceptance",
            code="option_conflict",
        )
    if cases < 2:
        raise OptionError(
            "--parallel has no effect, because there is only one reply",
            "use more prompts",
            code="option_without_effect",
        )


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
    """Load prompts from a JSONL file.

    Each line is an object with `prompt` (a string) or `messages`, and optionally `id`, `category` (or
    `skill`) and `schema` (an object). The default category is the part of the id before the last dash.

    Args:
        path: The file, or None for the built-in prompts.

    Raises:
        OptionError: The file cannot be read or contains no prompts, or a line is invalid.
    """
    file = Path(path) if path is not None else models_folder() / "eval_prompts.jsonl"
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = (
            "the file is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error_reason(error)
        )
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
        reason = shorten(error) if is_json else "the line is not valid JSON"
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
        raise ValueError("the last message must have the role `user`, and no message may be empty")
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
