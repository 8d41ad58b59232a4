"""Chat templates: tools, calls and results reach the prompt in the form that each template expects."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.chat.message import Message, as_messages
from edgespec.chat.template import ChatTemplate, TemplateSettings

TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Report the weather"}}
CONVERSATION = as_messages(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_12345",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 3}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_12345", "content": "Sunny"},
    ]
)
# Short templates that write calls like these models' published templates.
QWEN_3 = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
    {%- else %}<|im_start|>{{ m.role }}
{{ m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function %}<tool_call>
{"name": "{{ call.name }}", "arguments": {% if call.arguments is string %}{{ call.arguments }}
            {%- else %}{{ call.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}
    {%- endif %}
{%- endfor %}"""
QWEN_3_CODER = """
{%- for tool in tools or [] %}<function>{{ tool.function.name }}</function>{% endfor %}
{%- for m in messages %}{{ m.content }}
    {%- if m.role == 'tool' %}<result>{% endif %}
    {%- for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
        {%- for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>
        {%- endfor %}</function>
    {%- endfor %}
{%- endfor %}"""
MISTRAL = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
        {{- '[TOOL_RESULTS]' + m.tool_call_id + m.content }}
    {%- elif m.tool_calls is defined %}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
            {{- '[TOOL_CALLS]' + call.function | tojson + call.id }}
        {%- endfor %}
    {%- else %}{{ m.content }}{% endif %}
{%- endfor %}"""
# It concatenates the arguments as text, and recognises calls by their missing content.
DEEPSEEK_R1 = """
{%- for m in messages %}
    {%- if m['role'] == 'assistant' and m['content'] is none %}
        {%- for call in m['tool_calls'] %}
            {%- set function = call['function'] %}
            {{- '<｜tool▁calls▁begin｜>' + function['name'] + '```json' + function['arguments'] + '```' }}
        {%- endfor %}
    {%- elif m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] }}
    {%- else %}{{ m['content'] }}{% endif %}
{%- endfor %}"""
PRINTS_ARGUMENTS = """{{ tools }}
{%- for m in messages %}{{ m.content }}
    {%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }}){% endfor %}
    {%- if m.role == 'tool' %}{{ m.name }}{% endif %}
{%- endfor %}"""
GEMMA_2 = """
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no alternation') }}{% endif %}
    {{- '<start_of_turn>' + m.role + '\n' + m.content + '<end_of_turn>\n' }}
{%- endfor %}"""


def render(source: str, messages: Any = CONVERSATION, **settings: Any) -> str:
    template = ChatTemplate(source, "<s>", "</s>")
    try:
        return template.render(messages, settings=TemplateSettings(**settings))
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (
            QWEN_3,
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
        ),
        (QWEN_3_CODER, "<parameter=city>Zürich</parameter><parameter=days>3</parameter></function>"),
        (MISTRAL, '[TOOL_CALLS]{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}'),
        (DEEPSEEK_R1, 'get_weather```json{"city": "Zürich", "days": 3}```'),
        (PRINTS_ARGUMENTS, 'get_weather({"city": "Zürich", "days": 3})'),
        (
            GEMMA_2,
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
        ),
    ],
    ids=["qwen-3", "qwen-3-coder", "mistral", "deepseek-r1", "prints-arguments", "gemma-2"],
)
def test_calls_and_results_are_in_the_prompt(source: str, call: str) -> None:
    prompt = render(source, tools=(TOOL,))
    assert call in prompt
    for text in ("Be brief.", "Weather?", "get_weather", "Sunny"):
        assert text in prompt


def test_templates_without_tools_get_them_in_the_system_prompt() -> None:
    prompt = render(GEMMA_2, tools=(TOOL,))
    assert '{"name": "get_weather", "description": "Report the weather"}' in prompt
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>' in prompt
    assert "user\n<tool_response>\nSunny\n</tool_response>" in prompt


def test_results_get_the_name_of_their_call() -> None:
    assert CONVERSATION[-1].name == "get_weather"
    assert "Sunnyget_weather" in render(PRINTS_ARGUMENTS)


def test_arguments_that_are_not_valid_stay_text() -> None:
    broken = [{"id": "a", "function": {"name": "f", "arguments": '{"city": "Zü'}}]
    messages = as_messages(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": broken},
            {"role": "tool", "content": "error", "tool_call_id": "a"},
        ]
    )
    assert '"arguments": {"city": "Zü}' in render(QWEN_3, messages)
    # A template that needs an object gets one.
    assert '<parameter=arguments>{"city": "Zü</parameter>' in render(QWEN_3_CODER, messages)


THINKING = """
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if thinking is defined and thinking %}thinks{% endif %}{{ reasoning_effort }}{{ messages[0].content }}"""


@pytest.mark.parametrize(
    ("thinking", "prompt"), [("auto", "Hi"), ("on", "thinksHi"), ("off", "<think></think>lowHi")]
)
def test_thinking(thinking: str, prompt: str) -> None:
    assert render(THINKING, [Message("user", "Hi")], thinking=thinking) == prompt
