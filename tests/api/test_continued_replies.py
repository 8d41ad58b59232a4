"""Replies that are cut off and then continued are the same as uninterrupted replies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import edgespec
from edgespec import Message, Runtime
from edgespec.errors import ContextFullError, OptionError
from tests.api.questions import HOWTO
from tests.cases import first
from tests.raising import raises

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 48}


@pytest.fixture(scope="module")
def small() -> Iterator[Runtime]:
    with edgespec.load("demo", context=256) as runtime:
        yield runtime


def cut_reply(runtime: Runtime, tokens: tuple[int, ...]) -> str:
    return b"".join(runtime.vocabulary.piece(token) for token in tokens).decode("utf-8", "replace")


@pytest.mark.long
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", first(["model", "none", "ngram"]))
def test_reply_cut_at_any_token_ends_the_same_when_continued(
    demo: Runtime, method: str, options: dict[str, Any]
) -> None:
    uncut = demo.chat("Be brief.").ask(HOWTO, method="none", **options)
    compared = 0
    for cut in range(1, len(uncut.tokens), 5):
        start = cut_reply(demo, uncut.tokens[:cut])
        if tuple(demo.vocabulary.tokenize(start, special=False, start=False)) != uncut.tokens[:cut]:
            continue
        # Clear the cache and the remembered tokens, as if a newly started program had opened the chat.
        demo.clear_cache()
        chat = demo.chat("Be brief.", [Message("user", HOWTO), Message("assistant", start)])
        demo._prompt_builder()._remembered.clear()
        left = options | {"max_tokens": options["max_tokens"] - cut}
        reply = chat.continue_reply(method=method, **left).wait()
        assert reply.tokens == uncut.tokens[cut:]
        assert chat.messages == [Message("user", HOWTO), Message("assistant", uncut.text)]
        assert chat.context_used_tokens == reply.stats.prompt_tokens + len(reply.tokens)
        compared += 1
    assert compared >= 5


def test_continued_reply_equals_plain_decoding_of_its_prompt(demo: Runtime) -> None:
    chat = demo.chat()
    chat.ask(HOWTO, **GREEDY | {"max_tokens": 9})
    stream = chat.continue_reply(method="auto", **GREEDY)
    continued, prompt = stream.wait(), stream._request.tokens
    # The KV cache of the interrupted reply is reused.
    assert continued.stats.cached_prompt_tokens >= continued.stats.prompt_tokens - 2
    demo.clear_cache()
    assert demo.stream_tokens(prompt, method="none", **GREEDY).wait().tokens == continued.tokens


def test_turns_after_a_continued_reply_equal_those_of_an_uncut_chat(demo: Runtime) -> None:
    uncut, cut = demo.chat(), demo.chat()
    uncut.ask(HOWTO, **GREEDY)
    cut.ask(HOWTO, **GREEDY | {"max_tokens": 20})
    cut.continue_reply(**GREEDY | {"max_tokens": 28}).wait()
    assert cut.messages == uncut.messages
    assert cut.ask("And by name?", **GREEDY).tokens == uncut.ask("And by name?", **GREEDY).tokens


def test_continuing_answers_a_question_without_a_reply(demo: Runtime) -> None:
    asked = demo.chat().ask(HOWTO, **GREEDY)
    chat = demo.chat(messages=[Message("user", HOWTO)])
    assert chat.continue_reply(**GREEDY).wait().tokens == asked.tokens


def test_cancelled_before_its_first_new_word_leaves_the_reply_as_it_was(demo: Runtime) -> None:
    chat = demo.chat(messages=[Message("user", HOWTO), Message("assistant", "Use")])
    chat.continue_reply(**GREEDY).close()
    assert chat.messages[-1] == Message("assistant", "Use")


def test_nothing_to_continue_is_an_option_error(demo: Runtime) -> None:
    with raises(OptionError, code="messages_invalid"):
        demo.chat().continue_reply()


def test_reply_that_fills_the_context_says_so(small: Runtime) -> None:
    chat = small.chat(messages=[Message("user", HOWTO), Message("assistant", "word " * 260)])
    with raises(ContextFullError, "cannot continue"):
        chat.continue_reply()
    assert len(chat.messages) == 2


def test_incomplete_last_character_is_written_again(demo: Runtime) -> None:
    chat = demo.chat(messages=[Message("user", HOWTO), Message("assistant", "Use `ls`�")])
    chat.continue_reply(**GREEDY).wait()
    assert chat.messages[-1].content.startswith("Use `ls`")
    assert "�" not in chat.messages[-1].content
