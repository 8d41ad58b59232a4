"""Read tools and tool choices in the formats of all APIs.

Some programs, such as Cursor, send tools in the format of an API other than the one they call. Each format is
one entry in a table of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from edgespec.errors import OptionError
from edgespec.options.schemas.spellings import tidy_schema

__all__ = ["CHOICE_HINT", "ReadChoice", "ToolChoice", "functions_in", "read_choice", "single_call"]

ToolChoice: TypeAlias = "str | Mapping[str, Any] | None"
"""Whether the model must call a tool: `auto` lets it decide, `none` offers no tools, `required` makes it call
one.

`{"type": "function", "function": {"name": ...}}` makes it call that tool. Choices in the formats of other
APIs, such as `any`, mean the same as in those APIs.
"""

CHOICE_HINT = 'use "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}'

# The keys under which APIs put the schema of a function's arguments: OpenAI's key, Anthropic's, the Model
# Context Protocol's, and Google's two.
_PARAMETERS = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema")


def functions_in(tool: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the functions that a tool defines, in OpenAI's format.

    Returns:
        The functions, usually one. None if the tool is not a function that the caller runs, such as the
        provider's web search, or if its input is not JSON.

    Raises:
        OptionError: The schema of the arguments is ambiguous.
    """
    for read in _TOOL_FORMS:
        found = read(tool)
        if found is not None:
            return [_function(each) for each in found]
    return None


def _openai(tool: Mapping[str, Any]) -> list[Any] | None:
    """Read a tool of the form `{"type": "function", "function": {"name": ...}}`."""
    is_function = tool.get("type") in (None, "function") and isinstance(tool.get("function"), Mapping)
    return [tool["function"]] if is_function else None


def _flat(tool: Mapping[str, Any]) -> list[Any] | None:
    """Read a tool of the form `{"type": "function", "name": ...}` (Responses API). MCP tools have no type."""
    is_untyped = tool.get("type") is None and not tool.keys().isdisjoint(("name", *_PARAMETERS))
    return [tool] if is_untyped or tool.get("type") == "function" else None


def _anthropic(tool: Mapping[str, Any]) -> list[Any] | None:
    """Read an Anthropic tool with `"type": "custom"`. OpenAI's custom tools have no schema."""
    return [tool] if tool.get("type") == "custom" and "input_schema" in tool else None


def _bedrock(tool: Mapping[str, Any]) -> list[Any] | None:
    """Read a tool of the form `{"toolSpec": {"name": ..., "inputSchema": {"json": ...}}}`."""
    specification = tool.get("toolSpec")
    if not isinstance(specification, Mapping):
        return None
    schema = specification.get("inputSchema")
    inner = schema.get("json", schema) if isinstance(schema, Mapping) else schema
    return [{**specification, "inputSchema": inner}]


def _google(tool: Mapping[str, Any]) -> list[Any] | None:
    """Read a tool of the form `{"functionDeclarations": [{"name": ...}]}`."""
    listed = tool.get("functionDeclarations", tool.get("function_declarations"))
    return [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else None


_TOOL_FORMS: tuple[Callable[[Mapping[str, Any]], list[Any] | None], ...] = (
    _openai,
    _flat,
    _anthropic,
    _bedrock,
    _google,
)


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in OpenAI's format, omitting keys whose value is null."""
    function = {key: value for key, value in given.items() if key not in ("type", *_PARAMETERS)}
    schema = next((given[key] for key in _PARAMETERS if given.get(key) is not None), None)
    if schema is not None:
        function["parameters"] = tidy_schema(schema, f"the parameters of the tool {given.get('name')}")
    return {key: value for key, value in function.items() if value is not None}


@dataclass(frozen=True)
class ReadChoice:
    """A tool choice.

    Attributes:
        mode: `auto` lets the model decide, `none` offers no tools, `required` makes it call one.
        names: The only tools that the model may call. None if it may call all of them.
        single: Whether a reply may contain at most one call.
    """

    mode: Literal["auto", "none", "required"]
    names: tuple[str, ...] | None = None
    single: bool = False


_MODES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


def read_choice(choice: ToolChoice, known: Sequence[str] = ()) -> ReadChoice:
    """Interpret a tool choice.

    Args:
        choice: The tool choice, in the format of any API. Anthropic's `disable_parallel_tool_use` works
            in every format that is an object.
        known: The names of the tools, each of which is a valid choice.

    Raises:
        OptionError: The choice is in an unknown format.
    """
    single = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True
    return replace(_read_choice(choice, known), single=single)


def single_call(choice: ToolChoice, known: Sequence[str]) -> ToolChoice:
    """Return a tool choice that allows the same tools, but at most one call. See `read_choice`."""
    if isinstance(choice, str):
        choice = {"type": "tool", "name": choice} if choice in known else {"type": choice}
    return {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}


def _read_choice(choice: ToolChoice, known: Sequence[str]) -> ReadChoice:
    if choice is None:
        return ReadChoice("auto")
    if isinstance(choice, str) and choice in known and choice not in _MODES:
        return ReadChoice("required", (choice,))
    mode = choice if isinstance(choice, str) else choice.get("type")
    if isinstance(mode, str) and mode in _MODES:
        return ReadChoice(_MODES[mode])
    if isinstance(choice, Mapping):
        if mode == "allowed_tools":
            return _allowed(choice)
        name = _chosen_name(choice)
        if mode in (None, "function", "tool") and name is not None:
            return ReadChoice("required", (name,))
    if isinstance(choice, str) and known:
        raise OptionError(
            f"tool_choice names an unknown tool: {choice!r}"[:300],
            f"use one of {', '.join(known)}, or auto, none or required",
            code="tools_invalid",
        )
    raise OptionError(f"tool_choice is invalid: {choice!r}"[:300], CHOICE_HINT, code="tools_invalid")


def _allowed(choice: Mapping[str, Any]) -> ReadChoice:
    """Read OpenAI's `allowed_tools`. In chat completions, its fields are nested in an object of that name."""
    nested = choice.get("allowed_tools")
    fields = nested if isinstance(nested, Mapping) else choice
    mode, listed = fields.get("mode", "auto"), fields.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise OptionError(
            f"tool_choice is invalid: {choice!r}"[:300],
            'use {"type": "allowed_tools", "mode": "auto" or "required", "tools": [{"type": "function",'
            ' "name": NAME}]}',
            code="tools_invalid",
        )
    names = (_chosen_name(each) for each in listed if isinstance(each, Mapping))
    return ReadChoice(_MODES[mode], tuple(name for name in names if name is not None))


def _chosen_name(choice: Mapping[str, Any]) -> str | None:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    return name if isinstance(name, str) else None
