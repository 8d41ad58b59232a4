"""Determine which tools to offer the model, for requests in any supported API's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.chat.tool_calls.tool_set import ToolChoice, functions_in, read_choice, single_call
from edgespec.errors import OptionError
from edgespec.server.errors import invalid_request
from edgespec.server.leniency.content import plain_message

__all__ = [
    "OfferedTools",
    "checked_choice",
    "modern_message",
    "modern_tools",
    "needs_whole_calls",
    "offered_tools",
    "skipped_tools",
]


@dataclass(frozen=True)
class OfferedTools:
    """The functions that a request lets the model call.

    Attributes:
        definitions: The functions in OpenAI's format.
        namespaces: Maps the offered name of each namespaced function to its namespace and original name.
    """

    definitions: tuple[Mapping[str, Any], ...]
    namespaces: Mapping[str, tuple[str, str]]

    def offered_name(self, namespace: str | None, name: str) -> str:
        """Return the name under which a function is offered to the model."""
        wanted = (namespace, name)
        return next((offered for offered, inner in self.namespaces.items() if inner == wanted), name)


def offered_tools(tools: Sequence[Any], more: Sequence[Any] = ()) -> OfferedTools:
    """Return the tools that are functions. `skipped_tools` lists all others.

    A function in a namespace keeps its name, unless another function has the same name.

    Args:
        tools: The tools of a request.
        more: Tools that the conversation adds. Duplicates are omitted.

    Raises:
        ApiError: A tool is invalid.
    """
    found = [each for at, tool in enumerate(tools) for each in _functions(f"tools.{at}", tool, None)]
    names = {(namespace, function.get("name")) for namespace, function in found}
    for at, tool in enumerate(more):
        for namespace, function in _functions(f"tools.{at}", tool, None):
            if (namespace, function.get("name")) not in names:
                names.add((namespace, function.get("name")))
                found.append((namespace, function))
    counts = Counter(function.get("name") for _, function in found)
    definitions, namespaces = [], {}
    for namespace, function in found:
        name = function.get("name")
        if namespace is not None and isinstance(name, str):
            offered = f"{namespace}__{name}" if counts[name] > 1 else name
            namespaces[offered] = (namespace, name)
            function = {**function, "name": offered}
        definitions.append({"type": "function", "function": function})
    return OfferedTools(tuple(definitions), namespaces)


def skipped_tools(tools: Sequence[Any], place: str = "tools") -> list[str]:
    """Return the locations of tools that are not functions, such as the provider's web search."""
    skipped = []
    for at, tool in enumerate(tools):
        inner = _in_namespace(tool)
        if inner is not None:
            skipped += skipped_tools(inner, f"{place}.{at}.tools")
        elif isinstance(tool, Mapping) and _read(f"{place}.{at}", tool) is None:
            skipped.append(f"{place}.{at}")
    return skipped


def checked_choice(
    choice: ToolChoice, offered: OfferedTools, tools: Sequence[Any], *, parallel: bool | None = None
) -> ToolChoice:
    """Validate and return a request's tool choice.

    Args:
        choice: The tool choice, in the format of any supported API.
        offered: The tools that the model can call.
        tools: All tools of the request.
        parallel: OpenAI's `parallel_tool_calls`. False allows at most one call.

    Raises:
        ApiError: The choice is invalid, or it requires a call but every tool was skipped.
    """
    choice = choice or "auto"  # An empty object or string means that no choice was made.
    known = [definition["function"].get("name") for definition in offered.definitions]
    try:
        chosen = read_choice(choice, [name for name in known if isinstance(name, str)])
    except OptionError as error:
        raise invalid_request(str(error), param="tool_choice", code=error.code) from None
    if chosen.mode == "required" and not known and (skipped := skipped_tools(tools)):
        raise invalid_request(
            f"tool_choice requires a call, but the model can call none of the tools, because {skipped[0]} is"
            " not a function that your program runs; add a function, or set tool_choice to auto",
            param="tool_choice",
            code="tools_invalid",
        )
    return single_call(choice, known) if parallel is False else choice


def needs_whole_calls(headers: Mapping[str, str]) -> bool:
    """Return whether a client needs each streamed tool call as a single event.

    Mistral's API sends calls this way, and its clients, such as `mistralai` and `ai-sdk/mistral`, fail on
    partial calls without a name.

    Args:
        headers: The HTTP headers, with lower-case names.
    """
    return "mistral" in headers.get("user-agent", "").lower()


def modern_tools(
    tools: Sequence[Any],
    tool_choice: ToolChoice,
    functions: Sequence[Mapping[str, Any]],
    function_call: ToolChoice,
) -> tuple[Sequence[Any], ToolChoice]:
    """Return the tools and the tool choice of a chat request, including those in OpenAI's older fields.

    Args:
        tools: The tools of the request.
        tool_choice: The tool choice of the request.
        functions: The older form of tools: functions without a type.
        function_call: The older form of the tool choice: auto, none, or an object with the function's name.

    Raises:
        ApiError: The request has tools in both forms, or `function_call` without functions.
    """
    if not functions:
        if function_call in (None, "", {}, "auto", "none"):
            return tools, tool_choice
        raise invalid_request(
            "function_call requires functions; add functions, or use tools and tool_choice",
            param="function_call",
            code="tools_invalid",
        )
    if tools:
        raise invalid_request(
            "functions and tools cannot be used together; put all functions in tools",
            param="functions",
            code="option_conflict",
        )
    if isinstance(function_call, Mapping) and function_call:
        function_call = {"type": "function", "function": dict(function_call)}
    return [{"type": "function", "function": dict(each)} for each in functions], function_call or tool_choice


def modern_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert older and unusual forms of tool calls and results in a chat message to the current form.

    Before OpenAI's API had tools, a message contained a single `function_call`, whose result had the role
    `function`. Neither has an id, so the name serves as the id.
    """
    message = plain_message(message)
    call, calls = message.get("function_call"), message.get("tool_calls")
    if isinstance(call, Mapping) and call.get("name") and not calls:
        del message["function_call"]
        message["tool_calls"] = [{"id": call["name"], "type": "function", "function": dict(call)}]
    elif not call and "function_call" in message:
        del message["function_call"]
    if isinstance(calls, list):
        message["tool_calls"] = [_modern_call(each) for each in calls]
    if message.get("role") == "function":
        message["role"] = "tool"
        message.setdefault("tool_call_id", message.get("name"))
    return message


def _modern_call(call: Any) -> Any:
    """Convert a custom tool call, whose input is text, to a function call."""
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return {"id": call.get("id"), "type": "function", "function": function}


def _functions(
    place: str, tool: Any, namespace: str | None
) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    if not isinstance(tool, Mapping):
        raise invalid_request(
            f"{place} must be an object, not {tool!r}"[:200], param=place, code="tools_invalid"
        )
    inner = _in_namespace(tool)
    if inner is not None:
        for at, each in enumerate(inner):
            yield from _functions(f"{place}.tools.{at}", each, str(tool.get("name", "")))
        return
    for function in _read(place, tool) or ():
        yield namespace, function


def _in_namespace(tool: Any) -> list[Any] | None:
    """Return the tools in a namespace of OpenAI's Responses API, or None if the tool is not a namespace."""
    if not isinstance(tool, Mapping) or tool.get("type") != "namespace":
        return None
    inner = tool.get("tools")
    return inner if isinstance(inner, list) else []


def _read(place: str, tool: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    try:
        return functions_in(tool)
    except OptionError as error:
        raise invalid_request(str(error), param=place, code=error.code) from None
