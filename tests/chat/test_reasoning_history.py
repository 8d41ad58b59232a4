"""Reasoning of earlier replies: each template decides whether the next prompt contains it."""

from __future__ import annotations

import pytest

from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate

# Short templates that treat earlier reasoning as the published templates of these models do.
QWEN_3 = """
{%- set last = messages | map(attribute='role') | list | length - 1 %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- set reasoning = '' %}
    {%- if m.reasoning_content is defined and m.reasoning_content is not none %}
        {%- set reasoning = m.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last %}
        {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}"""
DEEPSEEK_R1 = """
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}
    {%- if m['role'] == 'assistant' %}
        {%- set content = m['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜><think>\n' }}"""
GLM_4_7 = """
{%- for m in messages %}
    {%- if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}
    {%- if m.role == 'assistant' %}<|assistant|></think>{{ m.content.strip() }}{% endif %}
{%- endfor %}<|assistant|><think>"""
LING_3 = """
{%- for m in messages %}
    {%- if m.role == 'user' %}<role>HUMAN</role>{{ m.content }}<|role_end|>{% endif %}
    {%- if m.role == 'assistant' %}
        {{- '<role>ASSISTANT</role>\n<think>' + (m.reasoning_content or '') + '</think>' + m.content }}
        {{- '<|role_end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<role>ASSISTANT</role>\n<think>' }}"""
SEED_OSS = """
{%- for m in messages %}
    {{- '<seed:bos>' + m.role + '\n' }}
    {%- if m.reasoning_content %}{{ '<seed:think>' + m.reasoning_content + '</seed:think>\n' }}{% endif %}
    {{- m.content + '<seed:eos>' }}
{%- endfor %}
{{- '<seed:bos>assistant\n' }}"""
MAGISTRAL = """
{%- for m in messages %}
    {%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% endif %}
    {%- if m.role == 'assistant' %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""
GPT_OSS = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>' in m.content %}{{ raise_exception('<|channel|> in the content') }}{% endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' }}"""

TALK = (Message("user", "Q1"), Message("assistant", "ANSWER", "REASONING"), Message("user", "Q2"))


@pytest.mark.parametrize("source", [QWEN_3, DEEPSEEK_R1, GLM_4_7, MAGISTRAL, GPT_OSS])
def test_templates_that_leave_earlier_reasoning_out(source: str) -> None:
    prompt = ChatTemplate(source, "<s>", "</s>").render(TALK)
    assert "ANSWER" in prompt
    assert "REASONING" not in prompt


@pytest.mark.parametrize(
    ("source", "reply"),
    [
        (LING_3, "<think>REASONING</think>ANSWER<|role_end|>"),
        (SEED_OSS, "<seed:think>REASONING</seed:think>\nANSWER<seed:eos>"),
    ],
)
def test_templates_that_keep_earlier_reasoning(source: str, reply: str) -> None:
    assert reply in ChatTemplate(source, "<s>", "</s>").render(TALK)


def test_a_message_without_reasoning_looks_as_before() -> None:
    """Templates tell a missing `reasoning_content` from an empty one."""
    assert Message("assistant", "ANSWER").for_template() == {"role": "assistant", "content": "ANSWER"}
    inline = Message("assistant", "<think>\nREASONING\n</think>\n\nANSWER")
    prompt = ChatTemplate(QWEN_3, "<s>", "</s>").render([TALK[0], inline, TALK[2]])
    assert "<|im_start|>assistant\nANSWER<|im_end|>" in prompt
    assert "REASONING" not in prompt


def test_the_first_message_keeps_its_place_without_a_system_role() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + LING_3
    prompt = ChatTemplate(source, "<s>", "</s>").render([Message("system", "S"), *TALK])
    assert "<role>HUMAN</role>S\n\nQ1<|role_end|>" in prompt
    assert "<think>REASONING</think>ANSWER" in prompt
