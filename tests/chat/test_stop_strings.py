"""Stop strings end a reply's answer, but neither its reasoning nor its tool calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from edgespec.chat.reasoning import REASONING_MARKERS
from edgespec.chat.reply_text import ReplySplitter, ReplyText, split_reply, stop_searches
from edgespec.chat.tool_calls.formats import HERMES
from edgespec.chat.tool_calls.parser import CallSyntax

TOOLS = CallSyntax(HERMES, {"now": {}}, "call_")
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "END"}}\n</tool_call>'


def cut(
    text: str,
    stop: Sequence[str],
    *,
    reply_start: str = "",
    syntax: CallSyntax | None = None,
    may_end: Callable[[str], bool] | None = None,
    size: int = 1,
) -> tuple[str, str]:
    """Return the text of a reply up to its stop string, and the stop string."""
    parts = [text[at : at + size].encode() for at in range(0, len(text), size)]
    searches = stop_searches(stop, lambda: ReplySplitter(reply_start, syntax), may_end)
    reply = ReplyText(parts.__getitem__, lambda _token: False, searches)
    for token in range(len(parts)):
        if reply.feed(token):
            break
    shown = "".join(each.text for each in reply.drain())
    shown += reply.finish().text
    # Nothing that was shown is taken back.
    assert shown == reply.text
    return reply.text, reply.stop_string


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("<think>\nThe END\n</think>\n\nYes END no", ["END"], "<think>\nThe END\n</think>\n\nYes "),
        ("<think>\nHm\n</think>\n\nYes", ["think"], "<think>\nHm\n</think>\n\nYes"),
        ("<think>\nHm", ["m", "H"], "<think>\nHm"),
        # A stop string does not begin in the reasoning, or in the space before the answer.
        ("<think>\nHm\n</think>\n\nYes", ["\n\nYes"], "<think>\nHm\n</think>\n\nYes"),
        ("<think>\nHm E</think>ND no", ["END"], "<think>\nHm E</think>ND no"),
        ("<think>\nHm</think>\n\nEND", ["END"], "<think>\nHm</think>\n\n"),
        # A marker in a stop string says that it is meant for the reasoning.
        ("<think>\nHm</think>\n\nYes", ["</think>"], "<think>\nHm"),
        ("<think>\nHm</think>\n\nYes", ["Y", "m</think>"], "<think>\nH"),
        ("<thin END", ["END"], "<thin "),
        ("<thin", ["<th"], ""),
        ("No <think> END", ["END"], "No <think> "),
    ],
)
def test_only_the_answer_is_searched(text: str, stop: list[str], expected: str, size: int) -> None:
    assert cut(text, stop, size=size)[0] == expected


@pytest.mark.parametrize("opening", [marker for marker, close in REASONING_MARKERS.items() if close])
def test_reasoning_that_the_prompt_opens_is_not_searched(opening: str) -> None:
    written = f"The END.{REASONING_MARKERS[opening]}"
    assert cut(f"{written}Yes END", ["END"], reply_start=opening) == (f"{written}Yes ", "END")
    assert cut("The END", ["END"], reply_start=f"{opening}Hm. ") == ("The END", "")


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Ask.\n{CALL}\nDone. END no", f"Ask.\n{CALL}\nDone. "),
        (f"{CALL}\n{CALL}", f"{CALL}\n{CALL}"),
        ("Ask. END" + CALL, "Ask. "),
        # Text that only looks like a call is part of the answer.
        ("Ask <tool_call> END now", "Ask <tool_call> "),
        ("Ask <tool_ END now", "Ask <tool_ "),
        (f"<think>\nEND\n</think>\n\n{CALL}", f"<think>\nEND\n</think>\n\n{CALL}"),
    ],
)
def test_tool_calls_are_not_searched(text: str, expected: str, size: int) -> None:
    assert cut(text, ["END"], syntax=TOOLS, size=size)[0] == expected


def test_the_result_does_not_depend_on_the_tokens() -> None:
    draw = random.Random(5)
    for _ in range(300):
        pieces = ["<think>", "</think>", "\n", " ", "a", "b", "<tool_call>", "</tool_call>", '{"', "<", CALL]
        text = "".join(draw.choices(pieces, k=12))
        stop = draw.choice([["a"], ["ab", "b"], ["\n"], ["< a", "a\n"], ["<"]])
        results = {cut(text, stop, syntax=TOOLS, size=size) for size in (1, 2, 5, 1000)}
        assert len(results) == 1, text
        found, ended_by = results.pop()
        assert text.startswith(found + ended_by)
        before = split_reply(found, "", TOOLS).answer
        assert ended_by or not any(each in before for each in stop), text


def test_a_constraint_decides_whether_the_answer_may_end() -> None:
    whole = {"one", "one two"}.__contains__
    assert cut("one two", ["e", " "], may_end=whole) == ("one", " ")
    assert cut("one two", ["e", "w"], may_end=whole) == ("one two", "")
    assert cut("<think>\ne\n</think>\n\none two", [" t", "e"], may_end=whole)[0].endswith("\n\none")
