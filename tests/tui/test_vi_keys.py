"""vi keys in the input. The expected texts are those of Vim."""

from __future__ import annotations

from pathlib import Path

from textual.app import App, ComposeResult
from textual.widgets import TextArea

from edgespec.tui.vi_keys import ViKeys
from tests.tui.driving import driving
from tests.tui.scripted import ScriptedRuntime, loading

# The initial text, the keys that move the cursor, the keys to test, and the resulting text in Vim.
CASES = [
    ("one two three", "0", "dw", "two three"),
    ("one two three", "w", "dw", "one three"),
    ("one two three", "0", "2dw", "three"),
    ("one two three", "0", "d2w", "three"),
    ("one two three", "0", "cwX", "X two three"),
    ("one, two", "0", "wx", "one two"),
    ("one, two", "0", "dex", " two"),
    ("one two three", "$", "b", "one two three"),
    ("one two three", "$", "x", "one two thre"),
    ("one two three", "$", "2bx", "one wo three"),
    ("a\nb\nc", "0", "dd", "b\nc"),
    ("a\nb\nc", "G", "dd", "a\nb"),
    ("a\nb\nc", "0", "2dd", "c"),
    ("a\nb\nc", "0", "yyp", "a\na\nb\nc"),
    ("a\nb\nc", "0", "yyP", "a\na\nb\nc"),
    ("a\nb\nc", "0", "ddp", "b\na\nc"),
    ("a\nb\nc", "0", "djx", ""),
    ("  one two", "0", "IX", "  Xone two"),
    ("  one two", "0", "AX", "  one twoX"),
    ("one two", "0", "iX", "Xone two"),
    ("one two", "0", "aX", "oXne two"),
    ("one\ntwo", "0", "oX", "one\nX\ntwo"),
    ("one\ntwo", "0", "OX", "X\none\ntwo"),
    ("one two", "0", "wD", "one "),
    ("one two", "0", "wCX", "one X"),
    ("one two three", "0", "wd0", "two three"),
    ("one two", "0", "d$", ""),
    ("one two", "0", "3x", " two"),
    ("one two", "0", "wywP", "one twotwo"),
    ("one\ntwo\nthree", "0", "2Gx", "one\nwo\nthree"),
    ("one\ntwo\nthree", "G", "ggx", "ne\ntwo\nthree"),
    ("one\ntwo\nthree", "0", "jlx", "one\nto\nthree"),
    ("one two", "0", "dwu", "one two"),
    ("one two", "0", "$hhx", "one wo"),
    ("ab cd", "0", "ylp", "aab cd"),
    ("one", "0", "10lx", "on"),
    ("one two\nthree", "0", "wdw", "one \nthree"),
    ("one", "0", "ccX", "X"),
    ("a\nb\nc", "0", "2ccX", "X\nc"),
    ("a\nb\nc", "0", "dG", ""),
    ("one two", "0", "ex", "on two"),
    ("one two three", "0", "2ex", "one tw three"),
    ("foo(bar)", "0", "wx", "foobar)"),
]


class _Area(App[None]):
    def compose(self) -> ComposeResult:
        yield TextArea()


def _type(vi: ViKeys, area: TextArea, keys: str) -> None:
    for character in keys:
        if not vi.key(character, character):
            area.insert(character)


async def test_texts_are_those_of_vim() -> None:
    app = _Area()
    async with app.run_test():
        area = app.query_one(TextArea)
        for text, place, keys, expected in CASES:
            area.load_text(text)
            vi = ViKeys(area)
            vi.key("escape", None)
            _type(vi, area, "gg0" + place)
            _type(vi, area, keys)
            assert area.text == expected, (text, place, keys)


async def test_odd_keys_do_nothing() -> None:
    app = _Area()
    async with app.run_test():
        area = app.query_one(TextArea)
        for text in ("", "a", "a\nb"):
            area.load_text(text)
            vi = ViKeys(area)
            vi.key("escape", None)
            _type(vi, area, "9999jkhlwbeG$gg0^zZq;d;dz2g3cqyygu")
            assert vi.mode == "normal"
            assert area.text == text


async def test_the_mode_is_shown_and_the_choice_remembered(tmp_path: Path) -> None:
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        assert d.chat.prompt.border_title == ""
        await d.say("/vi")
        await d.sees("vi keys are on")
        await d.sees("INSERT")
        await d.write("one two?")
        await d.press("escape")
        await d.sees("NORMAL")
        await d.press("0", "d", "w", "question_mark")
        assert d.chat.prompt.text == "two?"
        await d.press("enter")
        await d.settled()
        await d.sees("INSERT")
        assert runtime.asked[-1][1] == "two?"
    async with driving(loading(runtime), tmp_path) as d:
        await d.sees("INSERT")
        await d.say("/vi off")
        await d.write("x")
        await d.press("escape")
        await d.write("x")
        assert d.chat.prompt.text == "xx"
        d.chat.prompt.clear()
        await d.say("/vi maybe")
        await d.said("Choose on or off")
