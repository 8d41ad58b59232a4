"""Reasoning of earlier replies: each template decides whether the next prompt includes it."""

from __future__ import annotations

import pytest

from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from tests.reasoning_templates import DEEPSEEK_R1, GLM_4_7, GPT_OSS, LING_3, MAGISTRAL, QWEN_3, SEED_OSS

TALK = (Message("user", "Q1"), Message("assistant", "ANSWER", "REASONING"), Message("user", "Q2"))


@pytest.mark.long
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
    """Templates distinguish a missing `reasoning_content` from an empty one."""
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
