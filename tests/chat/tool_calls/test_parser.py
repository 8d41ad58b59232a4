"""Parsing tool calls: all families, any split into chunks, and text that only looks like a call."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat.tool_calls.calls import ToolCall, collect_calls
from edgespec.chat.tool_calls.form import CallForm
from edgespec.chat.tool_calls.formats import call_form
from edgespec.chat.tool_calls.parser import ToolCallParser
from tests.chat.tool_calls.replies import ARGUMENTS, FAMILIES, PARAMETERS

SCHEMAS = {"get_weather": PARAMETERS}
FORMS = {name: call_form(family.template) for name, family in FAMILIES.items()}


def parse(form: CallForm, *parts: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text and the calls of an answer that arrives in parts."""
    parser = ToolCallParser(form, SCHEMAS, lambda index: f"call_{index}")
    parsed = [*map(parser.feed, parts), parser.finish()]
    text = "".join(each.text for each in parsed)
    return text, collect_calls(delta for each in parsed for delta in each.calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call(name: str) -> None:
    text, calls = parse(FORMS[name], FAMILIES[name].call)
    assert text == ""
    assert [call.name for call in calls] == ["get_weather"]
    assert json.loads(calls[0].arguments) == json.loads(ARGUMENTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_and_parallel_calls(name: str) -> None:
    text, calls = parse(FORMS[name], FAMILIES[name].calls)
    assert text == "Sure."
    assert [(call.id, call.name) for call in calls] == [("call_0", "get_weather"), ("call_1", "now")]
    assert [json.loads(call.arguments) for call in calls] == [json.loads(ARGUMENTS), {}]


@pytest.mark.parametrize("name", FAMILIES)
def test_single_characters_give_the_same_result(name: str) -> None:
    reply = FAMILIES[name].calls
    assert parse(FORMS[name], *reply) == parse(FORMS[name], reply)


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_stream(name: str) -> None:
    """Arguments are not held back until the call is complete."""
    parser = ToolCallParser(FORMS[name], SCHEMAS, str)
    reply = FAMILIES[name].call
    until_nord = reply[: reply.index("Nord") + 4]
    deltas = [delta for character in until_nord for delta in parser.feed(character).calls]
    assert "".join(delta.arguments for delta in deltas).endswith("Nord")
    assert len(deltas) > 10


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_that_ends_within_the_call_keeps_its_beginning(name: str) -> None:
    reply = FAMILIES[name].call
    text, calls = parse(FORMS[name], reply[: reply.index("Nord") + 4])
    assert text == ""
    assert len(calls) == 1
    assert calls[0].arguments.replace('": "', '":"') == '{"city":"Zürich \\"Nord'


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_is_a_prefix(name: str) -> None:
    """A longer reply never changes a reported call, and shows only text that no call used."""
    reply = FAMILIES[name].calls
    for shorter, longer in pairwise(parse(FORMS[name], reply[:end])[1] for end in range(len(reply) + 1)):
        assert len(shorter) <= len(longer)
        for call, continued in zip(shorter, longer, strict=False):
            assert continued.name == call.name
            assert continued.arguments.startswith(call.arguments)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_cut_anywhere_contains_no_part_of_a_marker_or_call(name: str) -> None:
    """Only the first character of a marker may stay, because it could be text."""
    reply = FAMILIES[name].calls
    complete = parse(FORMS[name], reply)[1]
    for end in range(len(reply)):
        parser = ToolCallParser(FORMS[name], SCHEMAS, lambda index: f"call_{index}")
        parsed = [*map(parser.feed, reply[:end]), parser.finish(cut=True)]
        text = "".join(each.text for each in parsed).rstrip()
        if not FORMS[name].starts_bare:
            assert "Sure.".startswith(text) or text[len("Sure.") :].strip() in ("<", "[", "")
        calls = collect_calls(delta for each in parsed for delta in each.calls)
        for call, whole in zip(calls, complete, strict=False):
            assert whole.arguments.startswith(call.arguments)


def test_a_cut_answer_in_json_stays_text() -> None:
    parser = ToolCallParser(FORMS["llama-3"], SCHEMAS, str)
    assert parser.finish('{"answer": {"a": ', cut=True).text == '{"answer": {"a": '


def test_a_cut_answer_keeps_text_that_is_no_marker() -> None:
    for text in ("a <", "a <b", "a </p", "a <tools"):
        assert ToolCallParser(FORMS["qwen3"], SCHEMAS, str).finish(text, cut=True).text == text


@pytest.mark.parametrize("arguments", ["null", "[]", '""', '"{}"', '"null"', "{}"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen3", '<tool_call>{"name": "now", "arguments": ARGUMENTS}</tool_call>'),
        ("qwen3", '<tool_call>{"arguments": ARGUMENTS, "name": "now"}</tool_call>'),
        ("mistral-small-3.2", "[TOOL_CALLS]now[ARGS]ARGUMENTS"),
    ],
)
def test_models_write_no_arguments_in_several_ways(name: str, call: str, arguments: str) -> None:
    expected = ("", (ToolCall("call_0", "now", "{}"),))
    assert parse(FORMS[name], *call.replace("ARGUMENTS", arguments)) == expected


PIECES = st.sampled_from(
    [
        *(
            "Hello",
            " ",
            "\n",
            "{",
            "}",
            "[",
            "]",
            ",",
            '"',
            ":",
            "\\",
            "`",
            "é",
            "😀",
            "a=1",
            "null",
            "12",
            "name",
        ),
        *(
            '{"name": "f", "arguments": {"a": 1}}',
            '{"name": "f", ',
            '"arguments": {',
            '"parameters": {"a": [',
        ),
        *(marker for form in FORMS.values() for marker in (*form.opens, *form.markers)),
        *(family.calls for family in FAMILIES.values()),
    ]
)


@pytest.mark.long
@given(st.sampled_from(sorted(FAMILIES)), st.lists(PIECES, max_size=12), st.data())
def test_any_division_gives_the_same_result(name: str, pieces: list[str], data: st.DataObject) -> None:
    reply = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=8)))
    parts = [reply[start:end] for start, end in pairwise([0, *cuts, len(reply)])]
    expected = parse(FORMS[name], reply)
    assert parse(FORMS[name], *parts) == expected
    assert parse(FORMS[name], *reply) == expected


@given(st.sampled_from(sorted(FAMILIES)), st.lists(PIECES, max_size=12))
def test_no_character_is_lost(name: str, pieces: list[str]) -> None:
    """The text is the reply without the calls: what remains of it is in the reply, in the same order."""
    reply = "".join(pieces)
    text, calls = parse(FORMS[name], reply)
    if not calls:
        assert text == reply
    rest = iter(reply)
    assert all(character in rest for character in text)


NO_CALLS = {
    "qwen3": [
        "Use <tool_call> to call.",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "f"',
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": {city: 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "not JSON"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        "trailing space \n ",
    ],
    "llama-3": [
        '{"answer": 42}',
        '{"name": "Bob", "age": 5}',
        '  {"name": "Bob"}',
        'Here: {"name": "f", "parameters": {}}',
        '<|python_tag|>search.call(query="x")',
    ],
    "mistral-small-3.2": ["[TOOL_CALLS]", "[TOOL_CALLS] two words[ARGS]{}", "[TOOL_CALLS]f[ARGS]5"],
    "qwen3-coder": ["<tool_call>\n<function=f>\n<oops>", "<function=", "a <b> c"],
}


@pytest.mark.parametrize(("name", "reply"), [(name, reply) for name in NO_CALLS for reply in NO_CALLS[name]])
def test_what_is_no_call_stays_text(name: str, reply: str) -> None:
    assert parse(FORMS[name], *reply) == (reply, ())


def test_text_after_a_failed_call_can_contain_another() -> None:
    failed = "<tool_call>oops <tool_call>{broken</tool_call>"
    text, calls = parse(FORMS["qwen3"], failed + FAMILIES["qwen3"].call)
    assert text == failed
    assert len(calls) == 1


def test_arguments_that_become_invalid_end_the_call_and_stay_text() -> None:
    text, calls = parse(
        FORMS["qwen3"], '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2}}</tool_call> end'
    )
    assert calls == (ToolCall("call_0", "f", '{"a": 1, '),)
    assert text == "b: 2}}</tool_call> end"


def test_arguments_can_come_before_the_name_or_in_a_string() -> None:
    for inner in ('{"arguments": {"a": 1}, "name": "f"}', '{"name": "f", "arguments": "{\\"a\\": 1}"}'):
        assert parse(FORMS["qwen3"], *inner.join(["<tool_call>", "</tool_call>"])) == (
            "",
            (ToolCall("call_0", "f", '{"a": 1}'),),
        )


def test_the_schema_decides_what_tagged_values_are() -> None:
    values = {"city": "007", "live": "True", "days": "many", "code": "a\n\n<b>\n", "other": "[1, 2]"}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text, calls = parse(FORMS["qwen3-coder"], *f"<function=get_weather>\n{inner}</function>")
    assert text == ""
    assert json.loads(calls[0].arguments) == {
        "city": "007",
        "live": True,
        "days": "many",
        "code": "a\n\n<b>\n",
        "other": [1, 2],
    }


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("['C', 'F']", ["C", "F"]),
        ('["C", "F"]', ["C", "F"]),
        ("{'a': None, 'b': [True]}", {"a": None, "b": [True]}),
        ("[C, F]", "[C, F]"),
        ("{1, 2}", "{1, 2}"),
        ("[" * 10_000, "[" * 10_000),
        ("(1, 2)", "(1, 2)"),
    ],
)
def test_tagged_lists_and_objects_can_be_python(written: str, value: object) -> None:
    reply = f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>"
    text, (call,) = parse(FORMS["qwen3-coder"], reply)
    assert text == ""
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it is \"here\"'", 'it is "here"'),
        (r"'it\'s\n\x41\u00e9\U0001f600\q'", "it's\nAé😀\\q"),
        (r"'\ud83d\ude00'", "😀"),
        (r"'\xzz \u12'", r"\xzz \u12"),
        ("[1, -2.5e3, True, False, None, true,]", [1, -2500.0, True, False, None, True]),
        ("{'a': {\"b\": []}, \"c\": ['x)']}", {"a": {"b": []}, "c": ["x)"]}),
        ("''", ""),
    ],
)
def test_arguments_written_in_python(written: str, value: object) -> None:
    text, calls = parse(FORMS["lfm2"], *f"<|tool_call_start|>[f(a={written}, b = 1)]<|tool_call_end|>")
    assert (text, [call.name for call in calls]) == ("", ["f"])
    assert json.loads(calls[0].arguments) == {"a": value, "b": 1}


@pytest.mark.parametrize("written", ["[" * 100, "Paris", "1_000", "f(1)", "(1, 2)"])
def test_arguments_that_are_not_literals_stay_text(written: str) -> None:
    text, calls = parse(FORMS["lfm2"], *f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>")
    assert [call.name for call in calls] == ["f"]
    assert text


def test_models_mark_which_values_are_text() -> None:
    """If the schema doesn't say whether a value is text, the mark of the model does."""
    values = ("a", "true", "5"), ("b", "false", "5"), ("city", "false", "5"), ("days", "true", "5")
    marked = "".join(
        f'<parameter name="{name}" string="{mark}">{value}</parameter>\n' for name, mark, value in values
    )
    reply = f'<tool_calls>\n<invoke name="get_weather">\n{marked}</invoke>\n</tool_calls>'
    reply = re.sub("(</?)", r"\1｜DSML｜", reply)
    _, (call,) = parse(FORMS["deepseek-v4"], *reply)
    assert json.loads(call.arguments) == {"a": "5", "b": 5, "city": "5", "days": 5}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_in_json_contains_no_calls(name: str) -> None:
    """If a reply is either calls or an answer, text within the answer is never a call."""
    call = FAMILIES[name].call
    answers = (
        json.dumps({"text": f"{call} <tool_call>"}),
        f'["{call}"]',
        '{"name": "Ada", "parameters": {"a": 1}}',
    )
    for answer in answers:
        for parts in ([answer], list(answer)):
            parser = ToolCallParser(FORMS[name], SCHEMAS, str, calls_or_answer=True)
            parsed = [*map(parser.feed, parts), parser.finish()]
            assert "".join(each.text for each in parsed) == answer
            assert not any(each.calls for each in parsed)
    for reply in (call, f"{call}\n" if FORMS[name].starts_bare else f"{call}\n{call}\n"):
        for parts in ([reply], list(reply)):
            parser = ToolCallParser(FORMS[name], SCHEMAS, str, calls_or_answer=True)
            parsed = [*map(parser.feed, parts), parser.finish()]
            assert "".join(each.text for each in parsed) == ""
            calls = collect_calls(delta for each in parsed for delta in each.calls)
            assert {each.name for each in calls} == {"get_weather"}
            assert len(calls) == reply.count(call)


def test_a_cut_answer_in_json_keeps_the_start_of_a_marker() -> None:
    parser = ToolCallParser(FORMS["qwen3"], SCHEMAS, str, calls_or_answer=True)
    assert parser.finish('{"a": "<tool', cut=True).text == '{"a": "<tool'
    parser = ToolCallParser(FORMS["qwen3"], SCHEMAS, str, calls_or_answer=True)
    assert parser.finish("<tool", cut=True).text == ""
