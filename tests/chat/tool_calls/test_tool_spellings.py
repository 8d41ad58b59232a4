"""Tools, choices and arguments in other APIs' and languages' formats mean the same as in OpenAI's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edgespec.chat.message import Message, as_messages
from edgespec.chat.template import ChatTemplate, TemplateSettings
from edgespec.chat.tool_calls.calls import ToolCall, as_tool_calls
from edgespec.chat.tool_calls.tool_set import (
    ToolSet,
    as_tool_set,
    functions_in,
    render_with_tools,
    single_call,
)
from edgespec.errors import OptionError, TemplateError
from tests.raising import raises

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "number"}}}
ADD: dict[str, Any] = {"name": "add", "description": "Add"}
EXPECTED = {"type": "function", "function": {**ADD, "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    "tool",
    [
        EXPECTED,
        {"function": EXPECTED["function"]},
        {"type": "function", "function": {**ADD, "parameters": json.dumps(SCHEMA), "strict": None}},
        {"type": "function", **ADD, "parameters": SCHEMA},
        {**ADD, "parameters": SCHEMA},
        {**ADD, "input_schema": SCHEMA},
        {"type": "custom", **ADD, "input_schema": SCHEMA},
        {**ADD, "inputSchema": SCHEMA},
        {"toolSpec": {**ADD, "inputSchema": {"json": SCHEMA}}},
        {
            "functionDeclarations": [
                {**ADD, "parameters": {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}}}}
            ]
        },
    ],
)
def test_tools(tool: Any) -> None:
    tools = as_tool_set([tool])
    assert tools.definitions == (EXPECTED,)
    assert tools.schemas == {"add": SCHEMA}


@pytest.mark.parametrize("parameters", [None, [], {}, "", "missing"])
def test_tools_without_parameters(parameters: Any) -> None:
    given = {} if parameters == "missing" else {"parameters": parameters}
    tools = as_tool_set([{"type": "function", "function": {"name": "now", "description": None, **given}}])
    assert tools.definitions[0]["function"] in ({"name": "now"}, {"name": "now", "parameters": {}})
    assert tools.schemas == {"now": {}}


@pytest.mark.parametrize(
    "tool", [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "mcp", "x": 1}, {}]
)
def test_other_tools_are_no_functions(tool: Any) -> None:
    assert functions_in(tool) is None
    with raises(OptionError, "tool 1", code="tools_invalid"):
        as_tool_set([tool])


def test_a_wrong_schema_names_the_tool() -> None:
    with raises(OptionError, "tool add", code="constraint_invalid"):
        as_tool_set([{**ADD, "parameters": {"properties": [1]}}])


@pytest.mark.parametrize(
    ("choice", "offered", "required"),
    [
        (None, ["add", "now"], ()),
        ({"type": "auto"}, ["add", "now"], ()),
        ("any", ["add", "now"], ("add", "now")),
        ({"type": "any", "disable_parallel_tool_use": True}, ["add", "now"], ("add", "now")),
        ({"type": "required"}, ["add", "now"], ("add", "now")),
        ({"type": "none"}, [], ()),
        ({"type": "function", "function": {"name": "now"}}, ["add", "now"], ("now",)),
        ({"type": "function", "name": "now"}, ["add", "now"], ("now",)),
        ({"type": "tool", "name": "now"}, ["add", "now"], ("now",)),
        ({"name": "now"}, ["add", "now"], ("now",)),
        ("now", ["add", "now"], ("now",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
            ["now"],
            (),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
            ["add", "now"],
            ("now",),
        ),
    ],
)
def test_choices(choice: Any, offered: list[str], required: tuple[str, ...]) -> None:
    tools = as_tool_set([EXPECTED, NOW], choice)
    assert [each["function"]["name"] for each in tools.definitions] == offered
    assert tools.required == required
    assert tools.single == (isinstance(choice, dict) and "disable_parallel_tool_use" in choice)
    single = as_tool_set([EXPECTED, NOW], single_call(choice, ("add", "now")))
    assert single == (ToolSet() if tools == ToolSet() else replace(tools, single=True))


@pytest.mark.parametrize(
    "choice",
    [
        "sometimes",
        {"type": "web_search"},
        {"type": "function"},
        {"type": "tool", "name": "other"},
        {"type": "allowed_tools", "mode": "required", "tools": []},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "other"}]},
        {"type": "allowed_tools"},
    ],
)
def test_uncertain_choices_are_refused(choice: Any) -> None:
    with raises(OptionError, "tool_choice", code="tools_invalid"):
        as_tool_set([EXPECTED, NOW], choice)


NO_ARGUMENTS: tuple[Any, ...] = ("", " ", "null", "[]", '""', '"{}"', '"null"', None, [], {})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *((each, "{}") for each in NO_ARGUMENTS),
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        (json.dumps('{"a": 1}'), '{"a": 1}'),
        ('{"a": ', '{"a": '),
        ("five", "five"),
        ("[1]", "[1]"),
    ],
)
def test_arguments(given: Any, meant: str) -> None:
    (call,) = as_tool_calls(1, [{"id": "c", "function": {"name": "f", "arguments": given}}])
    assert call.arguments == meant
    (missing,) = as_tool_calls(1, [{"id": "c", "function": {"name": "f"}}])
    assert missing.arguments == "{}"


EACH_CALL = "{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{}{{% endfor %}}{{% endfor %}}"


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [
        EACH_CALL.format('{"arguments": {{ c.function.arguments | tojson }}}'),
        EACH_CALL.format("{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}"),
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("arguments", ["", "null", "[]"])
def test_prompts_show_a_call_without_arguments_as_empty_object(source: str, arguments: str) -> None:
    template = ChatTemplate(source, "", "")

    def prompt(arguments: str) -> str:
        return template.render([Message("assistant", "", tool_calls=(ToolCall("c", "now", arguments),))])

    assert prompt(arguments) == prompt("{}")
    template.close()


TAKES_FOR_GRANTED = (
    "{{ t.function.description + ':' }}",
    "{{ '// ' + t.function.description }}",
    "{% for n, p in t.function.parameters.properties.items() %}{{ n + p.type + p.description }}{% endfor %}",
    "{% for n, p in t.function.parameters.properties | items %}{{ n ~ (p.type | upper) }}{% endfor %}",
    "{{ t.function.parameters.required | join }}",
)
BARE_TOOLS: list[dict[str, Any]] = [
    {"name": "now"},
    {"name": "now", "description": None, "parameters": None},
    {"name": "now", "parameters": {"type": "object", "properties": []}},
    {
        "name": "add",
        "parameters": {
            "properties": {
                "a": {},
                "b": {"type": ["string", "null"]},
                "c": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
            }
        },
    },
]


@pytest.mark.parametrize("use", TAKES_FOR_GRANTED)
@pytest.mark.parametrize("tool", BARE_TOOLS)
def test_templates_get_the_fields_that_they_take_for_granted(use: str, tool: dict[str, Any]) -> None:
    template = ChatTemplate(
        "{% for t in tools or [] %}" + use + "{% endfor %}{{ messages[0].content }}", "", ""
    )
    assert render(template, [tool]).endswith("Hi")
    template.close()


def test_tools_are_not_changed_if_the_template_shows_them() -> None:
    template = ChatTemplate("{% for t in tools %}{{ t | tojson }}{% endfor %}", "", "")
    assert json.loads(render(template, [{"name": "now"}])) == NOW
    template.close()


def test_a_rejected_tool_is_named() -> None:
    check = "{% if t.function.name == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    template = ChatTemplate(
        "{% for t in tools or [] %}" + check + "{% endfor %}{{ messages[0].content }}", "", ""
    )
    with raises(TemplateError, "bad", code="template_rejects_messages") as error:
        render(template, [{"name": "now"}, {"name": "bad"}])
    assert "messages" not in str(error.value)
    template.close()


def test_rejected_messages_are_not_blamed_on_a_tool() -> None:
    template = ChatTemplate("{% for t in tools or [] %}{% endfor %}{{ raise_exception('no') }}", "", "")
    with raises(TemplateError, "every"):
        render(template, [{"name": "now"}])
    template.close()


def render(template: ChatTemplate, tools: Any) -> str:
    messages = as_messages([{"role": "user", "content": "Hi"}])
    definitions = as_tool_set(tools).definitions
    return render_with_tools(
        lambda offered: template.render(messages, None, TemplateSettings(offered)), definitions
    )
