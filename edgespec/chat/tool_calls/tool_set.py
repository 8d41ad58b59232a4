"""The tools that a model may call in a reply, parsed from the format of any supported API.

Some programs, such as Cursor, send tools in the format of an API other than the one they call. Each format
has an entry in a table in this module.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from edgespec.errors import OptionError, TemplateError, shorten
from edgespec.options.schemas.spellings import tidy_schema

__all__ = [
    "ToolChoice",
    "ToolSet",
    "as_tool_set",
    "functions_in",
    "read_choice",
    "render_with_tools",
    "single_call",
]

_TOOL_HINT = (
    'pass dictionaries such as {"type": "function", "function": {"name": "add", "description": "Add numbers",'
    ' "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}'
)
# Time limit in seconds for finding the tool that a chat template rejects, to include it in the error. The
# limit was chosen, not measured.
_BLAME_SECONDS = 2.0
_DEEPEST_PARAMETER = 16

Definitions: TypeAlias = tuple[Mapping[str, Any], ...]
ToolChoice: TypeAlias = "str | Mapping[str, Any] | None"
"""Whether the model must call a tool.

`auto` lets it decide, `none` offers no tools, and `required` makes it call one.
`{"type": "function", "function": {"name": ...}}` makes it call that tool. Choices in the formats of other
APIs, such as `any`, mean the same as in those APIs.
"""

_CHOICE_HINT = 'use "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}'

# Keys that hold the schema of a function's arguments in the APIs of OpenAI, Anthropic, the Model Context
# Protocol and, for the last two, Google.
_PARAMETERS = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema")


@dataclass(frozen=True)
class ToolSet:
    """The tools that a model may call, after `tool_choice` has been applied.

    Attributes:
        definitions: The tools in the format of OpenAI's API, which chat templates expect.
        schemas: The JSON schema of each tool's parameters, keyed by tool name.
        required: Names of the tools, one of which the reply must call. Empty if the model decides.
        strict: Whether any tool requires that all arguments match its schema.
        single: Whether the reply ends after its first call.
    """

    definitions: Definitions = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    strict: bool = False
    single: bool = False


def as_tool_set(tools: Sequence[Mapping[str, Any]], choice: ToolChoice = "auto") -> ToolSet:
    """Validate a request's `tools` and `tool_choice`, which can be in the format of any supported API.

    Raises:
        OptionError: A tool or the choice is invalid.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise OptionError(
            f"tools must be a list, not {type(tools).__name__}", _TOOL_HINT, code="tools_invalid"
        )
    if not tools and choice == "auto":
        return ToolSet()
    functions = [each for number, tool in enumerate(tools, 1) for each in _functions(number, tool)]
    schemas = {function["name"]: function.get("parameters", {}) for function in functions}
    if len(schemas) < len(functions):
        [(repeated, _)] = Counter(function["name"] for function in functions).most_common(1)
        raise OptionError(
            f"two tools have the same name: {shorten(repeated)}",
            "give each tool a different name",
            code="tools_invalid",
        )
    chosen = read_choice(choice, tuple(schemas))
    if chosen.mode == "none":
        return ToolSet()
    if (chosen.mode == "required" or chosen.names is not None) and not functions:
        raise OptionError(
            "tool_choice requires a tool call, but no tools were given",
            "pass at least one tool",
            code="tools_invalid",
        )
    if chosen.names is not None:
        for name in chosen.names:
            if name not in schemas:
                raise OptionError(
                    f"tool_choice names an unknown tool: {name!r}"[:300],
                    f"use one of {', '.join(schemas)}",
                    code="tools_invalid",
                )
        if chosen.mode == "required" and not chosen.names:
            raise OptionError(
                "tool_choice requires a tool call, but does not allow any tool",
                "name at least one tool that the model may call",
                code="tools_invalid",
            )
    required = () if chosen.mode == "auto" else tuple(schemas) if chosen.names is None else chosen.names
    if chosen.mode == "auto" and chosen.names is not None:
        # The model must not see the tools that it may not call.
        functions = [function for function in functions if function["name"] in chosen.names]
        schemas = {function["name"]: schemas[function["name"]] for function in functions}
    return ToolSet(
        definitions=tuple({"type": "function", "function": function} for function in functions),
        schemas=schemas,
        required=required,
        strict=any(function.get("strict") is True for function in functions),
        single=chosen.single,
    )


def _functions(number: int, tool: Any) -> list[dict[str, Any]]:
    functions = functions_in(tool) if isinstance(tool, Mapping) else None
    if functions is None:
        raise OptionError(
            f"tool {number} is not a function: {tool!r}"[:300], _TOOL_HINT, code="tools_invalid"
        )
    for function in functions:
        name = function.get("name")
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise OptionError(
                f"tool {number} has an invalid name: {name!r}"[:300], _TOOL_HINT, code="tools_invalid"
            )
    return functions


def render_with_tools(render: Callable[[Definitions], str], tools: Definitions) -> str:
    """Render a chat template with tools, adding missing fields that templates rely on.

    Args:
        render: Renders the template with the given tools.
        tools: The tools, in the format of OpenAI's API.

    Raises:
        TemplateError: The template rejects a tool (the error names it) or the messages.
    """
    started = time.monotonic()
    try:
        return render(tools)
    except TemplateError as error:
        # If a template has exceeded its time limit, it would do so again.
        if not tools or time.monotonic() - started > _BLAME_SECONDS:
            raise
        with suppress(TemplateError):
            return render(tuple(map(_complete, tools)))
        raise _blamed(render, tools) or error from None


def _blamed(render: Callable[[Definitions], str], tools: Definitions) -> TemplateError | None:
    """Return an error that identifies the tool that a template rejects, or None if no tool is to blame."""
    try:
        render(())
    except TemplateError:
        return None
    deadline = time.monotonic() + _BLAME_SECONDS
    for tool in tools:
        try:
            render((tool,))
        except TemplateError as error:
            name = shorten(tool["function"]["name"])
            reason = error.reason or error.what
            return TemplateError(
                f"the model's chat template rejects the tool {name}: {reason}",
                "change or remove this tool",
                code="template_rejects_messages",
            )
        if time.monotonic() > deadline:
            break
    return None


def _complete(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with all fields that chat templates use. Fields that were not set are left empty."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, "required": [], **function.get("parameters", {})}
    complete = {"description": "", **function, "parameters": _complete_schema(parameters, _DEEPEST_PARAMETER)}
    return {**tool, "function": complete}


def _complete_schema(schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    complete = {**schema, "type": _type_name(schema), "description": schema.get("description", "")}
    properties, items = schema.get("properties"), schema.get("items")
    if depth and isinstance(properties, Mapping):
        complete["properties"] = {
            name: _complete_schema(each if isinstance(each, Mapping) else {}, depth - 1)
            for name, each in properties.items()
        }
    if depth and isinstance(items, Mapping):
        complete["items"] = _complete_schema(items, depth - 1)
    return complete


def _type_name(schema: Mapping[str, Any]) -> str:
    """Return a schema's type as a single string, because many templates concatenate it with text."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return declared
    if isinstance(declared, list):
        return next((name for name in declared if isinstance(name, str) and name != "null"), "null")
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        if isinstance(parts, list):
            names = [_type_name(part) for part in parts if isinstance(part, Mapping)]
            return next((name for name in names if name != "null"), "string")
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else "string"


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
    """Parse a tool of the form `{"type": "function", "function": {"name": ...}}`."""
    is_function = tool.get("type") in (None, "function") and isinstance(tool.get("function"), Mapping)
    return [tool["function"]] if is_function else None


def _flat(tool: Mapping[str, Any]) -> list[Any] | None:
    """Parse a tool with `"type": "function"` and a top-level name (Responses API), or an untyped MCP tool."""
    is_untyped = tool.get("type") is None and not tool.keys().isdisjoint(("name", *_PARAMETERS))
    return [tool] if is_untyped or tool.get("type") == "function" else None


def _anthropic(tool: Mapping[str, Any]) -> list[Any] | None:
    """Parse an Anthropic tool with `"type": "custom"`. OpenAI's custom tools have no schema."""
    return [tool] if tool.get("type") == "custom" and "input_schema" in tool else None


def _bedrock(tool: Mapping[str, Any]) -> list[Any] | None:
    """Parse a tool of the form `{"toolSpec": {"name": ..., "inputSchema": {"json": ...}}}`."""
    specification = tool.get("toolSpec")
    if not isinstance(specification, Mapping):
        return None
    schema = specification.get("inputSchema")
    inner = schema.get("json", schema) if isinstance(schema, Mapping) else schema
    return [{**specification, "inputSchema": inner}]


def _google(tool: Mapping[str, Any]) -> list[Any] | None:
    """Parse a tool of the form `{"functionDeclarations": [{"name": ...}]}`."""
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
    """A parsed tool choice.

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
        choice: The tool choice, in the format of any supported API. Anthropic's `disable_parallel_tool_use`
            works in every format that is an object.
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
            f"use one of {', '.join(known)}, or `auto`, `none` or `required`",
            code="tools_invalid",
        )
    raise OptionError(f"tool_choice is invalid: {choice!r}"[:300], _CHOICE_HINT, code="tools_invalid")


def _allowed(choice: Mapping[str, Any]) -> ReadChoice:
    """Parse OpenAI's `allowed_tools`. Chat completions nest its fields in an object of that name."""
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
