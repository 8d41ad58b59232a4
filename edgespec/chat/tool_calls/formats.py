"""The formats in which models write tool calls. The chat template shows which of them a model uses.

Calls are written as JSON objects, as the tool's name followed by JSON, or as tags. Models share only a few
formats, so one table covers them all. No existing library is suitable: the response templates of transformers
(`utils/chat_parsing`) and the parsers of mlx-lm return a call only when it is complete, raise an error if it
is invalid, and need packages that GGUF models do not need.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edgespec.chat.tool_calls.form import (
    MAX_NAME_CHARACTERS,
    CallForm,
    CallWriter,
    ChoicePart,
    EitherPart,
    JsonPart,
    OptionalPart,
    Part,
    TextPart,
    TextReader,
    Wait,
    read_arguments_object,
    read_closes,
    read_opens,
)

__all__ = ["HERMES", "call_form"]

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
# Python's spellings of JSON values, which some templates use.
_PYTHON_VALUES = {"True": "true", "False": "false", "None": "null"}
# Matches the names of tools and arguments that are not in quotes.
_NAME = re.compile(r"[^\s\"'`()\[\]{}<>,=|]+")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
# Matches the escapes in texts of Python and JSON.
_LITERAL_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[^xuU])", re.DOTALL)
# Length of the longest of these escapes, such as \\U0001f600.
_LITERAL_ESCAPE_CHARACTERS = 10
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "\n": "",
    **{each: each for each in "\\'\"/"},
}
# Maximum nesting depth of arguments written as literals. The limit was chosen, not measured.
_MAX_LITERAL_LEVELS = 32
_JSON_TYPES: dict[type, frozenset[str]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


def _read_calls(
    reader: TextReader,
    writer: CallWriter,
    read_call: Callable[[TextReader, CallWriter], Wait[bool]],
    closes: tuple[str, ...],
    *,
    can_be_list: bool = True,
) -> Wait[bool]:
    """Read one call or, if `can_be_list` is set, a list of calls, and the closing markers after them.

    Args:
        reader: The text.
        writer: Receives the calls.
        read_call: Reads one call. Returns False if the text is invalid.
        closes: The markers after the calls. They may be missing.
        can_be_list: Whether calls in square brackets are a list of calls.

    Returns:
        Whether the text is valid.
    """
    yield from reader.space()
    in_list = can_be_list and (yield from reader.literal("["))
    while True:
        yield from reader.space()
        if not (yield from read_call(reader, writer)):
            return False
        yield from reader.space()
        if not (in_list and (yield from reader.literal(","))):
            break
    if in_list and not (yield from reader.literal("]")):
        return False
    yield from read_closes(reader, closes)
    return True


@dataclass(frozen=True)
class _JsonForm:
    """Tool calls such as `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.

    A list of calls can appear in place of a single call.

    Attributes:
        opens: The markers before the calls.
        closes: The markers after the calls.
        around: The text before the name's key and the text after a call's arguments, in the form that
            the model was trained on.
        argument_key: The key that the model was trained to use for the arguments.
        name_key: The key that the model was trained to use for the name.
        starts_bare: Whether calls can begin without a marker at the start of the answer.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    around: tuple[str, str] = ("{", "}")
    argument_key: str = "arguments"
    name_key: str = "name"
    starts_bare: bool = False
    reasoning_ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        return (yield from _read_calls(reader, writer, self._read_call, self.closes))

    def _read_call(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        if not (yield from reader.literal("{")):
            return False
        named = has_arguments = False
        # Holds the arguments if they come before the name.
        held: list[str] = []
        separator = ","
        while separator == ",":
            yield from reader.space()
            key = yield from reader.json_string()
            yield from reader.space()
            if key is None or not (yield from reader.literal(":")):
                return False
            yield from reader.space()
            if key in _NAME_KEYS and not named:
                name = yield from reader.json_string()
                if name is None or not writer.begin(name):
                    return False
                named = True
                writer.write("".join(held))
            elif key in _ARGUMENT_KEYS and not has_arguments:
                if not (yield from read_arguments_object(reader, writer.write if named else held.append)):
                    return False
                has_arguments = True
            elif not (yield from reader.json_value(_ignore)):
                return False
            yield from reader.space()
            separator = yield from reader.literal(",", "}")
        if not separator or not named or (self.starts_bare and not has_arguments):
            return False
        if not has_arguments:
            writer.write("{}")
        writer.end()
        return True

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        before, after = self.around
        return (
            f'{before}"{self.name_key}": {json.dumps(name, ensure_ascii=False)}, "{self.argument_key}": ',
            JsonPart(parameters),
            after,
        )


def _ignore(text: str) -> None:
    """Ignore the value of an irrelevant key, such as the index of the call."""


@dataclass(frozen=True)
class _NamedForm:
    """Tool calls such as `[TOOL_CALLS]add[ARGS]{"a": 1}`.

    Attributes:
        opens: The markers before a call, including any marker that only the first of several calls has.
        separators: The strings that can separate the name from the arguments.
        closes: The markers after a call, including any marker that only the last of several calls has.
        around: The text before the name, between the name and the arguments, and after the arguments, in the
            form that the model was trained on.
        header: Regular expression for the text before the separator. Its first group is the name.
        markers: Strings in calls that may be control tokens.
        reasoning_ends: The markers that begin a call and also end the reasoning.
    """

    opens: tuple[str, ...]
    separators: tuple[str, ...]
    around: tuple[str, str, str]
    markers: tuple[str, ...]
    closes: tuple[str, ...] = ()
    header: str = r"([\w.:/-]+)"
    starts_bare: bool = False
    reasoning_ends: tuple[str, ...] = ()

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        yield from read_opens(reader, self.opens)
        header = yield from reader.until(self.separators, MAX_NAME_CHARACTERS)
        found = re.fullmatch(self.header, header.strip()) if header else None
        if not found or not writer.begin(found[1]):
            return False
        yield from reader.literal(*self.separators)
        yield from reader.space()
        if not (yield from read_arguments_object(reader, writer.write)):
            return False
        writer.end()
        yield from read_closes(reader, self.closes)
        return True

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        before, between, after = self.around
        return before + name + between, JsonPart(parameters), after


@dataclass(frozen=True)
class _TaggedForm:
    """Tool calls such as `<function=add><parameter=a>1</parameter></function>`.

    The parser converts the arguments to JSON. The parameter's schema decides whether a value is text.

    Attributes:
        opens: The markers before a tool's name, including any that only the first of several calls has.
        name_end: The text after the name. It may be missing.
        key: The text before and the text after the name of a parameter.
        value_open: The text before a value, in addition to the key, if any.
        text_open: The text before a value that is text, for models that mark such values. `value_open` then
            precedes all other values.
        value_end: The text after a value.
        call_end: The text after the last parameter.
        padded: Whether each value is on lines of its own. The line breaks around it are not part of the
            value.
        closes: The markers after a call, including any that only the last of several calls has. They may be
            missing.
        control_tokens: Control tokens in calls, in addition to the strings above.
    """

    opens: tuple[str, ...]
    name_end: str
    key: tuple[str, str]
    value_end: str
    call_end: str
    value_open: str = ""
    text_open: str = ""
    padded: bool = False
    closes: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()
    starts_bare: bool = False
    reasoning_ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        values = self.value_open, self.text_open, self.value_end
        return (*self.opens, *self.key, *values, self.call_end, *self.closes, *self.control_tokens)

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        yield from read_opens(reader, self.opens)
        key_open, key_end = self.key
        name = yield from reader.until((self.name_end, key_open, self.call_end), MAX_NAME_CHARACTERS)
        if name is None or not writer.begin(name.strip()):
            return False
        yield from reader.literal(self.name_end)
        separator = "{"
        while True:
            yield from reader.space()
            if (yield from reader.literal(self.call_end)):
                break
            if not (yield from reader.literal(key_open)):
                return False
            key = yield from reader.until((key_end,), MAX_NAME_CHARACTERS)
            if key is None:
                return False
            yield from reader.literal(key_end)
            types, opening = _types(writer.parameter(key)), ""
            if self.value_open:
                yield from reader.space()
                opening = yield from reader.literal(self.value_open, self.text_open)
                if not opening:
                    return False
            if opening and opening == self.text_open and (not types or "string" in types):
                types = frozenset({"string"})
            writer.write(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(reader, writer, types)):
                return False
        writer.write("{}" if separator == "{" else "}")
        writer.end()
        yield from read_closes(reader, self.closes)
        return True

    def _read_value(self, reader: TextReader, writer: CallWriter, types: frozenset[str]) -> Wait[bool]:
        ends = (f"\n{self.value_end}", self.value_end) if self.padded else (self.value_end,)
        if self.padded:
            yield from reader.literal("\n")
        parts: list[str] = []
        is_text = types == {"string"}
        if is_text:
            writer.write('"')
        write = (lambda text: writer.write(_quoted(text))) if is_text else parts.append
        if not (yield from reader.stream_until(ends, write)):
            return False
        yield from reader.literal(*ends)
        writer.write('"' if is_text else _as_json("".join(parts), types))
        return True

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        line = "" if self.name_end == "\n" else "\n"
        parts: list[Part] = ["\n".join(self.opens) + name + self.name_end + line]
        properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
        for key, schema in properties.items():
            argument = self._spell_argument(key, schema, parameters)
            parts += argument if key in required else [OptionalPart(argument)]
        return [*parts, "\n".join((self.call_end, *self.closes))]

    def _spell_argument(self, key: str, schema: Any, parameters: Mapping[str, Any]) -> list[Part]:
        key_open, key_end = self.key
        padding = "\n" if self.padded else ""
        end = f"{padding}{self.value_end}"
        is_text = _is_text(schema)
        opening = self.value_open and f"\n{self.value_open}"
        if self.text_open:
            opening = self.text_open if is_text else self.value_open
        before = key_open + key + key_end + opening + padding
        if is_text:
            texts = _choices(schema)
            return (
                [before, ChoicePart(texts), f"{end}\n"] if texts else [before, TextPart(self.value_end), "\n"]
            )
        return [before, JsonPart(_with_definitions(schema, parameters)), f"{end}\n"]


@dataclass(frozen=True)
class _LiteralForm:
    """Tool calls such as `[add(a=1, b="x")]`, with arguments as in a programming language.

    The parser converts the arguments to JSON. It also accepts JSON.

    Attributes:
        opens: The marker before a call, or before a list of calls.
        closes: The marker after a call or a list of calls. It may be missing.
        before_name: The text before a tool's name.
        brackets: The text before and the text after the arguments.
        name_end: The text between the name of an argument and its value.
        separator: The text between two arguments.
        quote: The text before and after a text. If empty, the model writes text as JSON or Python does.
        is_list: Whether the calls are in square brackets.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    before_name: str
    brackets: tuple[str, str]
    name_end: str
    separator: str
    quote: str = ""
    is_list: bool = False
    starts_bare: bool = False
    reasoning_ends: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.closes, self.quote)

    def read(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        return (
            yield from _read_calls(reader, writer, self._read_call, self.closes, can_be_list=self.is_list)
        )

    def _read_call(self, reader: TextReader, writer: CallWriter) -> Wait[bool]:
        yield from reader.literal(self.before_name)
        name = yield from reader.until(self.brackets[:1], MAX_NAME_CHARACTERS)
        if name is None or not _NAME.fullmatch(name.strip()) or not writer.begin(name.strip()):
            return False
        yield from reader.literal(self.brackets[0])
        if not (yield from self._read_object(reader, writer.write, self.name_end, self.brackets[1])):
            return False
        writer.end()
        return True

    def _read_object(
        self, reader: TextReader, write: Callable[[str], None], name_end: str, end: str, levels: int = 0
    ) -> Wait[bool]:
        """Read named values up to and including the closing bracket `end`, and write them as JSON."""
        write("{")
        separator = ""
        while not (yield from self._read_end(reader, end)):
            name: list[str] = []
            if (quote := (yield from reader.literal(*self._quotes))) and not (
                yield from self._read_text(reader, name.append, quote)
            ):
                return False
            if not quote:
                bare = yield from reader.until((name_end,), MAX_NAME_CHARACTERS)
                if bare is None or not _NAME.fullmatch(bare.strip()):
                    return False
                name.append(json.dumps(bare.strip(), ensure_ascii=False))
            yield from reader.space()
            if not (yield from reader.literal(name_end)):
                return False
            write(f"{separator}{''.join(name)}: ")
            separator = ", "
            if not (yield from self._read_item(reader, write, end, levels)):
                return False
        write("}")
        return True

    def _read_list(self, reader: TextReader, write: Callable[[str], None], levels: int) -> Wait[bool]:
        write("[")
        separator = ""
        while not (yield from self._read_end(reader, "]")):
            write(separator)
            separator = ", "
            if not (yield from self._read_item(reader, write, "]", levels)):
                return False
        write("]")
        return True

    def _read_end(self, reader: TextReader, end: str) -> Wait[str]:
        yield from reader.space()
        return (yield from reader.literal(end))

    def _read_item(
        self, reader: TextReader, write: Callable[[str], None], end: str, levels: int
    ) -> Wait[bool]:
        """Read a value and the comma after it, which may be missing before the closing bracket `end`."""
        if not (yield from self._read_value(reader, write, levels + 1)):
            return False
        yield from reader.space()
        return bool((yield from reader.literal(","))) or (yield from reader.peek()) == end[0]

    def _read_value(self, reader: TextReader, write: Callable[[str], None], levels: int) -> Wait[bool]:
        yield from reader.space()
        if quote := (yield from reader.literal(*self._quotes)):
            return (yield from self._read_text(reader, write, quote))
        if levels > _MAX_LITERAL_LEVELS:
            return False
        if (yield from reader.literal("{")):
            return (yield from self._read_object(reader, write, ":", "}", levels))
        if (yield from reader.literal("[")):
            return (yield from self._read_list(reader, write, levels))
        found = yield from reader.until((",", "]", "}", self.brackets[1]), MAX_NAME_CHARACTERS)
        value = (found or "").strip()
        value = _PYTHON_VALUES.get(value, value)
        if not _SCALAR.fullmatch(value):
            return False
        write(value)
        return True

    @property
    def _quotes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.quote, '"', "'")))

    def _read_text(self, reader: TextReader, write: Callable[[str], None], quote: str) -> Wait[bool]:
        """Read text up to and including the closing quote, and write it as JSON."""
        write('"')
        ends = (quote,) if quote == self.quote else (quote, "\\")
        while True:
            if not (yield from reader.stream_until(ends, lambda text: write(_quoted(text)))):
                return False
            if (yield from reader.literal(quote)):
                write('"')
                return True
            if (escape := (yield from self._read_escape(reader))) is None:
                return False
            write(escape)

    def _read_escape(self, reader: TextReader) -> Wait[str | None]:
        """Read an escape such as `\\n`, and return it as in JSON, or None if the text ends within it."""
        while (found := _LITERAL_ESCAPE.match(reader.text, reader.at)) is None:
            if len(reader.text) - reader.at >= _LITERAL_ESCAPE_CHARACTERS:
                break
            if reader.ended:
                return None
            yield
        if found is None:
            return _quoted((yield from reader.literal("\\")))
        yield from reader.literal(found[0])
        if code := found[1] or found[2] or found[3]:
            # Surrogates are kept as escapes, because two of them can form a character.
            character = chr(min(int(code, 16), sys.maxunicode))
            return json.dumps(character, ensure_ascii="\ud800" <= character <= "\udfff")[1:-1]
        return _quoted(_ESCAPED.get(found[0][1:], found[0]))

    def spell(self, name: str, parameters: Mapping[str, Any]) -> Sequence[Part]:
        properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
        arguments = {key: self._spell_argument(key, each, parameters) for key, each in properties.items()}
        before = self.opens[0] + "[" * self.is_list + self.before_name + name + self.brackets[0]
        after = self.brackets[1] + "]" * self.is_list + self.closes[0]
        needed = [argument for key, argument in arguments.items() if key in required]
        optional = [argument for key, argument in arguments.items() if key not in required]
        return [before, *self._spell_arguments(needed, optional), after]

    def _spell_arguments(self, needed: Sequence[list[Part]], optional: Sequence[list[Part]]) -> list[Part]:
        """Return the parts of all arguments: those that are needed first, then any of the optional ones."""
        if not needed:
            # Any of the optional arguments can be the first one.
            starts = [self._spell_arguments([each], optional[at + 1 :]) for at, each in enumerate(optional)]
            return [OptionalPart([EitherPart(starts)])] if starts else []
        parts = [*needed[0]]
        for argument in needed[1:]:
            parts += [self.separator, *argument]
        return [*parts, *(OptionalPart([self.separator, *argument]) for argument in optional)]

    def _spell_argument(self, key: str, schema: Any, parameters: Mapping[str, Any]) -> list[Part]:
        before = key + self.name_end
        if self.quote and _is_text(schema):
            before += self.quote
            texts = _choices(schema)
            return [before, ChoicePart(texts), self.quote] if texts else [before, TextPart(self.quote)]
        return [before, JsonPart(_with_definitions(schema, parameters))]


def _is_text(schema: Any) -> bool:
    return isinstance(schema, dict) and _types(schema) == {"string"}


def _choices(schema: Mapping[str, Any]) -> Sequence[str]:
    """Return the texts that a schema of text allows, or an empty sequence if it allows others too."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    # Schemas of optional values also list null, which is not text.
    return [value for value in values if isinstance(value, str)]


def _with_definitions(schema: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a parameter, with the definitions that it may refer to."""
    definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    return {**schema, **definitions} if isinstance(schema, dict) else {}


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows, or an empty set if it does not specify any."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(each for each in declared if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset().union(*(_JSON_TYPES.get(type(value), frozenset()) for value in values))
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        return frozenset().union(*map(_types, choices))
    return frozenset()


def _as_json(text: str, types: frozenset[str]) -> str:
    """Convert `text` to JSON. Text that is not JSON of an allowed type becomes a JSON string."""
    candidate = text.strip()
    candidate = _PYTHON_VALUES.get(candidate, candidate)
    if candidate[:1] in ("[", "{"):
        # Some chat templates, such as Seed-OSS's, print lists and objects as Python does.
        with suppress(SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
            candidate = _json_of_literal(candidate)
    try:
        found = _JSON_TYPES[type(_parsed(candidate))]
    except (ValueError, RecursionError):
        found = frozenset()
    return candidate if found and (found & types or not types) else f'"{_quoted(text)}"'


def _json_of_literal(text: str) -> str:
    """Return a list or an object as JSON. Text that is JSON already is returned unchanged.

    Raises:
        SyntaxError, ValueError: The text is neither JSON nor a Python literal.
        TypeError: JSON cannot represent the literal.
    """
    with suppress(ValueError):
        _parsed(text)
        return text
    with warnings.catch_warnings():
        # Python prints a warning about unknown escapes, such as those in paths on Windows.
        warnings.simplefilter("ignore")
        literal = ast.literal_eval(text)
    return json.dumps(literal, ensure_ascii=False, allow_nan=False)


def _parsed(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError for other text, and for `NaN` and `Infinity`."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# The format of Qwen 2.5 and 3, Hermes, SmolLM3, Granite 4 and many others, and the default for templates
# without tool calls.
HERMES = _JsonForm(("<tool_call>",), ("</tool_call>",), ("<tool_call>\n{", "}\n</tool_call>"))

_PHI = _JsonForm(("<|tool_call|>",), ("<|/tool_call|>",), ("<|tool_call|>[{", "}]<|/tool_call|>"))
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


def _function_tags(opening: str, closing: str) -> _TaggedForm:
    return _TaggedForm(
        opens=(opening, "<function="),
        name_end=">",
        key=("<parameter=", ">"),
        value_end="</parameter>",
        call_end="</function>",
        padded=True,
        closes=(closing,),
    )


def _dsml(block: str) -> _TaggedForm:
    """Return the format of DeepSeek V3.2 and later, which wraps calls in a block with the given name."""
    return _TaggedForm(
        opens=(f"<｜DSML｜{block}>", '<｜DSML｜invoke name="'),
        name_end='">',
        key=('<｜DSML｜parameter name="', '" string="'),
        value_open='false">',
        text_open='true">',
        value_end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>",
        closes=(f"</｜DSML｜{block}>",),
        control_tokens=("｜DSML｜",),
    )


# The formats, each with strings that identify the chat templates of its models. The first match wins.
_FORMS: tuple[tuple[Sequence[str], CallForm], ...] = (
    # The format of gpt-oss, in which the tool's name can also precede the channel.
    (
        ("<|channel|>", "functions."),
        _NamedForm(
            opens=(
                "<|start|>assistant<|channel|>commentary to=functions.",
                "<|start|>assistant to=functions.",
                "<|channel|>commentary to=functions.",
                " to=functions.",
            ),
            separators=("<|message|>",),
            around=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
            markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
            reasoning_ends=("<|start|>assistant<|channel|>commentary", "<|start|>assistant to="),
            header=r"([\w.:/-]+?)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?",
        ),
    ),
    # The format of DeepSeek R1 and V3.
    (
        ("<｜tool▁calls▁begin｜>", "```json"),
        _NamedForm(
            opens=(*_DEEPSEEK[:2], "function<｜tool▁sep｜>"),
            separators=("```json",),
            around=(
                "".join(_DEEPSEEK[:2]) + "function<｜tool▁sep｜>",
                "\n```json\n",
                "\n```" + "".join(_DEEPSEEK[3:]),
            ),
            markers=_DEEPSEEK,
            closes=("```", *_DEEPSEEK[3:]),
        ),
    ),
    # The format of DeepSeek V3.1.
    (
        ("<｜tool▁calls▁begin｜>",),
        _NamedForm(
            opens=_DEEPSEEK[:2],
            separators=_DEEPSEEK[2:3],
            around=("".join(_DEEPSEEK[:2]), "<｜tool▁sep｜>", "".join(_DEEPSEEK[3:])),
            markers=_DEEPSEEK,
            closes=_DEEPSEEK[3:],
        ),
    ),
    # The format of Kimi K2, which numbers its calls.
    (
        ("<|tool_calls_section_begin|>",),
        _NamedForm(
            opens=_KIMI[:2],
            separators=_KIMI[2:3],
            around=("".join(_KIMI[:2]) + "functions.", ":0<|tool_call_argument_begin|>", "".join(_KIMI[3:])),
            markers=_KIMI,
            closes=_KIMI[3:],
            header=r"(?:functions\.)?([\w./-]+)(?::\d+)?",
        ),
    ),
    # The format of Mistral's models since Small 3.2.
    (
        ("[TOOL_CALLS]", "[ARGS]"),
        _NamedForm(
            opens=("[TOOL_CALLS]",),
            separators=("[ARGS]",),
            around=("[TOOL_CALLS]", "[ARGS]", ""),
            markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            header=r"([\w.:/-]+)(?:\[CALL_ID\]\w+)?",
        ),
    ),
    # The format of Mistral 7B, Nemo and Small 3.
    (("[TOOL_CALLS]",), _JsonForm(("[TOOL_CALLS]",), around=("[TOOL_CALLS][{", "}]"))),
    # The format of GLM 4.5 and later.
    (
        ("<arg_key>", "<arg_value>"),
        _TaggedForm(
            opens=("<tool_call>",),
            name_end="\n",
            key=("<arg_key>", "</arg_key>"),
            value_open="<arg_value>",
            value_end="</arg_value>",
            call_end="</tool_call>",
        ),
    ),
    # The format of Qwen3-Coder, Qwen 3.5, Nemotron 3 and others, which sometimes omit the first marker.
    (("<tool_call>", "<function=", "<parameter="), _function_tags("<tool_call>", "</tool_call>")),
    # The format of Seed-OSS.
    (("<seed:tool_call>", "<function="), _function_tags("<seed:tool_call>", "</seed:tool_call>")),
    # The format of MiniMax M2.
    (
        ("<minimax:tool_call>", "<invoke name="),
        _TaggedForm(
            opens=("<minimax:tool_call>", '<invoke name="'),
            name_end='">',
            key=('<parameter name="', '">'),
            value_end="</parameter>",
            call_end="</invoke>",
            closes=("</minimax:tool_call>",),
        ),
    ),
    # The format of Command R7B and Command A.
    (
        ("<|START_ACTION|>",),
        _JsonForm(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            ('<|START_ACTION|>[{"tool_call_id": "0", ', "}]<|END_ACTION|>"),
            name_key="tool_name",
            argument_key="parameters",
        ),
    ),
    # The format of Nemotron Nano 2.
    (("<TOOLCALL>",), _JsonForm(("<TOOLCALL>",), ("</TOOLCALL>",), ("<TOOLCALL>[{", "}]</TOOLCALL>"))),
    # The format of Phi 4 mini.
    (("<|tool_call|>", "<|/tool_call|>"), _PHI),
    # Phi 4 mini's own template names only the markers around the tools.
    (("<|tool|>", "<|/tool|>"), _PHI),
    # The format of Granite 3.
    (("<|tool_call|>",), _JsonForm(("<|tool_call|>", "<tool_call>"), (), ("<|tool_call|>[{", "}]"))),
    # The formats of DeepSeek V3.2 and V4.
    (("｜DSML｜", "function_calls>"), _dsml("function_calls")),
    (("｜DSML｜", "tool_calls>"), _dsml("tool_calls")),
    # The format of Gemma 4.
    (
        ("<|tool_call>call:",),
        _LiteralForm(
            ("<|tool_call>",),
            ("<tool_call|>",),
            "call:",
            ("{", "}"),
            name_end=":",
            separator=",",
            quote='<|"|>',
        ),
    ),
    # The format of FunctionGemma.
    (
        ("<start_function_call>",),
        _LiteralForm(
            ("<start_function_call>",),
            ("<end_function_call>",),
            "call:",
            ("{", "}"),
            name_end=":",
            separator=",",
            quote="<escape>",
        ),
    ),
    # The format of LFM2 and LFM2.5.
    (
        ("<|im_start|>", "List of tools: "),
        _LiteralForm(
            ("<|tool_call_start|>",),
            ("<|tool_call_end|>",),
            "",
            ("(", ")"),
            name_end="=",
            separator=", ",
            is_list=True,
        ),
    ),
    # The format of Llama 3.
    (
        ("<|eot_id|>", '"parameters": dictionary of argument name'),
        _JsonForm(("<|python_tag|>",), (), argument_key="parameters", starts_bare=True),
    ),
)


def call_form(template: str) -> CallForm:
    """Return the tool-call format of the model with this chat template."""
    return next((form for texts, form in _FORMS if all(text in template for text in texts)), HERMES)
