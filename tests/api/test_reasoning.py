"""Reasoning in replies: it is marked, and prompts after it equal freshly built ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import Message, Runtime
from edgespec.backends import llamacpp
from edgespec.chat.message import reply_message
from edgespec.chat.prompt import PromptBuilder
from edgespec.decode.drafter_set import DrafterSet
from edgespec.model.base import LoadOptions, Vocabulary
from tests.cases import first
from tests.forced import Begin
from tests.reasoning_templates import KEEPS_ALL, MAGISTRAL, OPENS_REASONING, QWEN_3
from tests.tabular import TabularModel

FIRST, SECOND = "How do I list files by size?", "And by name?"
OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 60, "temperature": 0.7}
THOUGHT = "<think>\nThe user wants `ls`.\n</think>\n\n"


def begin(runtime: Runtime, text: str) -> dict[str, Any]:
    """The options of a reply that begins with `text`."""
    tokens = runtime.vocabulary.tokenize(text, special=False, start=False)
    return OPTIONS | {"processors": [Begin(tokens)]}


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with edgespec.load("demo") as runtime:
        yield runtime


@pytest.fixture
def with_template(demo_target: Path) -> Callable[[str], Any]:
    """Load the demo model with another chat template."""

    @contextmanager
    def load(template: str) -> Iterator[Runtime]:
        model = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=1024))
        model.vocabulary.chat_template = template
        with Runtime(model, None, DrafterSet(model)) as runtime:
            yield runtime

    return load


class TestReplies:
    @pytest.mark.long
    @pytest.mark.parametrize("method", first(["none", "model+ngram", "model", "ngram"], 2))
    def test_reasoning_is_marked(self, demo: Runtime, method: str) -> None:
        stream = demo.stream(FIRST, method=method, **begin(demo, THOUGHT))
        chunks = list(stream)
        reply = stream.reply
        assert reply.text.startswith(THOUGHT)
        assert reply.reasoning == "The user wants `ls`."
        assert reply.answer == reply.text.removeprefix(THOUGHT) != ""
        assert "".join(chunk.text for chunk in chunks if chunk.reasoning) == reply.reasoning
        assert "".join(chunk.text for chunk in chunks if not chunk.reasoning) == reply.answer
        assert sum(chunk.token_count for chunk in chunks) == len(reply.tokens)
        assert "".join(chunk.raw_text for chunk in chunks) == reply.text
        thought_tokens = len(demo.vocabulary.tokenize(THOUGHT, special=False, start=False))
        reasoning_tokens = sum(chunk.token_count for chunk in chunks if chunk.reasoning)
        # The demo model spells the markers with several tokens each.
        assert thought_tokens - 8 <= reasoning_tokens <= thought_tokens
        assert reply.tokens == demo.generate(FIRST, method="none", **begin(demo, THOUGHT)).tokens
        assert reply.to_json().items() >= {
            "text": reply.text, "reasoning": reply.reasoning, "answer": reply.answer,
        }.items()  # fmt: skip

    def test_ordinary_replies_are_all_answer(self, demo: Runtime) -> None:
        stream = demo.stream(FIRST, **OPTIONS)
        assert not any(chunk.reasoning for chunk in stream)
        assert (stream.reply.reasoning, stream.reply.answer) == ("", stream.reply.text)

    def test_a_reply_that_ends_while_reasoning_has_no_answer(self, demo: Runtime) -> None:
        reply = demo.generate(FIRST, **begin(demo, "<think>\nThe user") | {"max_tokens": 14})
        assert reply.finish_reason == "length"
        assert reply.reasoning.startswith("The user")
        assert reply.answer == ""
        assert reply.text.endswith(reply.reasoning)

    def test_a_closed_stream_has_the_reasoning_so_far(self, demo: Runtime) -> None:
        stream = demo.stream(FIRST, **begin(demo, THOUGHT))
        while not next(stream).text:
            pass
        stream.close()
        assert stream.reply.reasoning
        assert stream.reply.answer == ""

    def test_stop_strings_see_the_markers(self, demo: Runtime) -> None:
        reply = demo.generate(FIRST, stop=["</think>"], **begin(demo, THOUGHT))
        assert reply.text == "<think>\nThe user wants `ls`.\n"
        assert (reply.reasoning, reply.answer) == ("The user wants `ls`.", "")

    def test_a_question_with_markers_is_left_alone(self, demo: Runtime) -> None:
        question = "<think>What is this?</think>"
        plain = demo.vocabulary.tokenize(question, special=False, start=False)
        chat = demo.chat()
        reply = chat.ask(question, **OPTIONS)
        assert (reply.reasoning, chat.messages[0].content) == ("", question)
        assert demo.count_tokens(chat.messages[:1]) > len(plain)

    def test_a_prompt_can_open_the_reasoning(self, with_template: Callable[[str], Any]) -> None:
        with with_template(OPENS_REASONING) as runtime:
            reply = runtime.generate(FIRST, **begin(runtime, "Hm.\n</think>\n\n"))
            assert reply.reasoning == "Hm."
            assert reply.text == f"Hm.\n</think>\n\n{reply.answer}"
            raw = runtime.generate("<think>\n", raw=True, **begin(runtime, "Hm.\n</think>\nYes"))
            assert raw.reasoning == "Hm."
            assert raw.answer.startswith("Yes")


class TestConversations:
    @pytest.mark.long
    @pytest.mark.parametrize("template", [QWEN_3, KEEPS_ALL, OPENS_REASONING])
    def test_the_next_prompt_equals_a_fresh_one(
        self, with_template: Callable[[str], Any], template: str
    ) -> None:
        thought = THOUGHT.removeprefix("<think>\n") if template is OPENS_REASONING else THOUGHT
        with with_template(template) as runtime:
            chat = runtime.chat("Be brief.")
            first = chat.ask(FIRST, **begin(runtime, thought))
            answer = Message("assistant", first.answer, "The user wants `ls`.")
            assert chat.messages == [Message("user", FIRST), answer]
            asked = [Message("system", "Be brief."), *chat.messages, Message("user", SECOND)]
            assert runtime.template is not None
            fresh = PromptBuilder(runtime.template, runtime.vocabulary).build(asked)
            assert ("wants `ls`" in fresh.text) == (template is KEEPS_ALL)
            second = chat.ask(SECOND, **begin(runtime, thought))
            assert second.stats.prompt_tokens == len(fresh.tokens)
        with with_template(template) as newborn:
            expected = newborn.stream_tokens(fresh.tokens, method="none", **begin(newborn, thought)).wait()
            assert second.tokens == expected.tokens
            assert second.reasoning == "The user wants `ls`."

    @pytest.mark.long
    @pytest.mark.parametrize("template", [QWEN_3, KEEPS_ALL, OPENS_REASONING])
    def test_a_reply_cut_while_reasoning_or_answering_can_be_continued(
        self, with_template: Callable[[str], Any], template: str
    ) -> None:
        thought = THOUGHT.removeprefix("<think>\n") if template is OPENS_REASONING else THOUGHT
        with with_template(template) as runtime:
            chat = runtime.chat()
            uncut = chat.ask(FIRST, **begin(runtime, thought))
            whole = chat.messages[1]
            forced = runtime.vocabulary.tokenize(thought, special=False, start=False)
            for cut in (2, 6, len(forced) - 5, len(forced) - 1, len(forced) + 4):
                start = b"".join(map(runtime.vocabulary.piece, uncut.tokens[:cut])).decode()
                opening = "<think>\n" if template is OPENS_REASONING else ""
                # The chat is saved while the reply is being generated, and opened by another program.
                saved = [Message("user", FIRST), reply_message(opening + start)]
                runtime.clear_cache()
                runtime._prompt_builder()._remembered.clear()
                chat = runtime.chat(messages=saved)
                left = OPTIONS | {"max_tokens": 60 - cut, "processors": [Begin(forced[cut:])]}
                stream = chat.continue_reply(**left)
                shown = "".join(chunk.text for chunk in stream if not chunk.reasoning)
                assert stream.reply.tokens == uncut.tokens[cut:]
                assert chat.messages[1] == whole
                assert chat.messages[1].text == whole.text
                assert whole.content.endswith(shown)
                assert stream.reply.answer == shown

    def test_a_template_that_keeps_reasoning_reuses_its_tokens(
        self, with_template: Callable[[str], Any]
    ) -> None:
        with with_template(KEEPS_ALL) as runtime:
            chat = runtime.chat()
            first = chat.ask(FIRST, **begin(runtime, THOUGHT))
            second = chat.ask(SECOND, **OPTIONS)
            assert second.stats.cached_prompt_tokens >= first.stats.prompt_tokens + len(first.tokens) - 1

    def test_a_reply_cancelled_while_reasoning_is_kept(self, demo: Runtime) -> None:
        chat = demo.chat()
        stream = chat.stream(FIRST, **begin(demo, THOUGHT))
        while not next(stream).text:
            pass
        stream.close()
        assert (chat.messages[1].content, chat.messages[1].reasoning) == ("", stream.reply.reasoning)
        assert chat.ask(SECOND, **OPTIONS).text

    def test_dictionaries_can_hold_reasoning(self, with_template: Callable[[str], Any]) -> None:
        talk = [
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": "Use `ls -S`.", "reasoning": "The user wants `ls`."},
            {"role": "user", "content": SECOND},
        ]
        with with_template(KEEPS_ALL) as runtime:
            shorter = [talk[0], {"role": "assistant", "content": "Use `ls -S`."}, talk[2]]
            with_reasoning, without = (runtime.reply(messages, **OPTIONS) for messages in (talk, shorter))
            assert with_reasoning.stats.prompt_tokens > without.stats.prompt_tokens
            # The text of a reply can be sent back as it is.
            inline = [talk[0], {"role": "assistant", "content": f"{THOUGHT}Use `ls -S`."}, talk[2]]
            assert runtime.reply(inline, **OPTIONS).tokens == with_reasoning.tokens


class ControlVocabulary:
    """A byte vocabulary in which reasoning markers are control tokens, as in Magistral."""

    control = ("</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]")
    size = 256 + len(control)
    chat_template: str | None = MAGISTRAL
    bos_text = ""
    eos_text = "</s>"

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self.control)) + ")", text) if special else [text]
        tokens: list[int] = []
        for part in parts:
            is_control = special and part in self.control
            tokens += [256 + self.control.index(part)] if is_control else part.encode()
        return tokens

    def min_tokens(self, text: str) -> int:
        return 0

    def piece(self, token: int) -> bytes:
        return b"" if token >= 256 else bytes([token])

    def raw_piece(self, token: int) -> bytes:
        return self.control[token - 256].encode() if token >= 256 else self.piece(token)

    def same_entries(self, other: Vocabulary) -> bool:
        return False

    def is_end(self, token: int) -> bool:
        return token == 256


class TestMarkersThatAreControlTokens:
    @pytest.fixture
    def model(self) -> TabularModel:
        random = np.random.default_rng(1)
        logits = random.normal(size=(ControlVocabulary.size, ControlVocabulary.size)).astype(np.float32)
        model = TabularModel(logits)
        model.vocabulary = ControlVocabulary()
        return model

    def test_reply_is_split_and_the_next_prompt_has_no_markers(self, model: TabularModel) -> None:
        written = model.vocabulary.tokenize("[THINK]Hm.[/THINK]Yes.</s>", special=True, start=False)
        with Runtime(model, None, DrafterSet(model)) as runtime:
            chat = runtime.chat()
            reply = chat.ask("Why?", method="none", processors=[Begin(written)])
            assert reply.tokens == tuple(written)
            assert (reply.text, reply.reasoning, reply.answer) == ("[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes.")
            asked = [*chat.messages, Message("user", "[THINK]?")]
            assert runtime.template is not None
            builder = runtime._prompt_builder()
            fresh = PromptBuilder(runtime.template, runtime.vocabulary).build(asked)
            assert builder.build(asked) == fresh
            assert fresh.text.startswith("[INST]Why?[/INST]Yes.</s>[INST]")
            assert not {259, 260} & set(fresh.tokens)

    def test_a_cut_reply_is_continued_with_the_same_tokens(self, model: TabularModel) -> None:
        written = model.vocabulary.tokenize("[THINK]Hm.[/THINK]Yes.</s>", special=True, start=False)
        with Runtime(model, None, DrafterSet(model)) as runtime:
            prompt = runtime._prompt_builder().build([Message("user", "Why?")]).tokens
            for cut in (1, 3, 5, 7):
                pieces = map(model.vocabulary.raw_piece, written[:cut])
                start = reply_message(b"".join(pieces).decode())
                chat = runtime.chat(messages=[Message("user", "Why?"), start])
                stream = chat.continue_reply(method="none", processors=[Begin(written[cut:])])
                assert stream._request.tokens == (*prompt, *written[:cut])
                assert stream.wait().tokens == tuple(written[cut:])
                assert chat.messages[1] == Message("assistant", "Yes.", "Hm.")
