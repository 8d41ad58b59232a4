"""A continued reply keeps its answer and its reasoning, in the format that the model uses."""

from __future__ import annotations

import pytest

from edgespec.chat.message import Message, as_message
from edgespec.chat.reasoning import REASONING_MARKERS
from edgespec.chat.reply_start import fitted_to_prompt, text_to_continue, whole_characters
from edgespec.chat.reply_text import split_reply
from edgespec.errors import OptionError
from tests.raising import raises
from tests.reasoning_templates import GLM_4_7, GPT_OSS, OPENS_REASONING, QWEN_3

CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
PAIRS = [(opening, close) for opening, close in REASONING_MARKERS.items() if close]


def assistant(content: str = "", **fields: object) -> Message:
    return as_message(1, {"role": "assistant", "content": content, **fields})


class TestText:
    @pytest.mark.parametrize(
        ("messages", "text"),
        [
            ([assistant("Use `ls`")], "Use `ls`"),
            ([assistant("Use", reasoning="Hm.")], "<think>\nHm.\n</think>\n\nUse"),
            ([assistant(reasoning="Hm.")], "<think>\nHm."),
            ([assistant("<think>\nHm")], "<think>\nHm"),
            ([assistant("<think>\n\n</think>\n\nUse")], "<think>\n\n</think>\n\nUse"),
            ([assistant("[THINK]Hm[/THINK]Use")], "[THINK]Hm[/THINK]Use"),
            ([assistant("Use"), assistant(" `ls`")], "Use `ls`"),
            ([assistant(reasoning="Hm."), assistant("Use")], "<think>\nHm.\n</think>\n\nUse"),
            ([assistant("<think>\nHm"), assistant("Use")], "<think>\nHm\n</think>\n\nUse"),
            ([assistant("Use"), assistant(reasoning="Hm.")], "<think>\nHm.\n</think>\n\nUse"),
            ([assistant(reasoning="A"), assistant("x", reasoning="B")], "<think>\nA\n\nB\n</think>\n\nx"),
            ([assistant(), assistant("Use")], "Use"),
            ([], ""),
        ],
    )
    def test_messages_become_one_reply(self, messages: list[Message], text: str) -> None:
        assert text_to_continue(messages) == text

    @pytest.mark.parametrize(
        "messages",
        [
            [assistant(tool_calls=[CALL])],
            [assistant("Let me see.", tool_calls=[CALL])],
            [assistant(reasoning="Hm.", tool_calls=[CALL]), assistant("Use")],
        ],
    )
    def test_calls_without_results_are_refused(self, messages: list[Message]) -> None:
        with raises(OptionError, "'now'", code="messages_invalid") as caught:
            text_to_continue(messages)
        assert "role `tool`" in caught.value.next_step

    @pytest.mark.parametrize("character", ["🙂", "日", "é", "👩‍👩‍👧"])
    def test_part_of_a_character_is_left_out(self, character: str) -> None:
        encoded = character.encode()
        for cut in range(len(encoded)):
            whole = encoded[:cut].decode("utf-8", "ignore")
            for text in ("", "Use ", "🙂"):
                cut_text = text + encoded[:cut].decode("utf-8", "replace")
                assert whole_characters(cut_text) == text + whole

    def test_half_a_surrogate_pair_is_left_out(self) -> None:
        assert whole_characters("Use \ud83d") == "Use "
        assert whole_characters("\ufffd Use") == "\ufffd Use"


class TestFittedToThePrompt:
    @pytest.mark.parametrize("space", ["", "\n"])
    @pytest.mark.parametrize(("opening", "close"), PAIRS)
    def test_reasoning_that_the_prompt_opens(self, opening: str, close: str, space: str) -> None:
        marker, prompt = opening + space, f"Hi{opening}{space}"

        def parts(text: str) -> tuple[str, str]:
            fitted = fitted_to_prompt(text, prompt, prompt)
            split = split_reply(marker + fitted)
            assert (marker + fitted).count(opening) == 1
            return split.reasoning, split.answer

        assert parts("Use `ls`") == ("", "Use `ls`")
        assert parts('{"a": ') == ("", '{"a": ')
        for given, end in PAIRS:
            assert parts(f"{given}Hm.{end}Use") == ("Hm.", "Use")
            assert parts(f"{given}\nHm.\n{end}\n\nUse") == ("Hm.", "Use")
            assert parts(f"{given}\nHm.") == ("Hm.", "")
        # The text of a reply whose reasoning the prompt opened.
        assert parts(f"Hm.{close}Use") == ("Hm.", "Use")

    @pytest.mark.parametrize(("opening", "close"), PAIRS)
    def test_reasoning_gets_the_markers_of_the_template(self, opening: str, close: str) -> None:
        template = f"{{% if m.reasoning %}}{opening}{{{{ m.reasoning }}}}{close}{{% endif %}}"
        for given, end in PAIRS:
            fitted = fitted_to_prompt(f"{given}Hm.{end}Use", "Hi", template)
            assert fitted.startswith(opening)
            assert split_reply(fitted)[:2] == ("Hm.", "Use")
        assert fitted_to_prompt(f"{opening}Hm.{close}Use", "Hi", template) == f"{opening}Hm.{close}Use"

    @pytest.mark.parametrize(
        ("text", "prompt", "template", "fitted"),
        [
            ("Use", "<|im_start|>assistant\n", QWEN_3, "Use"),
            ("Use", "<|im_start|>assistant\n<think>\n", OPENS_REASONING, "\n</think>\n\nUse"),
            ("Use", "<|assistant|><think>", GLM_4_7, "</think>Use"),
            ("Use", "<|start|>assistant", GPT_OSS, "<|channel|>final<|message|>Use"),
            ("Use", "<|start|>assistant<|channel|>final<|message|>", GPT_OSS, "Use"),
            (
                "<|channel|>final<|message|>Use", "<|start|>assistant", GPT_OSS,
                "<|channel|>final<|message|>Use",
            ),
            ("<think>\nHm.", "Hi", "no marker", "<think>\nHm."),
        ],
    )  # fmt: skip
    def test_published_forms(self, text: str, prompt: str, template: str, fitted: str) -> None:
        assert fitted_to_prompt(text, prompt, template) == fitted
