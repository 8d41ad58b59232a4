"""Streaming text: whole characters, and stop strings that are held back until decided."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat.text import ReplyText

END = -1


def said(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[str, list[str], int]:
    """Feed pieces as tokens: (the text, what each token showed, how many were taken)."""
    text = ReplyText(lambda token: pieces[token], lambda token: token == END, stop)
    taken = 0
    for token in range(len(pieces)):
        taken += 1
        if text.feed(token):
            break
    shown = text.drain()
    assert len(shown) == taken
    rest = text.finish()
    assert "".join(shown) + rest == text.text
    assert text.finish() == ""
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
        text = ReplyText(lambda token: b"abc"[token : token + 1], lambda token: token == END, ["bc", "x"])
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
    text = ReplyText(lambda token: b"x", lambda token: token == END, ())
    assert not text.feed(0)
    assert text.feed(END)
    assert text.drain() == ["x", ""]
    assert text.text == "x"
