"""Grammars that force a tool call, keep calls valid, or allow either valid calls or a valid answer.

The grammars are in llguidance's Lark format, which the reply option `grammar` accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

from edgespec.chat.tokenizing import is_control
from edgespec.chat.tool_calls.form import CallForm, ChoicePart, EitherPart, JsonPart, Part, TextPart
from edgespec.chat.tool_calls.formats import HERMES
from edgespec.chat.tool_calls.tool_set import ToolSet
from edgespec.model.base import Vocabulary
from edgespec.options.schemas.enforceable import enforceable_schema, subschemas

__all__ = [
    "AnswerRule",
    "answer_grammar",
    "arguments_grammar",
    "auto_grammar",
    "required_grammar",
    "tool_grammar",
]

# Schema keys that change or cancel the effect of `additionalProperties`.
_COMBINING_KEYS = {"additionalProperties", "allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
# Write JSON as chat templates do. Flexible whitespace would let a model write endless spaces.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = "(?s:.*)"
# Maximum number of calls in a reply that contains only calls. A small model that wants to write text after a
# call may call tools forever instead of ending its reply. The limit was chosen, not measured.
_MAX_CALLS = 16
# The markers that gpt-oss writes around its reasoning, and then before its answer. All other models write
# their answer directly.
_ANALYSIS, _ANALYSIS_END = "<|channel|>analysis<|message|>", "<|end|>"
_NEXT_MESSAGE, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"

ControlToken: TypeAlias = Callable[[str], int | None]


class AnswerRule(NamedTuple):
    """The constraint on the answer to a request with tools.

    Attributes:
        expression: The constraint in llguidance's Lark format.
        is_json: Whether answers are JSON, so that text resembling a call is kept as part of the answer.
    """

    expression: str
    is_json: bool


def tool_grammar(
    form: CallForm, tools: ToolSet, vocabulary: Vocabulary, answer: AnswerRule | None = None
) -> str | None:
    """Return the grammar for a request with tools, or None if the reply is unconstrained.

    Args:
        form: The model's tool-call format.
        tools: The tools of the request. If any of them is strict, the grammar covers all of them.
        vocabulary: The target's tokenizer.
        answer: The constraint on the answer. If set, the grammar covers all tools.
    """

    def control_token(text: str) -> int | None:
        tokens = vocabulary.tokenize(text, special=True, start=False)
        return tokens[0] if len(tokens) == 1 and is_control(vocabulary, tokens[0]) else None

    if tools.required:
        return required_grammar(form, tools, control_token)
    if answer:
        return answer_grammar(form, tools, answer.expression, control_token)
    # In gpt-oss's format, the text around calls contains control tokensthat this grammar does not cover.
    if tools.strict and not form.reasoning_ends:
        return auto_grammar(form, tools, control_token)
    return None


def arguments_grammar(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Return a grammar for a tool's arguments alone, for checking whether its schema can be enforced."""
    grammar = _Grammar(HERMES, lambda _: None, lenient=lenient)
    return grammar.text(grammar.rule([JsonPart(_closed(schema))]))


def required_grammar(form: CallForm, tools: ToolSet, control_token: ControlToken) -> str:
    """Return a grammar that makes the reply a single call to a required tool.

    Args:
        form: The model's tool-call format.
        tools: The tools of the request.
        control_token: Returns the id of the control token with the given text, or None.
    """
    grammar = _Grammar(form, control_token, lenient=not tools.strict)
    calls = [grammar.rule(form.spell(name, _closed(tools.schemas[name]))) for name in tools.required]
    return grammar.text(" | ".join(calls))


def auto_grammar(form: CallForm, tools: ToolSet, control_token: ControlToken) -> str:
    """Return a grammar that allows only valid calls to the tools, with any text around them.

    Takes the arguments of `required_grammar`.
    """
    grammar = _Grammar(form, control_token, lenient=False)
    spelled = [form.spell(name, _closed(schema)) for name, schema in tools.schemas.items()]
    if form.starts_bare:
        bare = " | ".join(grammar.rule(parts) for parts in spelled)
        no_call = grammar.terminal(rf"/([^\s{{]{_ANY_TEXT})?/")
        return grammar.text(f"({bare}) | {no_call}")
    text = grammar.terminal(f"/{_ANY_TEXT}/")
    calls = []
    for opening in form.opens:
        rests = [_after(opening, parts) for parts in spelled]
        rules = [grammar.rule(rest) for rest in rests if rest is not None]
        if not rules:
            continue
        if control_token(opening) is None:
            begins = grammar.rule_of(f"{text} {_quote(opening)}", "[lazy]")
        else:
            begins = f"{text} {grammar.literal(opening)}"
        calls.append(f"{begins} ({' | '.join(rules)})")
    return grammar.text(f"({' | '.join(calls)})* {text}")


def answer_grammar(form: CallForm, tools: ToolSet, answer: str, control_token: ControlToken) -> str:
    """Return a grammar that makes the reply either valid calls to the tools or an answer.

    No text is allowed around the calls. Otherwise, a model could write free text without ever making a call.

    Args:
        form: The model's tool-call format.
        tools: The tools of the request. If none is strict, parts of their schemas that cannot be enforced are
            ignored.
        answer: The expression that answers match.
        control_token: Returns the id of the control token with the given text, or None.
    """
    grammar = _Grammar(form, control_token, lenient=not tools.strict)
    spelled = [form.spell(name, _closed(schema)) for name, schema in tools.schemas.items()]
    if form.starts_bare:
        calls = " | ".join(grammar.rule([JsonPart(_call_schema(parts))]) for parts in spelled)
        return grammar.text(f"{calls} | {grammar.rule_of(answer)}")
    call = grammar.rule_of(" | ".join(grammar.rule(parts) for parts in spelled))
    calls, answer = grammar.rule_of(f'{call} ("\\n"? {call}){{0,{_MAX_CALLS - 1}}}'), grammar.rule_of(answer)
    if not form.reasoning_ends:
        return grammar.text(f"{calls} | {answer}")
    # gpt-oss's reasoning must be part of the grammar, because reasoning and calls start with the same token.
    if (end := control_token(_ANALYSIS_END)) is None:
        reasoning = grammar.rule([_ANALYSIS, TextPart(_ANALYSIS_END), _NEXT_MESSAGE])
    else:
        text = grammar.terminal(f"/{_ANY_TEXT}/")
        before, after = grammar.literal(_ANALYSIS), grammar.literal(_NEXT_MESSAGE)
        reasoning = grammar.rule_of(f"{before} {text} <[{end}]> {after}")
    return grammar.text(f"{reasoning}? ({calls} | ({grammar.literal(_FINAL)})? {answer})")


class _Grammar:
    """Collects the rules of a grammar."""

    def __init__(self, form: CallForm, control_token: ControlToken, *, lenient: bool) -> None:
        # Whether to ignore the parts of a schema that llguidance cannot enforce, rather than reject the
        # schema.
        self._lenient = lenient
        tokens = {marker: control_token(marker) for marker in form.markers if marker}
        self._tokens = {marker: token for marker, token in tokens.items() if token is not None}
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """Return the whole grammar. Replies match the expression `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def rule(self, parts: Iterable[Part]) -> str:
        """Add a rule for a sequence of parts, and return its name."""
        return self.rule_of(self._sequence(parts))

    def rule_of(self, expression: str, attributes: str = "") -> str:
        """Add a rule for an expression, and return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """Add a terminal (a lexer rule), and return its name."""
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _sequence(self, parts: Iterable[Part]) -> str:
        return " ".join(filter(None, map(self._expression, parts)))

    def _expression(self, part: Part) -> str:
        if isinstance(part, str):
            return self.literal(part)
        if isinstance(part, JsonPart):
            schema = enforceable_schema(part.schema, lenient=self._lenient)
            options = {**_SPACING, "lenient": self._lenient}
            return f"%json {json.dumps({**schema, 'x-guidance': options})}"
        if isinstance(part, TextPart):
            if part.end in self._tokens:
                return f"{self.terminal(f'/{_ANY_TEXT}/')} {self.literal(part.end)}"
            return self.rule_of(f"/{_ANY_TEXT}/", f"[suffix={_quote(part.end)}]")
        if isinstance(part, ChoicePart):
            return f"({' | '.join(map(_quote, part.texts))})"
        if isinstance(part, EitherPart):
            return f"({' | '.join(map(self._sequence, part.choices))})"
        return f"({self._sequence(part.parts)})?"

    def literal(self, text: str) -> str:
        """Return the expression for literal text. Markers that are control tokens match only those tokens."""
        markers = sorted(self._tokens, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        return " ".join(
            f"<[{self._tokens[piece]}]>" if piece in self._tokens else _quote(piece)
            for piece in pieces
            if piece
        )


def _after(opening: str, parts: Sequence[Part]) -> Sequence[Part] | None:
    """Return the parts of a call after the marker `opening`, or None if the call starts differently."""
    first = parts[0]
    assert isinstance(first, str)
    _, found, rest = first.partition(opening)
    return [rest, *parts[1:]] if found else None


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's schema, changed to forbid undefined arguments."""
    if schema and ("properties" not in schema or schema.keys() & _COMBINING_KEYS):
        return schema
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}


def _call_schema(parts: Sequence[Part]) -> Mapping[str, Any]:
    """Build the JSON schema of a call from its parts, for formats that write calls as JSON objects.

    If the call were literal text instead, answers could not be JSON objects, because after `{"`, llguidance's
    lexer would expect the rest of the call's text.
    """
    before, arguments, after = parts
    assert isinstance(before, str)
    assert isinstance(arguments, JsonPart)
    assert isinstance(after, str)
    written = json.loads(f"{before}null{after}")
    key = next(key for key, value in written.items() if value is None)
    parameters = deepcopy(dict(arguments.schema))
    for _, part in subschemas(parameters):
        if isinstance(reference := part.get("$ref"), str) and reference.startswith("#"):
            part["$ref"] = f"#/properties/{key}{reference[1:]}"
    return {
        "type": "object",
        "properties": {name: {"const": value} for name, value in written.items()} | {key: parameters},
        "required": list(written),
        "additionalProperties": False,
    }


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
