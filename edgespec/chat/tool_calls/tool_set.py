"""The tools that a model may call in a reply."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edgespec.chat.tool_calls.tool_spellings import ToolChoice, functions_in, read_choice
from edgespec.errors import OptionError, TemplateError, shorten

__all__ = ["ToolChoice", "ToolSet", "as_tool_set", "render_with_tools"]

_TOOL_HINT = (
    'pass dictionaries such as {"type": "function", "function": {"name": "add", "description": "Add numbers",'
    ' "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}'
)
# Time limit in seconds for finding the tool that a chat template rejects, so that the error can name it. The
# value was chosen, not measured.
_BLAME_SECONDS = 2.0
_DEEPEST_PARAMETER = 16

Definitions: TypeAlias = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class ToolSet:
    """The tools that a model may call, after `tool_choice` has been applied.

    Attributes:
        definitions: The tools in the format of OpenAI's API, which chat templates expect.
        schemas: The JSON schema of each tool's parameters, keyed by tool name.
        required: Names of the tools of which the reply must call one. Empty if the model decides.
        strict: Whether any tool requires that all arguments match its schema.
        single: Whether the reply ends after its first call.
    """

    definitions: Definitions = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    strict: bool = False
    single: bool = False


def as_tool_set(tools: Sequence[Mapping[str, Any]], choice: ToolChoice = "auto") -> ToolSet:
    """Validate a request's `tools` and `tool_choice`, which can be in the format of any API.

    Raises:
        OptionError: A tool or the choice is invalid.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise OptionError(
            f"tools must be a list, not {type(tools).__name__}", _TOOL_HINT, code="tools_invalid"
        )
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
            "tool_choice requires a tool call, but there are no tools", "pass tools", code="tools_invalid"
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
                "tool_choice requires a tool call, but allows no tool", "name a tool", code="tools_invalid"
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
    """Render a chat template with tools, filling in fields that templates take for granted.

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
        # A template that has exceeded its time limit once would do so again.
        if not tools or time.monotonic() - started > _BLAME_SECONDS:
            raise
        with suppress(TemplateError):
            return render(tuple(map(_complete, tools)))
        raise _blamed(render, tools) or error from None


def _blamed(render: Callable[[Definitions], str], tools: Definitions) -> TemplateError | None:
    """Return an error that names the tool that a template rejects, or None if no tool is to blame."""
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
            reason = error.what.partition(": ")[2] or error.what
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
