"""Quirks of chat templates, and changes that adapt conversations to them.

Publishers write their own chat templates, which differ in the conversations that they accept. This module
handles all such differences:

- `CONTENT_FORMS`: the formats in which templates expect the text of a message. A probe finds out which one a
  template needs for each kind of message, because some templates omit the text without an error.
- `CHANGES`: changes to conversations that a template rejects, such as a system message for a template that
  has no system role.
- `SourceQuirks`: quirks that are visible in a template's source.

To support another difference, add an entry here and a case to `tests/chat/test_template_quirks.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import combinations, groupby, takewhile
from types import MappingProxyType
from typing import Any, TypeAlias

from edgespec.chat.message import Message
from edgespec.chat.tool_calls.calls import ToolCall, parse_object, read_arguments
from edgespec.chat.tool_calls.form import CallForm, ChoicePart, JsonPart, Part

__all__ = [
    "CONTENT_FORMS",
    "PROBES",
    "PROBE_TEXT",
    "SourceQuirks",
    "ToolSupport",
    "accepted_variants",
    "kinds_of",
]

CONTENT_FORMS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        # Most templates of text-only models expect a string.
        "text": lambda text: text,
        # The templates of multimodal models ignore text that is not in a list.
        "parts": lambda text: [{"type": "text", "text": text}],
    }
)
"""Message content formats, keyed by name. The first one that makes the text appear in the prompt is used."""

# A word that no template contains. A template may change its case, but nothing else.
PROBE_TEXT = "qzprobetextzq"

_INSTRUCTIONS = """\
# Tools

You may call one or more tools to help with the user's request. The tools are described by these JSON objects:
{tools}

To call a tool, write its name and its arguments like this:
{example}"""

_HELLO = Message("user", "Hello")
_CALL = ToolCall("probe0001", "probe", "{}")
PROBES: Mapping[str, Sequence[Message]] = MappingProxyType(
    {
        "user": [Message("user", PROBE_TEXT)],
        "system": [Message("system", PROBE_TEXT), _HELLO],
        "earlier system": [Message("system", PROBE_TEXT), Message("system", "Hello"), _HELLO],
        "later system": [_HELLO, Message("assistant", "Hello"), Message("system", PROBE_TEXT), _HELLO],
        "assistant": [_HELLO, Message("assistant", PROBE_TEXT), _HELLO],
        "tool-calling assistant": [
            _HELLO,
            Message("assistant", PROBE_TEXT, tool_calls=(_CALL,)),
            Message("tool", "Hello", tool_call_id=_CALL.id, name=_CALL.name),
        ],
        "tool": [
            _HELLO,
            Message("assistant", "", tool_calls=(_CALL,)),
            Message("tool", PROBE_TEXT, tool_call_id=_CALL.id, name=_CALL.name),
        ],
    }
)
"""Maps each kind of message to a conversation in which a message of that kind has the text `PROBE_TEXT`."""


def kinds_of(messages: Sequence[Message]) -> list[str]:
    """Return the kind of each message: a key of `PROBES`."""
    systems = sum(message.role == "system" for message in messages)
    first_system = "earlier system" if systems > 1 else "system"
    kinds: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "system":
            kinds.append("later system" if place else first_system)
        else:
            calls = bool(message.tool_calls and message.content)
            kinds.append("tool-calling assistant" if calls else message.role)
    return kinds


class SourceQuirks:
    """Quirks of one template that can be recognised from its source."""

    def __init__(self, source: str) -> None:
        # Mistral's templates accept only nine-character tool call ids.
        self._has_short_ids = bool(re.search(r"length\s*!=\s*9", source))
        # DeepSeek R1's templates treat a message without content as a tool call.
        self._has_null_content = bool(re.search(r"content['\"]\]\s+is none", source))
        # Most templates that show earlier reasoning read `reasoning_content`. Solar's read `reasoning`, and
        # those of gpt-oss and LFM2.5 read `thinking`.
        read = (key for key in _REASONING_KEYS if re.search(rf"(?:\.|\[['\"]|get\(['\"]){key}\b", source))
        self._reasoning_key = next(read, _REASONING_KEYS[0])
        # Ministral 3's templates read the reasoning from a part of the content.
        self._has_thinking_parts = bool(re.search(r"\[THINK\]'\s*\+\s*\w+\['thinking'\]", source))
        # gpt-oss's template refuses reasoning next to the text of a message that calls tools.
        self._has_text_or_reasoning = "Cannot pass both content and thinking" in source

    def for_template(self, message: Message, form: str) -> dict[str, Any]:
        """Return a message as the template expects it, with its text in one of the `CONTENT_FORMS`."""
        if self._has_short_ids:
            message = _with_short_ids(message)
        content = CONTENT_FORMS[form](message.content)
        if self._has_null_content and message.tool_calls and not message.content:
            content = None
        if self._has_thinking_parts and message.reasoning:
            text = CONTENT_FORMS["parts"](message.content) if message.content else []
            content = [{"type": "thinking", "thinking": message.reasoning}, *text]
        optional = {
            "reasoning_content": message.reasoning,
            "tool_calls": [call.for_template() for call in message.tool_calls],
            "tool_call_id": message.tool_call_id,
            "name": message.name,
        }
        # Templates tell a missing field from an empty one.
        given = {key: value for key, value in optional.items() if value}
        fields = {"role": message.role, "content": content, **given}
        if message.reasoning and not (self._has_text_or_reasoning and message.tool_calls and message.content):
            fields[self._reasoning_key] = message.reasoning
        return fields


# The fields of a message in which templates look for its reasoning. The first one that a template mentions is
# used.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


Change: TypeAlias = "Callable[[Sequence[Message], ToolSupport], Sequence[Message]]"
"""A function that rewrites messages for templates that reject them. Other messages are left unchanged."""


def accepted_variants(messages: Sequence[Message], tool_support: ToolSupport) -> Iterator[Sequence[Message]]:
    """Yield the messages, followed by variants that the template may accept instead.

    Variants with fewer changes come first. All variants depend only on the messages, so that successive
    prompts of a conversation share a prefix, which the prefix cache can reuse.
    """
    tried: list[list[Message]] = []
    for count in (0, 1, 2, len(CHANGES)):
        for changes in combinations(CHANGES, count):
            changed = list(messages)
            for change in changes:
                changed = list(change(changed, tool_support))
            if changed not in tried:
                tried.append(changed)
                yield changed


def _with_short_ids(message: Message) -> Message:
    """Return the message with its tool call ids shortened to nine characters."""
    return replace(
        message,
        tool_calls=tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls),
        tool_call_id=_short_id(message.tool_call_id) if message.role == "tool" else "",
    )


def _short_id(call_id: str) -> str:
    return call_id if len(call_id) == 9 else sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _with_valid_arguments(messages: Sequence[Message], _tool_support: ToolSupport) -> Sequence[Message]:
    """Wrap tool call arguments that are not valid JSON in an object, for templates that parse them."""

    def valid(call: ToolCall) -> ToolCall:
        if parse_object(call.arguments) is not None:
            return call
        return replace(call, arguments=json.dumps({"arguments": call.arguments}, ensure_ascii=False))

    return [
        replace(message, tool_calls=tuple(map(valid, message.tool_calls))) if message.tool_calls else message
        for message in messages
    ]


def _with_separate_calls(messages: Sequence[Message], _tool_support: ToolSupport) -> Sequence[Message]:
    """Split replies into their text and their tool calls, for templates that show only one of the two."""
    changed: list[Message] = []
    for message in messages:
        if message.tool_calls and message.content:
            changed.append(replace(message, tool_calls=()))
            message = replace(message, content="", reasoning="")
        changed.append(message)
    return changed


def _with_tools_as_text(messages: Sequence[Message], tool_support: ToolSupport) -> Sequence[Message]:
    """Render tool calls and their results as text, for templates that reject them or their order.

    Mistral's templates, for example, require one result per call.
    """
    return [tool_support.as_text(message) for message in messages]


def _without_later_system(messages: Sequence[Message], _tool_support: ToolSupport) -> Sequence[Message]:
    """Merge later system messages into user messages, for templates such as Qwen 3.5's.

    System messages at the start are joined. Each later one is merged into the user message before or after
    it, because many templates require alternating roles. Its text stays at the same position, so that the
    conversation's cached prefix remains valid.
    """
    if all(message.role != "system" for message in messages[1:]):
        return messages
    leading = list(takewhile(lambda message: message.role == "system", messages))
    system = "\n\n".join(message.content for message in leading)
    changed = [Message("system", system)] if leading else []
    follows_system = False
    for message in messages[len(leading) :]:
        is_system = message.role == "system"
        moved = replace(message, role="user") if is_system else message
        if changed and changed[-1].role == moved.role == "user" and (is_system or follows_system):
            moved = replace(moved, content=f"{changed.pop().content}\n\n{moved.content}")
        changed.append(moved)
        follows_system = is_system
    return changed


def _without_system(messages: Sequence[Message], _tool_support: ToolSupport) -> Sequence[Message]:
    """Merge the system prompt into the first user message, for templates without a system role (Gemma)."""
    if not messages or messages[0].role != "system":
        return messages
    system, others = messages[0], messages[1:]
    if not others or others[0].role != "user":
        return [replace(system, role="user"), *others]
    return [replace(others[0], content=f"{system.content}\n\n{others[0].content}"), *others[1:]]


def _with_user_first(messages: Sequence[Message], _tool_support: ToolSupport) -> Sequence[Message]:
    """Insert an empty user message before a reply that begins the conversation, such as a greeting."""
    first = 1 if messages and messages[0].role == "system" else 0
    if len(messages) == first or messages[first].role != "assistant":
        return messages
    return [*messages[:first], Message("user", ""), *messages[first:]]


def _without_empty_replies(messages: Sequence[Message], _tool_support: ToolSupport) -> Sequence[Message]:
    """Drop replies without text and tool calls, for templates such as Mistral's, which reject them."""
    return [
        message
        for message in messages
        if message.role != "assistant" or message.content or message.tool_calls
    ]


def _with_neighbours_merged(messages: Sequence[Message], _tool_support: ToolSupport) -> Sequence[Message]:
    """Merge consecutive messages with the same role, for templates that require alternating roles."""
    changed: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        neighbours = list(group)
        if role == "tool" or len(neighbours) == 1:
            changed += neighbours
            continue
        changed.append(
            replace(
                neighbours[0],
                content="\n\n".join(message.content for message in neighbours if message.content),
                reasoning="\n\n".join(message.reasoning for message in neighbours if message.reasoning),
                tool_calls=tuple(call for message in neighbours for call in message.tool_calls),
            )
        )
    return changed


# The changes, in the order in which they are applied. Merging comes last, because the other changes can leave
# messages of the same role next to each other.
CHANGES: tuple[Change, ...] = (
    _with_valid_arguments,
    _with_separate_calls,
    _with_tools_as_text,
    _without_later_system,
    _without_system,
    _with_user_first,
    _without_empty_replies,
    _with_neighbours_merged,
)


class ToolSupport:
    """Rewrites conversations for chat templates with partial or no tool support.

    Args:
        template: Source code of the template.
        form: The model's tool-call format.
    """

    def __init__(self, template: str, form: CallForm) -> None:
        self._form = form
        # Phi 4 mini's template reads `tools` only from a message, where no program puts them.
        self._shows_tools = bool(re.search(r"(?<![.'\"])\b(?:xml_)?tools\b", template))
        self._shows_calls = "tool_calls" in template
        # Llama 3's and gpt-oss's templates show only the first call of a message.
        self._shows_one_call = "tool_calls[0]" in template and not re.search(
            r"\bin \w+(?:\.|\[['\"])tool_calls\b", template
        )
        # LFM2.5's templates show all roles in the same way. Those of models without tools often do so, too.
        self._shows_results = self._shows_tools or bool(re.search(r"""['"]tool['"]""", template))

    def rewrite(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages, with anything that the template would omit written out as text."""
        if self._shows_one_call:
            messages = _with_one_call_each(messages)
        shown = {"assistant": self._shows_calls, "tool": self._shows_results}
        rewritten = [
            message if shown.get(message.role, True) else self.as_text(message) for message in messages
        ]
        if not tools or self._shows_tools:
            return rewritten
        instructions = _INSTRUCTIONS.format(
            tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
            example=self._spelled("NAME", '{"ARGUMENT": VALUE}'),
        )
        if rewritten[0].role == "system":
            first = rewritten.pop(0)
            instructions = f"{first.content}\n\n{instructions}"
        return [Message("system", instructions), *rewritten]

    def as_text(self, message: Message) -> Message:
        """Return the message with its tool calls or its tool result written as text."""
        if message.tool_calls:
            calls = [self._spelled(call.name, read_arguments(call.arguments)) for call in message.tool_calls]
            content = "\n".join(filter(None, [message.content, *calls]))
            return replace(message, content=content, tool_calls=())
        if message.role == "tool":
            return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        return message

    def _spelled(self, name: str, arguments: str) -> str:
        """Return a call as the model would write it."""
        values = parse_object(arguments) or {}
        constants = {key: {"const": value} for key, value in values.items()}
        parts = self._form.spell(name, {"properties": constants, "required": list(values)})
        return "".join(_written(part, arguments) for part in parts)


def _with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Split replies with several calls, so that each call is followed by its own result, if it has one."""
    changed: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if len(message.tool_calls) < 2:
            changed.append(message)
            continue
        results = list(takewhile(lambda each: each.role == "tool", messages[place:]))
        place += len(results)
        for number, call in enumerate(message.tool_calls):
            begin = message if number == 0 else Message("assistant", "")
            changed.append(replace(begin, tool_calls=(call,)))
            # Results without ids are in the order of the calls.
            own = next((each for each in results if each.tool_call_id == call.id), None)
            if own or (results and not results[0].tool_call_id):
                changed.append(own or results[0])
                results.remove(changed[-1])
        changed += results
    return changed


def _written(part: Part, arguments: str) -> str:
    """Return the text of a part of a call, all of whose arguments are constants."""
    if isinstance(part, JsonPart):
        # Some forms write all arguments as one JSON object.
        constant = "const" in part.schema
        return json.dumps(part.schema["const"], ensure_ascii=False) if constant else arguments
    return part.texts[0] if isinstance(part, ChoicePart) else str(part)
