"""Streaming text: whole characters, and stop strings that are held back until decided."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat.reply_text import ReplyText, stop_searches

END = -1


def said(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[str, list[str], int]:
    """Feed pieces as tokens: (the text, what each token showed, how many were taken)."""
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
