"""Streaming text: whole characters, and stop strings that are held back until decided.

Stop strings end a reply's answer, but neither its reasoning nor its tool calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat.reasoning import REASONING_MARKERS
from edgespec.chat.reply_text import ReplySplitter, ReplyText, split_reply, stop_searches
from edgespec.chat.tool_calls.formats import HERMES
from edgespec.chat.tool_calls.parser import CallSyntax

END = -1
TOOLS = CallSyntax(HERMES, {"now": {}}, "call_")
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "END"}}\n</tool_call>'


def said(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[str, list[str], int]:
    """Feed pieces as tokens. Return the text, the text shown by each token, and the number of tokens fed."""
    text = ReplyText(lambda token: pieces[token], lambda token: token == END, stop_searches(stop, None))
    taken = 0
    for token in range(len(pieces)):
        taken += 1
        if text.feed(token):
            break
    released = text.drain()
    assert len(released) == taken
    shown = [each.text for each in released]
    released.append(text.finish())
    assert "".join(each.text for each in released) == text.text
    assert text.finish() == ("", 0, 0)
    # The tokens that belong to the text spell it.
    spelled = b"".join(pieces[: sum(each.tokens for each in released)])
    whole = spelled[: len(spelled) - sum(each.cut_bytes for each in released)]
    if b"\xff" not in whole:
        assert whole.decode("utf-8", "replace") == text.text
    if not text.stop_string:
        assert sum(each.tokens for each in released) == taken
    return text.text, shown, taken


class TestCharacters:
    def test_a_character_appears_with_its_last_byte(self) -> None:
        data = "a🙂é".encode()
        text, shown, _ = said([data[i : i + 1] for i in range(len(data))])
        assert text == "a🙂é"
        assert shown == ["a", "", "", "", "🙂", "", "é"]

    def test_an_unfinished_character_at_the_end_is_shown_as_unreadable(self) -> None:
        assert said([b"ab", "🙂".encode()[:2]])[0] == "ab\ufffd"

    def test_invalid_utf8_becomes_a_replacement_character(self) -> None:
        assert said([b"\xff", b"a", b"\xc3", b"b"])[0] == "\ufffda\ufffdb"

    @pytest.mark.long
    @given(st.text(max_size=40), st.data())
    def test_stop_string_is_found_however_tokens_split_it(self, whole: str, data: st.DataObject) -> None:
        encoded = whole.encode("utf-8", "replace")
        cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=10)))
        pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
        assert said(pieces)[0] == encoded.decode()


class TestStopStrings:
    @pytest.mark.parametrize(
        ("pieces", "stop", "text", "taken"),
        [
            (["ab", "STOP", "cd"], ["STOP"], "ab", 2),
            (["ab", "ST", "OP", "cd"], ["STOP"], "ab", 3),
            (["abS", "T", "O", "P cd", "e"], ["STOP"], "ab", 4),
            (["ab", "STO", "cd"], ["STOP"], "abSTOcd", 3),
            (["ab", "SSTOP"], ["STOP"], "abS", 2),
            (["SSS", "TOP"], ["STOP"], "SS", 2),
            (["abcd"], ["cd", "bc"], "a", 1),
            (["a", "\n", "\n", "b"], ["\n\n"], "a", 3),
            (["STOP"], ["STOP"], "", 1),
            (["ab"], ["abc"], "ab", 1),
            (["x", "aab", "y"], ["aaab", "ab"], "xa", 2),
        ],
    )
    def test_cases(self, pieces: list[str], stop: list[str], text: str, taken: int) -> None:
        got, _, count = said([piece.encode() for piece in pieces], stop)
        assert (got, count) == (text, taken)

    def test_the_stop_string_that_ended_the_reply_is_known(self) -> None:
        searches = stop_searches(["bc", "x"], None)
        text = ReplyText(lambda token: b"abc"[token : token + 1], lambda token: token == END, searches)
        assert [text.feed(token) for token in range(2)] == [False, False]
        assert text.stop_string == ""
        assert text.feed(2)
        assert text.stop_string == "bc"

    def test_possible_stop_string_is_held_back_and_then_released(self) -> None:
        assert said([b"a", b"ST", b"O", b"X"], ["STOP"])[1] == ["a", "", "", "STOX"]

    def test_stop_string_split_inside_a_character(self) -> None:
        data = "ab→cd".encode()
        assert said([data[i : i + 1] for i in range(len(data))], ["→c"])[0] == "ab"

    def test_control_tokens_show_nothing_and_hide_no_stop_string(self) -> None:
        assert said([b"ST", b"", b"OP"], ["STOP"]) == ("", ["", "", ""], 3)

    @given(
        st.text("ab", max_size=20),
        st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
        st.data(),
    )
    def test_first_complete_stop_string_wins(self, whole: str, stop: list[str], data: st.DataObject) -> None:
        text, shown, taken = said([letter.encode() for letter in whole], stop)
        ends = [i + 1 for i in range(len(whole)) if any(whole[: i + 1].endswith(s) for s in stop)]
        if not ends:
            assert (text, taken) == (whole, len(whole))
        else:
            longest = max((s for s in stop if whole[: ends[0]].endswith(s)), key=len)
            assert (text, taken) == (whole[: ends[0] - len(longest)], ends[0])
        # Nothing shown is ever taken back.
        assert text.startswith("".join(shown))


def test_the_token_that_ends_a_reply_adds_nothing() -> None:
    text = ReplyText(lambda token: b"x", lambda token: token == END)
    assert not text.feed(0)
    assert text.feed(END)
    assert text.drain() == [("x", 1, 0), ("", 1, 0)]
    assert text.text == "x"


@pytest.mark.parametrize(
    ("pieces", "tokens", "cut_bytes"),
    [
        (["ab", "STOP"], [1, 0], [0, 0]),
        (["ab", "ST", "OP"], [1, 0, 0], [0, 0, 0]),
        (["abST", "OP"], [0, 1], [0, 2]),
        (["abSTOPé"], [1], [6]),
        (["ab", "S", "T", "x"], [1, 0, 0, 3], [0, 0, 0, 0]),
        (["ab", "", "é"], [1, 1, 1], [0, 0, 0]),
    ],
)
def test_tokens_of_a_stop_string_do_not_belong_to_the_text(
    pieces: list[str], tokens: list[int], cut_bytes: list[int]
) -> None:
    text = ReplyText(lambda token: pieces[token].encode(), lambda _: False, stop_searches(["STOP"], None))
    for token in range(len(pieces)):
        text.feed(token)
    released = text.drain()
    assert [each.tokens for each in released] == tokens
    assert [each.cut_bytes for each in released] == cut_bytes


def test_parts_of_a_character_that_starts_a_stop_string_do_not_belong_to_the_text() -> None:
    pieces = [b"a", *(bytes([byte]) for byte in "🙂!".encode())]
    text = ReplyText(lambda token: pieces[token], lambda _: False, stop_searches(["🙂!"], None))
    for token in range(len(pieces)):
        text.feed(token)
    assert [each.tokens for each in text.drain()] == [1, 0, 0, 0, 0, 0]


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
        # A stop string does not match in the reasoning, or in the whitespace before the answer.
        ("<think>\nHm\n</think>\n\nYes", ["\n\nYes"], "<think>\nHm\n</think>\n\nYes"),
        ("<think>\nHm E</think>ND no", ["END"], "<think>\nHm E</think>ND no"),
        ("<think>\nHm</think>\n\nEND", ["END"], "<think>\nHm</think>\n\n"),
        # A stop string that contains a marker is meant for the reasoning.
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


@pytest.mark.long
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
