"""The tools that a model may call in a reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from edgespec.errors import OptionError, shorten

__all__ = ["ToolChoice", "ToolSet", "as_tool_set"]

ToolChoice: TypeAlias = "Literal['auto', 'none', 'required'] | Mapping[str, Any]"
"""`auto` lets the model decide, `none` offers no tools, `required` makes it call one.

`{"type": "function", "function": {"name": ...}}` makes it call that tool.
"""

_CHOICE_HINT = 'use "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}'
_TOOL_HINT = (
    'pass dictionaries such as {"type": "function", "function": {"name": "add", "description": "Add numbers",'
    ' "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}'
)


@dataclass(frozen=True)
class ToolSet:
    """The tools that a model may call, after `tool_choice` has been applied.

    Attributes:
        definitions: The tools as chat templates expect them, which is the format of OpenAI's API.
        schemas: The JSON schema of each tool's parameters, by the tool's name.
        required: The reply must call one of the tools with these names. Empty if the model decides.
        strict: Whether a tool demands that all arguments match its schema.
    """

    definitions: tuple[Mapping[str, Any], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    strict: bool = False


def as_tool_set(tools: Sequence[Mapping[str, Any]], choice: ToolChoice = "auto") -> ToolSet:
    """Validate the `tools` and the `tool_choice` of a request.

    Raises:
        OptionError: A tool or the choice is invalid.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise OptionError(f"tools must be a list, not {type(tools).__name__}", _TOOL_HINT)
    functions = [_function(number, tool) for number, tool in enumerate(tools, 1)]
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    if len(schemas) < len(functions):
        [(repeated, _)] = Counter(function["name"] for function in functions).most_common(1)
        raise OptionError(
            f"two tools have the same name: {shorten(repeated)}", "give each tool a different name"
        )
    named = choice.get("function") if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if choice == "none":
        return ToolSet()
    if choice == "auto":
        required: tuple[str, ...] = ()
    elif choice == "required":
        required = tuple(schemas)
    elif isinstance(name, str):
        required = (name,)
    else:
        raise OptionError(f"tool_choice is invalid: {choice!r}"[:300], _CHOICE_HINT)
    if choice != "auto" and not functions:
        raise OptionError("tool_choice requires a tool call, but there are no tools", "pass tools")
    if isinstance(name, str) and name not in schemas:
        raise OptionError(
            f"tool_choice names an unknown tool: {name!r}"[:300], f"use one of {', '.join(schemas)}"
        )
    return ToolSet(
        definitions=tuple({"type": "function", "function": function} for function in functions),
        schemas=schemas,
        required=required,
        strict=any(function.get("strict") is True for function in functions),
    )


def _function(number: int, tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise OptionError(f"tool {number} is not a function: {tool!r}"[:300], _TOOL_HINT)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise OptionError(f"tool {number} has an invalid name: {name!r}"[:300], _TOOL_HINT)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise OptionError(
            f"the parameters of the tool {name} must be a JSON schema, not {type(parameters).__name__}",
            _TOOL_HINT,
        )
    return function
