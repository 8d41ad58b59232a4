"""Everything that the tool-call grammars allow is parsed as valid calls."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from edgespec.chat.reply_text import ReplySplitter
from edgespec.chat.tool_calls.calls import ToolCall, collect_calls
from edgespec.chat.tool_calls.form import CallForm
from edgespec.chat.tool_calls.formats import call_form
from edgespec.chat.tool_calls.grammar import answer_grammar, auto_grammar, required_grammar
from edgespec.chat.tool_calls.parser import CallSyntax, ToolCallParser
from edgespec.chat.tool_calls.tool_set import ToolSet
from edgespec.constraints.matcher import as_expression
from tests.chat.tool_calls.replies import ARGUMENTS, FAMILIES

FORMS = {name: call_form(family.template) for name, family in FAMILIES.items()}
SCHEMAS: dict[str, Mapping[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["kg", "m"]},
            "note": {"type": "string", "maxLength": 12},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["a", "unit"],
    },
    "now": {},
}


TOOLS = ToolSet((), SCHEMAS, tuple(SCHEMAS), strict=True)
# The texts after plain values, which random bytes would never be.
TEXT_ENDS = tuple(
    end.encode()
    for end in (
        *("\n</parameter>\n", "</parameter>\n", "</arg_value>\n", "</｜DSML｜parameter>\n"),
        *('<|"|>', "<escape>"),
    )
)
# The families that write all arguments of a call as one JSON object.
JSON_FAMILIES = [name for name, family in FAMILIES.items() if ARGUMENTS in family.call]


def no_control_tokens(text: str) -> None:
    return None


def matcher(grammar: str) -> LLMatcher:
    made = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not made.get_error(), f"{made.get_error()}\n{grammar}"
    return made


def parse(form: CallForm, reply: str) -> tuple[str, tuple[ToolCall, ...]]:
    parsed = ToolCallParser(form, SCHEMAS, str).finish(reply)
    return parsed.text, collect_calls(parsed.calls)


def random_reply(grammar: str, seed: int) -> str:
    """Return a random text that the grammar allows. It is rarely long."""
    walk, choose = matcher(grammar), random.Random(seed)
    reply = bytearray()
    while not walk.is_stopped():
        mask = walk.compute_bitmask()
        allowed = [token for token in range(256) if mask[token // 8] >> (token % 8) & 1]
        if not allowed or (walk.is_accepting() and choose.random() < 0.5):
            break
        # Prefer what ends texts and numbers.
        ends = [end for end in TEXT_ENDS if walk.validate_tokens(list(end)) == len(end)]
        token = choose.choice([token for token in allowed if token in b'"<\n,}'] or allowed)
        text = (
            choose.choice(ends or [bytes([token])])
            if choose.random() < 0.4
            else bytes([choose.choice(allowed)])
        )
        assert walk.try_consume_tokens(list(text)) == len(text)
        reply += text
        assert len(reply) < 5000
    assert walk.is_accepting()
    return reply.decode()


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_is_always_parsed_and_valid(name: str) -> None:
    grammar = required_grammar(FORMS[name], TOOLS, no_control_tokens)
    names = set()
    for seed in range(25):
        text, calls = parse(FORMS[name], random_reply(grammar, seed))
        assert text == ""
        assert len(calls) == 1
        names.add(calls[0].name)
        arguments = json.loads(calls[0].arguments)
        # Values in tags are plain text, whose length a grammar cannot limit.
        if isinstance(arguments.get("note"), str):
            arguments["note"] = arguments["note"][:12]
        jsonschema.validate(arguments, {**SCHEMAS[calls[0].name], "additionalProperties": False})
    assert names == set(SCHEMAS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_looks_as_the_model_writes_it(name: str) -> None:
    """The grammar allows the text that the family's chat templates write for an earlier call."""
    schemas: dict[str, Mapping[str, Any]] = {"get_weather": {"type": "object"}}
    if name not in JSON_FAMILIES:
        string, integer = {"type": "string"}, {"type": "integer"}
        properties: dict[str, Any] = {"city": string, "days": integer, "units": {"type": "array"}, "deep": {}}
        schemas = {"get_weather": {"properties": properties}}
    call = FAMILIES[name].call.replace("[\n    {", "[{").replace("}\n]", "}]")
    if name in ("gemma-4", "function-gemma"):
        # Grammars require values other than text to be JSON.
        start, end = call.index("units:"), call.index("}}") + 1
        call = f'{call[:start]}units:["C", "F"],deep:{{"a": null}}{call[end:]}'
    walk = matcher(required_grammar(FORMS[name], ToolSet((), schemas, ("get_weather",)), no_control_tokens))
    assert walk.try_consume_tokens(list(call.encode())) == len(call.encode())
    assert walk.is_accepting()


@pytest.mark.parametrize("name", FAMILIES)
def test_text_or_valid_calls(name: str) -> None:
    form = FORMS[name]
    grammar = auto_grammar(form, TOOLS, no_control_tokens)
    call = random_reply(required_grammar(form, TOOLS, no_control_tokens), seed=1)
    replies = (
        ["", "Hello!", call] if form.starts_bare else ["", "Hello!", call, f"Sure. {call}\n{call} Done."]
    )
    for reply in replies:
        walk = matcher(grammar)
        assert walk.try_consume_tokens(list(reply.encode())) == len(reply.encode()), reply
        assert walk.is_accepting(), reply
    for reply in (call.replace('"a"', '"b"').replace("add", "del").replace("now", "del"),):
        walk = matcher(grammar)
        assert walk.try_consume_tokens(list(reply.encode())) < len(reply.encode()), reply


def test_markers_that_are_control_tokens() -> None:
    tokens = {"[TOOL_CALLS]": 5, "[ARGS]": 32}
    form = FORMS["mistral-small-3.2"]
    tools = ToolSet((), {"now": {}}, ("now",))
    assert '<[5]> "now" <[32]> %json' in required_grammar(form, tools, tokens.get)
    assert "<[5]> (rule_" in auto_grammar(form, tools, tokens.get)


def test_only_strict_tools_refuse_schemas_that_cannot_be_enforced() -> None:
    schemas = {"f": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    lenient = required_grammar(FORMS["qwen3"], ToolSet((), schemas, ("f",)), no_control_tokens)
    assert not LLMatcher(LLTokenizer("byte"), lenient, log_level=0).get_error()
    strict = required_grammar(FORMS["qwen3"], ToolSet((), schemas, ("f",), strict=True), no_control_tokens)
    assert "uniqueItems" in LLMatcher(LLTokenizer("byte"), strict, log_level=0).get_error()


# Its property `name` also occurs in calls that are JSON objects, and it refers to a definition.
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
}
ANSWERS = ('{"name": "Ada"}', '{"name": "add", "age": 36}')


def answers(name: str, option: str = "schema", text: str = json.dumps(ANSWER)) -> str:
    """Return the grammar that allows a family's calls or an answer."""
    return answer_grammar(FORMS[name], TOOLS, as_expression(option, text), no_control_tokens)


def accepts(grammar: str, reply: str) -> bool:
    walk, tokens = matcher(grammar), list(reply.encode())
    return walk.try_consume_tokens(tokens) == len(tokens) and walk.is_accepting()


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_or_an_answer(name: str) -> None:
    form, grammar = FORMS[name], answers(name)
    call = random_reply(required_grammar(form, TOOLS, no_control_tokens), seed=1)
    for reply in (call, *ANSWERS):
        assert accepts(grammar, reply), reply
    if not form.starts_bare:
        assert accepts(grammar, call + call)
        assert accepts(grammar, f"{call}\n{call}\n{call}")
    wrong = call.replace('"a"', '"b"').replace("add", "del").replace("now", "del")
    for reply in (
        "",
        "Hello!",
        f"Sure. {call}",
        f"{call} Done.",
        call + ANSWERS[0],
        ANSWERS[0] + call,
        wrong,
    ):
        assert not accepts(grammar, reply), reply


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAMILIES if not FORMS[name].reasoning_ends])
def test_calls_and_answers_are_told_apart(name: str) -> None:
    grammar = answers(name)
    for seed in range(25):
        reply = random_reply(grammar, seed)
        answer = ReplySplitter("", CallSyntax(FORMS[name], SCHEMAS, "", calls_or_answer=True)).finish(reply)
        if calls := collect_calls(answer.calls):
            assert answer.answer == ""
            for call in calls:
                arguments = json.loads(call.arguments)
                if isinstance(arguments.get("note"), str):
                    arguments["note"] = arguments["note"][:12]
                jsonschema.validate(arguments, {**SCHEMAS[call.name], "additionalProperties": False})
        else:
            jsonschema.validate(json.loads(answer.answer), ANSWER)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "mistral-small-3.2", "llama-3"])
@pytest.mark.parametrize(
    ("option", "text", "good", "bad"),
    [
        ("regex", r"a/b\/c[/\n]?", ("a/b/c", "a/b/c\n"), ("a", "a/b/cc")),
        ("regex", r"a\\/b", ("a\\/b",), ("a/b",)),
        ("regex", "a\nb", ("a\nb",), ("ab",)),
        ("choice", "yes|no", ("yes", "no"), ("yesno",)),
        (
            "grammar",
            '%llguidance {}\nstart: "{" rule_0 "}" | "about " NUMBER\nrule_0: "x}"\nNUMBER: /[0-9]+/',
            ("{x}}", "about 12"),
            ("about", "x}"),
        ),
    ],
)
def test_calls_or_answers_of_every_constraint(
    name: str, option: str, text: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    grammar = answers(name, option, text)
    call = random_reply(required_grammar(FORMS[name], TOOLS, no_control_tokens), seed=1)
    assert all(accepts(grammar, reply) for reply in (*good, call))
    assert not any(accepts(grammar, reply) for reply in (*bad, "", "Hello!", f"Sure. {call}"))


def test_references_in_the_parameters_of_bare_calls() -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": [1]}}}
    tools = ToolSet((), {"f": parameters, "g": {}})
    answer = as_expression("schema", json.dumps(ANSWER))
    grammar = answer_grammar(FORMS["llama-3"], tools, answer, no_control_tokens)
    assert accepts(grammar, '{"name": "f", "parameters": {"a": 1}}')
    assert accepts(grammar, '{"name": "g", "parameters": {}}')
    assert not accepts(grammar, '{"name": "f", "parameters": {"a": 2}}')
    assert accepts(grammar, ANSWERS[1])


def test_gpt_oss_reasons_before_a_call_or_an_answer() -> None:
    grammar = answers("gpt-oss")
    call = random_reply(required_grammar(FORMS["gpt-oss"], TOOLS, no_control_tokens), seed=1)
    reasoning = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    for reply in (f"{final}{ANSWERS[0]}", f"{reasoning}{final}{ANSWERS[0]}", f"{reasoning}{call}"):
        assert accepts(grammar, reply), reply
        parts = ReplySplitter("", CallSyntax(FORMS["gpt-oss"], SCHEMAS, "", calls_or_answer=True)).finish(
            reply.replace("<|end|>", "")
        )
        assert (parts.answer, len(parts.calls)) == (("", 1) if call in reply else (ANSWERS[0], 0))
        assert parts.reasoning == ("I look." if reasoning in reply else "")
    for reply in (f"{final}Hello", f"{reasoning}{final}Hello", f"{reasoning}{final}{call}"):
        assert not accepts(grammar, reply), reply
    tokens = {marker: 1 + at for at, marker in enumerate((*FORMS["gpt-oss"].markers, "<|end|>"))}
    made = answer_grammar(FORMS["gpt-oss"], TOOLS, as_expression("choice", "yes|no"), tokens.get)
    end = tokens["<|end|>"]
    assert f'"analysis" <[{tokens["<|message|>"]}]> TEXT_' in made
    assert f'<[{end}]> <[{tokens["<|start|>"]}]> "assistant"' in made
    assert not LLMatcher(LLTokenizer("byte"), made, log_level=0).get_error()
