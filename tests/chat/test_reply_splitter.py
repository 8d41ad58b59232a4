"""Replies with reasoning and tool calls."""

from __future__ import annotations

import pytest

from edgespec.chat.reply_text import ReplySplitter, split_reply
from edgespec.chat.tool_calls.calls import ToolCall, collect_calls
from edgespec.chat.tool_calls.formats import call_form
from edgespec.chat.tool_calls.parser import CallSyntax
from tests.chat.tool_calls.replies import FAMILIES


def syntax(family: str) -> CallSyntax:
    return CallSyntax(call_form(FAMILIES[family].template), {}, "call_")


HERMES = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>Hm<|start|>assistant"
MESSAGE = '<|message|>{"a": 1}'
CALLS = (ToolCall("call_0", "f", '{"a": 1}'),)


@pytest.mark.parametrize(
    ("family", "start", "reply", "reasoning", "answer"),
    [
        (
            "qwen3",
            "",
            f"<think>\nHm <tool_call> x\n</think>\n\n{HERMES}",
            "Hm <tool_call> x",
            "",
        ),
        (
            "qwen3",
            "<think>\n",
            f"Hm\n</think>\n\nYes.\n{HERMES}",
            "Hm",
            "Yes.",
        ),
        (
            "gpt-oss",
            "",
            f"{ANALYSIS}<|channel|>commentary to=functions.f <|constrain|>json{MESSAGE}",
            "Hm",
            "",
        ),
        (
            "gpt-oss",
            "",
            f"{ANALYSIS} to=functions.f<|channel|>commentary json{MESSAGE}",
            "Hm",
            "",
        ),
    ],
)
def test_reasoning_before_calls(family: str, start: str, reply: str, reasoning: str, answer: str) -> None:
    assert split_reply(reply, start, syntax(family)) == (reasoning, answer, CALLS)
    splitter = ReplySplitter(start, syntax(family))
    parts = [*map(splitter.feed, reply), splitter.finish()]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.answer for part in parts) == answer
    assert collect_calls(delta for part in parts for delta in part.calls) == CALLS


def test_the_final_channel_of_gpt_oss_still_ends_its_reasoning() -> None:
    reply = f"{ANALYSIS}<|channel|>final<|message|>Yes."
    assert split_reply(reply, "", syntax("gpt-oss")) == ("Hm", "Yes.", ())


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<thi", "", ""),
        ("<think>Hm.\n</thi", "Hm.", ""),
        ("<think>a <", "a <", ""),
        ("<think>Hm.</think>Yes </thi", "Hm.", "Yes </thi"),
        ("<", "", "<"),
    ],
)
def test_a_cut_reply_contains_no_part_of_a_marker(text: str, reasoning: str, answer: str) -> None:
    splitter = ReplySplitter()
    parts = [*map(splitter.feed, text), splitter.finish(cut=True)]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.answer for part in parts) == answer
    assert split_reply(text, cut=True)[:2] == (reasoning, answer)
