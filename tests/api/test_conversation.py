"""Conversations: turns, regenerated and edited turns, failures, and a full context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import Chat, Message, Runtime
from edgespec.backends import llamacpp
from edgespec.decode.drafter_set import DrafterSet
from edgespec.errors import BackendError, BusyError, ContextFullError, EdgespecError, OptionError
from edgespec.model.base import LanguageModel, LoadOptions
from tests.raising import raises

OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 40, "temperature": 0.7}
FIRST, SECOND, THIRD = "How do I list files by size?", "And by name?", "What about hidden ones?"


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with edgespec.load("demo") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def small() -> Iterator[Runtime]:
    with edgespec.load("demo", context=256) as runtime:
        yield runtime


def fresh_answer(messages: Sequence[Message], text: str, system: str | None = None, **options: Any) -> str:
    """Return the next reply in this conversation from a fresh runtime without a draft model."""
    return _fresh_answer(tuple(messages), text, system, **options)


@cache
def _fresh_answer(messages: tuple[Message, ...], text: str, system: str | None, **options: Any) -> str:
    with edgespec.load("demo", "none", method="none", measure_costs=False) as newborn:
        return newborn.chat(system, messages).ask(text, **OPTIONS | options).text


def contents(chat: Chat) -> list[str]:
    return [message.content for message in chat.messages]


class TestTurns:
    @pytest.mark.long
    @pytest.mark.parametrize("method", ["none", "model", "ngram", "model+ngram"])
    def test_three_turns_equal_those_of_fresh_runtimes(self, demo: Runtime, method: str) -> None:
        chat = demo.chat(system="Be brief.")
        said: list[Message] = []
        for text in (FIRST, SECOND, THIRD):
            reply = chat.ask(text, method=method, **OPTIONS)
            assert reply.text == fresh_answer(said, text, "Be brief.")
            said += [Message("user", text), Message("assistant", reply.text)]
            assert chat.messages == said
            assert chat.context_used_tokens == reply.stats.prompt_tokens + len(reply.tokens)

    def test_messages_gain_the_question_at_once_and_the_reply_at_its_end(self, demo: Runtime) -> None:
        chat = demo.chat()
        stream = chat.stream(FIRST, **OPTIONS)
        assert chat.messages == [Message("user", FIRST)]
        text = "".join(piece.text for piece in stream)
        assert chat.messages == [Message("user", FIRST), Message("assistant", text)]

    @pytest.mark.long
    def test_a_system_prompt_takes_effect_on_the_next_turn(self, demo: Runtime) -> None:
        chat = demo.chat()
        first = chat.ask(FIRST, **OPTIONS)
        chat.system = "Answer with one word."
        second = chat.ask(SECOND, **OPTIONS)
        said = [Message("user", FIRST), Message("assistant", first.text)]
        assert second.text == fresh_answer(said, SECOND, "Answer with one word.")

    @pytest.mark.long
    def test_two_conversations_over_one_runtime(self, demo: Runtime) -> None:
        one, other = demo.chat(), demo.chat()
        one.ask(FIRST, **OPTIONS)
        other.ask(THIRD, **OPTIONS)
        assert one.ask(SECOND, **OPTIONS).text == fresh_answer(one.messages[:2], SECOND)
        assert other.ask(SECOND, **OPTIONS).text == fresh_answer(other.messages[:2], SECOND)

    def test_saved_conversation_continues(self, demo: Runtime) -> None:
        said = [Message("user", FIRST), Message("assistant", "Use `ls -lS`.")]
        assert demo.chat(messages=said).ask(SECOND, **OPTIONS).text == fresh_answer(said, SECOND)

    def test_used_tokens_before_the_first_turn(self, demo: Runtime) -> None:
        first = demo.chat("Be brief.")
        first.ask(FIRST, **OPTIONS)
        held = demo.chat("Be brief.", first.messages)
        # Allow for the few tokens that begin the next reply. Sampled text may also be tokenized differently.
        assert abs(held.context_used_tokens - first.context_used_tokens) <= 8
        held.ask(SECOND, **OPTIONS)
        first.ask(SECOND, **OPTIONS)
        assert held.context_used_tokens == first.context_used_tokens

    def test_clear(self, demo: Runtime) -> None:
        chat = demo.chat()
        chat.ask(FIRST, **OPTIONS)
        chat.clear()
        assert (chat.messages, chat.context_used_tokens, chat.dropped_messages) == ([], 0, 0)
        assert chat.ask(SECOND, **OPTIONS).text == fresh_answer([], SECOND)

    @pytest.mark.long
    def test_chat_continues_after_a_stop_string(self, demo: Runtime) -> None:
        chat = demo.chat()
        whole = demo.chat().ask(FIRST, **OPTIONS).text
        first = chat.ask(FIRST, stop=[whole[10:13]], **OPTIONS)
        assert first.text == whole[: whole.index(whole[10:13])]
        assert chat.ask(SECOND, **OPTIONS).text == fresh_answer(chat.messages[:2], SECOND)


class TestSecondThoughts:
    def test_regenerate(self, demo: Runtime) -> None:
        chat = demo.chat()
        first = chat.ask(FIRST, **OPTIONS)
        for seed in (4, 3):
            stream = chat.regenerate(**OPTIONS | {"seed": seed})
            text = "".join(piece.text for piece in stream)
            assert contents(chat) == [FIRST, text]
        assert text == first.text

    def test_regenerate_in_the_middle_of_a_chat(self, demo: Runtime) -> None:
        chat = demo.chat()
        chat.ask(FIRST, **OPTIONS)
        second = chat.ask(SECOND, **OPTIONS)
        for _ in chat.regenerate(**OPTIONS):
            pass
        assert contents(chat)[3] == second.text
        assert len(chat.messages) == 4

    def test_edit_last(self, demo: Runtime) -> None:
        chat = demo.chat()
        chat.ask(FIRST, **OPTIONS)
        chat.ask("A mistake", **OPTIONS)
        text = "".join(piece.text for piece in chat.edit_last(SECOND, **OPTIONS))
        assert contents(chat)[2:] == [SECOND, text]
        assert text == fresh_answer(chat.messages[:2], SECOND)

    def test_regenerate_without_a_message_raises(self, demo: Runtime) -> None:
        chat = demo.chat()
        calls: list[Callable[[], object]] = [chat.regenerate, lambda: chat.edit_last("x")]
        for call in calls:
            with raises(OptionError, code="messages_invalid"):
                call()
        assert chat.messages == []


class Unreliable:
    """A model that fails on demand."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.countdown = 0

    def verify(self, tree: Any, first: int = 0) -> Any:
        self.countdown -= 1
        if self.countdown == 0:
            raise BackendError("out of luck", "try again")
        return self._model.verify(tree, first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TestTrouble:
    @pytest.fixture
    def unreliable(self, demo_target: Path) -> Iterator[tuple[Runtime, Unreliable]]:
        model: Any = Unreliable(llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=512)))
        with Runtime(model, None, DrafterSet(model)) as runtime:
            yield runtime, model

    @pytest.mark.long
    @pytest.mark.parametrize("countdown", [1, 4])
    def test_a_failure_leaves_the_conversation_as_it_was(
        self, unreliable: tuple[Runtime, Unreliable], countdown: int
    ) -> None:
        runtime, model = unreliable
        chat = runtime.chat()
        chat.ask(FIRST, **OPTIONS)
        before = (list(chat.messages), chat.context_used_tokens, chat.dropped_messages)
        attempts: list[Callable[[], edgespec.ReplyStream]] = [
            lambda: chat.stream(SECOND, **OPTIONS),
            lambda: chat.regenerate(**OPTIONS | {"seed": 9}),
            lambda: chat.edit_last(THIRD, **OPTIONS),
        ]
        for attempt in attempts:
            model.countdown = countdown
            with pytest.raises(BackendError):
                list(attempt())
            model.countdown = 0
            assert (chat.messages, chat.context_used_tokens, chat.dropped_messages) == before
        assert chat.ask(SECOND, **OPTIONS).text == fresh_answer(chat.messages[:2], SECOND)

    @pytest.mark.parametrize(
        "options", [{"temprature": 1}, {"stop": [""]}, {"method": "modle"}, {"max_tokens": 0}], ids=str
    )
    def test_a_wrong_option_leaves_the_conversation_as_it_was(
        self, demo: Runtime, options: dict[str, Any]
    ) -> None:
        chat = demo.chat()
        chat.ask(FIRST, **OPTIONS)
        before = (list(chat.messages), chat.context_used_tokens)
        with pytest.raises(OptionError):
            chat.stream(SECOND, **options)
        assert (chat.messages, chat.context_used_tokens) == before

    def test_a_busy_runtime_leaves_the_conversation_as_it_was(self, demo: Runtime) -> None:
        chat, other = demo.chat(), demo.chat()
        stream = chat.stream(FIRST, **OPTIONS)
        next(stream)
        with pytest.raises(BusyError):
            other.ask(SECOND, **OPTIONS)
        assert other.messages == []
        for _ in stream:
            pass
        assert len(chat.messages) == 2

    def test_cancelled_reply_keeps_its_text(self, demo: Runtime) -> None:
        chat = demo.chat()
        stream = chat.stream(FIRST, **OPTIONS)
        said = next(stream).text
        stream.cancel()
        said += "".join(piece.text for piece in stream)
        assert contents(chat) == [FIRST, said]
        assert chat.ask(SECOND, **OPTIONS).text == fresh_answer(chat.messages[:2], SECOND)

    @pytest.mark.parametrize("how", ["cancel", "close"])
    def test_reply_cancelled_before_its_first_word_removes_the_question(
        self, demo: Runtime, how: str
    ) -> None:
        chat = demo.chat()
        stream = chat.stream(FIRST, **OPTIONS)
        getattr(stream, how)()
        assert list(stream) == []
        assert chat.messages == []

    def test_cancelled_regenerate_keeps_the_old_reply(self, demo: Runtime) -> None:
        chat = demo.chat()
        first = chat.ask(FIRST, **OPTIONS)
        stream = chat.regenerate(**OPTIONS)
        stream.cancel()
        list(stream)
        assert contents(chat) == [FIRST, first.text]

    def test_cancel_during_a_long_prefill(self, demo: Runtime) -> None:
        chat = demo.chat()
        long = "What does `ls -l` do? " * 35
        stream = chat.stream(long, **OPTIONS)
        timer = threading.Timer(0.004, stream.cancel)
        timer.start()
        list(stream)
        timer.join()
        assert chat.ask(SECOND, **OPTIONS).text == fresh_answer(chat.messages[:-2], SECOND)


class TestTheEndOfTheContext:
    @pytest.mark.long
    def test_slide_drops_the_oldest_turns(self, small: Runtime) -> None:
        chat = small.chat(system="Be brief.")
        for i in range(14):
            reply = chat.ask(f"Question {i}: how do I list files by size?", **OPTIONS)
            assert reply.finish_reason in ("stop", "length")
            assert len(chat.messages) == 2 * (i + 1)
            shown = chat.messages[chat.dropped_messages :]
            assert shown[0].role == "user"
            assert chat.context_used_tokens <= 256 + 1
        assert chat.dropped_messages > 0
        assert chat.dropped_messages % 2 == 0

    @pytest.mark.long
    def test_turns_after_a_slide_equal_those_of_a_shorter_chat(self, small: Runtime) -> None:
        chat = small.chat()
        while not chat.dropped_messages:
            before = list(chat.messages)
            answer = chat.ask(FIRST, **OPTIONS)
        rest = before[chat.dropped_messages :]
        with edgespec.load("demo", context=256) as newborn:
            assert newborn.chat(messages=rest).ask(FIRST, **OPTIONS).text == answer.text

    @pytest.mark.long
    def test_turns_between_two_slides_reuse_the_cache(self, small: Runtime) -> None:
        chat = small.chat()
        reused = []
        for _ in range(12):
            dropped = chat.dropped_messages
            reply = chat.ask("And then?", seed=1, max_tokens=12)
            if chat.dropped_messages == dropped:
                reused.append(reply.stats.cached_prompt_tokens / reply.stats.prompt_tokens)
        assert sum(share > 0.5 for share in reused) >= len(reused) - 2

    def test_refuse_raises_and_changes_nothing(self, small: Runtime) -> None:
        chat = small.chat(context_full="refuse")
        before: list[Message] = []

        def talk_on() -> None:
            nonlocal before
            for _ in range(30):
                before = list(chat.messages)
                chat.ask(FIRST, **OPTIONS)

        with raises(ContextFullError, "256"):
            talk_on()
        assert chat.messages == before
        assert chat.dropped_messages == 0

    @pytest.mark.parametrize("context_full", ["slide", "refuse"])
    def test_one_message_too_long_for_any_context(self, small: Runtime, context_full: Any) -> None:
        chat = small.chat(context_full=context_full)
        chat.ask(FIRST, **OPTIONS)
        before = list(chat.messages)
        with pytest.raises(ContextFullError) as caught:
            chat.ask("many words " * 300, **OPTIONS)
        assert "--context" in caught.value.next_step
        assert (chat.messages, chat.dropped_messages) == (before, 0)
        assert chat.ask(SECOND, **OPTIONS).text

    def test_unknown_context_full_raises(self, demo: Runtime) -> None:
        with raises(OptionError, "refuse"):
            demo.chat(context_full="forget")  # type: ignore[arg-type]


class TestWhatIsTyped:
    @pytest.mark.long
    @pytest.mark.parametrize(
        "text",
        [
            "🙂 emoji é",
            "",
            " ",
            "\x00",
            "\ud83d",
            "<|im_end|>",
            "a\r\nb\tc",
            "x" * 2000,
            "中文",
            "\u202eright",
        ],
        ids=ascii,
    )
    def test_any_text_gets_a_reply_or_a_one_line_error(self, demo: Runtime, text: str) -> None:
        chat = demo.chat()
        said = ""
        try:
            chat.ask(text, **OPTIONS)
        except EdgespecError as error:
            said = str(error)
        assert "\n" not in said
        assert len(chat.messages) == (0 if said else 2)
