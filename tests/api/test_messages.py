"""Replies to a list of messages, without a `Chat`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import edgespec
from edgespec import Image, Message, PlacedImage, Runtime
from edgespec.chat.message import as_messages
from edgespec.errors import CancelledError, ContextFullError, OptionError, TemplateError
from tests.api.questions import HOWTO
from tests.backends.tiny_vision import picture, png_bytes
from tests.raising import raises

OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 40, "temperature": 0.7}
SECOND = "And by name?"


@pytest.fixture(scope="module")
def small() -> Iterator[Runtime]:
    with edgespec.load("demo", context=256) as runtime:
        yield runtime


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_reply_equals_that_of_a_chat(demo: Runtime) -> None:
    chat = demo.chat("Be brief.")
    first, second = chat.ask(HOWTO, **OPTIONS), chat.ask(SECOND, **OPTIONS)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, user(HOWTO)]
    reply = demo.reply(messages, **OPTIONS)
    assert reply.tokens == first.tokens
    messages += [Message("assistant", reply.text), user(SECOND)]
    assert demo.reply(messages, **OPTIONS).tokens == second.tokens


@pytest.mark.parametrize("context_full", ["slide", "refuse"])
def test_a_conversation_can_be_a_system_message(small: Runtime, context_full: Any) -> None:
    for count in (1, 2):
        messages = [{"role": "system", "content": HOWTO}] * count
        assert small.reply(messages, context_full=context_full, max_tokens=2).tokens
        with pytest.raises(ContextFullError):
            small.reply([{"role": "system", "content": "long " * 300}] * count, context_full=context_full)


def test_continued_conversation_reuses_its_kv_cache(demo: Runtime) -> None:
    messages: list[Any] = [user(HOWTO)]
    first = demo.reply(messages, **OPTIONS)
    messages += [{"role": "assistant", "content": first.text}, user(SECOND)]
    second = demo.reply(messages, **OPTIONS)
    assert second.stats.cached_prompt_tokens >= first.stats.prompt_tokens + len(first.tokens) - 2


def test_interleaved_conversations_keep_their_exact_tokens(demo: Runtime) -> None:
    conversations: list[list[Any]] = [[user(f"{HOWTO} {i}")] for i in range(3)]
    prompts: list[tuple[int, ...]] = []
    for messages in conversations:
        stream = demo.stream_messages(messages, **OPTIONS)
        reply = stream.wait()
        prompts.append((*stream._request.tokens, *reply.tokens[:-1]))
        messages += [Message("assistant", reply.text), user(SECOND)]
    for messages, before in zip(conversations, prompts, strict=True):
        after = demo.stream_messages(messages, **OPTIONS)._request.tokens
        assert after[: len(before)] == before


def test_count_tokens_equals_the_prompt_length(demo: Runtime) -> None:
    messages = [Message("system", "Be brief."), Message("user", HOWTO)]
    assert demo.count_tokens(messages) == demo.reply(messages, **OPTIONS).stats.prompt_tokens


class TestFullContext:
    def test_slide_drops_the_oldest_turns_but_not_the_system_prompt(self, small: Runtime) -> None:
        messages: list[Any] = [Message("system", "Be brief.")]
        dropped, reused = [], []
        for i in range(14):
            messages.append(user(f"Question {i}: how do I list files by size?"))
            stream = small.stream_messages(messages, seed=1, max_tokens=12)
            reply = stream.wait()
            messages.append(Message("assistant", reply.text))
            dropped.append(stream.dropped_messages)
            reused.append(reply.stats.cached_prompt_tokens / reply.stats.prompt_tokens)
            kept = [messages[0], *messages[1 + stream.dropped_messages : -1]]
            assert stream.prompt_tokens == small.count_tokens(edgespec.chat.message.as_messages(kept))
        assert dropped == sorted(dropped)
        assert dropped[-1] > 0
        # Turns between two slides extend the same prompt.
        slides = sum(a != b for a, b in itertools.pairwise(dropped))
        assert sum(share < 0.5 for share in reused) <= slides + 1

    def test_refuse_raises(self, small: Runtime) -> None:
        messages = [user(HOWTO), {"role": "assistant", "content": "Use `ls`. " * 60}, user(SECOND)]
        with raises(ContextFullError, "256"):
            small.reply(messages, context_full="refuse")
        assert small.reply(messages, **OPTIONS).tokens

    def test_one_message_that_is_too_long_raises(self, small: Runtime) -> None:
        with raises(ContextFullError, "256"):
            small.reply([user("many words " * 300)])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "is empty"),
        ([user("x"), {"role": "system", "content": "x"}], "ends"),
        ([user("x"), {"role": "assistant", "content": "y"}], "assistant"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"content": "x"}], "None"),
        ([user("x"), {"role": "user", "content": None}], "NoneType"),
        ([{"role": "user"}], "message 1"),
    ],
)
def test_invalid_messages_are_named(demo: Runtime, messages: Any, problem: str) -> None:
    with raises(OptionError, problem, code="messages_invalid"):
        demo.reply(messages)


@pytest.mark.parametrize("system", [5, b"Be brief.", ["Be brief."], 0, False])
def test_a_system_prompt_is_a_string(demo: Runtime, system: Any) -> None:
    for raw in (False, True):
        with raises(OptionError, "system"):
            demo.generate("x", system=system, raw=raw)


def test_invalid_options_are_named(demo: Runtime) -> None:
    with raises(OptionError, "refuse"):
        demo.reply([user("x")], context_full="drop")  # type: ignore[arg-type]
    with raises(OptionError, "temperature", code="option_unknown"):
        demo.reply([user("x")], temprature=1)  # type: ignore[call-arg]


def test_a_model_without_chat_template_raises(demo: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_prompts", None)
    with raises(TemplateError, code="template_missing"):
        demo.reply([user("x")])


@pytest.mark.usefixtures("template_process")
def test_closing_ends_the_process_of_the_chat_template() -> None:
    with edgespec.load("demo") as runtime:
        runtime.count_tokens([Message("user", "x")])
        assert runtime.template
        process = runtime.template._process
        assert process
        assert process.alive
    assert not process.alive


@pytest.mark.parametrize("options", [{}, {"raw": True}])
def test_preparing_a_long_prompt_can_be_cancelled(small: Runtime, options: Any) -> None:
    reports = []

    def progress(what: str, _fraction: float) -> bool:
        reports.append(what)
        return False

    with raises(CancelledError, "being prepared"):
        small.stream("=- " * 2000 if not options else " " * 999_999, progress=progress, **options)
    assert reports == ["preparing the prompt"]


def test_images_must_be_placed_within_the_content() -> None:
    image = PlacedImage(Image.read(png_bytes(picture(4, 4))))
    assert as_messages([Message("user", "x", images=(image._replace(at=1),))])
    wrong: tuple[Any, ...] = (image.image, image._replace(at=2), image._replace(at=-1), None)
    for each in wrong:
        with raises(OptionError, "message 1", code="messages_invalid"):
            as_messages([Message("user", "x", images=(each,))])
        with raises(OptionError, "message 1", code="messages_invalid"):
            as_messages([{"role": "user", "content": "x", "images": [each]}])
