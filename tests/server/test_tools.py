"""OpenAI's own client lets the demo model call tools, whose form a grammar enforces."""

from __future__ import annotations

import json
import re
from typing import Any

import openai

from tests.server.conftest import MESSAGES

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "list_files",
            "description": "List the files in a folder",
            "parameters": {
                "type": "object",
                "properties": {"folder": {"enum": ["home", "root"]}, "hidden": {"type": "boolean"}},
                "required": ["folder", "hidden"],
                "additionalProperties": False,
            },
        },
    }
]
OPTIONS: Any = {"model": "demo", "max_tokens": 120, "temperature": 0, "tools": TOOLS}
# A reply with a call between texts. The prompt contains it, so that drafts reach from one part into the next.
CALL = '<tool_call>\n{"name": "list_files", "arguments": {"folder": "home"}}\n</tool_call>'
CALL_IN_TEXT = f"I look.\n{CALL}\nThen I sort."
QUOTING: Any = {"role": "user", "content": f"Repeat: {CALL_IN_TEXT}"}
DRAFTED: Any = {"regex": re.escape(CALL_IN_TEXT), "method": "ngram", "draft_length": 12}


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments["folder"] in ("home", "root")
    assert isinstance(arguments["hidden"], bool)


def test_a_required_call(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **OPTIONS)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "list_files"
    check_arguments(call.function.arguments)
    answered: Any = [
        *MESSAGES,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "notes.txt"},
    ]
    final = client.chat.completions.create(messages=answered, tool_choice="none", **OPTIONS)
    assert final.choices[0].message.content
    assert not final.choices[0].message.tool_calls


def test_a_streamed_call_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **OPTIONS)
    name, arguments, reasons = "", "", []
    for chunk in client.chat.completions.create(
        messages=MESSAGES, tool_choice="required", stream=True, **OPTIONS
    ):
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for delta in choice.delta.tool_calls or ():
                assert delta.index == 0
                assert delta.function is not None
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
    assert whole.choices[0].message.tool_calls
    (call,) = whole.choices[0].message.tool_calls
    assert call.type == "function"
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert reasons[-1] == "tool_calls"
