"""Chats that end during a reply or run a failing job neither lose anything nor hang."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from textual import events

import edgespec
from edgespec import Runtime
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import ContextFullError, EdgespecError, TemplateError
from edgespec.store.download import Progress
from edgespec.tui.app import ChatApp, run_chat
from edgespec.tui.widgets.messages import ReplyMessage
from edgespec.tui.widgets.prompt import PromptInput
from tests.backends.tiny_models import write_llama
from tests.raising import raises
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, loading

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SLOW = Script(text=LONG_TEXT, pause_seconds=0.005)


def saved(d: Driver) -> SavedChat:
    """Return the only saved chat, as the next program would read it."""
    (path,) = d.saved()
    return ChatStore(path.parent).load(path.stem)


def contents(chat: SavedChat) -> list[str]:
    return [message.content for message in chat.messages]


async def unfinished_chat(folder: Path, *scripts: Script) -> None:
    """Leave a chat whose last message is being answered with `scripts` when the program quits."""
    async with driving(loading(ScriptedRuntime(scripts=list(scripts))), folder) as d:
        for _ in scripts[:-1]:
            await d.say("earlier")
        await d.send("a question")
        if scripts[-1].gate is None:
            await d.said("word word")
        await d.press("ctrl+q")
        await until(d.pilot, lambda: not d.app.is_running, "the app to end")


class TestSavedAsYouGo:
    async def test_question_is_saved_before_the_model_writes(self, tmp_path: Path) -> None:
        runtime = ScriptedRuntime(scripts=[Script(gate=threading.Event())])
        async with driving(loading(runtime), tmp_path) as d:
            await d.send("a question")
            await until(d.pilot, lambda: bool(runtime.asked), "the model to be asked")
            assert contents(saved(d)) == ["a question"]
            assert saved(d).unfinished

    async def test_reply_is_saved_every_second_even_while_the_screen_is_blocked(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime(scripts=[SLOW])), tmp_path) as d:
            await d.send("a question")
            await d.said("word word")
            # The terminal does not read the chat's output, so the event loop waits.
            time.sleep(2.5)
            chat = saved(d)
            written = d.chat.current_chat.turn
            assert written is not None
            missing = len(written.written) - chat.messages[-1].content.count("word")
            assert missing <= 1.3 / 0.005
            assert chat.messages[-1].role == "assistant"
            assert chat.unfinished

    async def test_finished_reply_is_not_marked(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            await d.say("a question")
            assert not saved(d).unfinished
            assert "unfinished" not in d.saved()[0].read_text()

    async def test_reply_that_the_user_stopped_is_not_marked(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime(scripts=[SLOW])), tmp_path) as d:
            await d.send("a question")
            await d.said("word word")
            await d.press("escape")
            await d.settled()
            assert not saved(d).unfinished

    async def test_reply_stopped_because_the_terminal_closed_is_marked(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime(scripts=[SLOW])), tmp_path) as d:
            await d.send("a question")
            await d.said("word word")
            d.app.save_turn()
            assert await asyncio.to_thread(d.app.stop_model)
            await d.settled()
            assert saved(d).unfinished

    @pytest.mark.parametrize("script", [SLOW, Script(gate=threading.Event())], ids=["reply", "question"])
    async def test_quitting_during_a_reply_keeps_everything(self, tmp_path: Path, script: Script) -> None:
        await unfinished_chat(tmp_path, Script(text="One."), script)
        (entry,) = ChatStore(tmp_path / "chats").list()
        chat = ChatStore(tmp_path / "chats").load(entry.id)
        assert contents(chat)[:3] == ["earlier", "One.", "a question"]
        assert chat.unfinished
        assert len(chat.messages) == (3 if script.gate else 4)

    async def test_settings_changed_during_a_reply_do_not_remove_it_from_the_file(
        self, tmp_path: Path
    ) -> None:
        async with driving(loading(ScriptedRuntime(scripts=[SLOW])), tmp_path) as d:
            await d.send("a question")
            await d.said("word word")
            await d.send("/set top_k 5")
            await d.said("top_k is now 5")
            assert contents(saved(d))[0] == "a question"
            assert contents(saved(d))[1].startswith("word word")

    async def test_question_stopped_after_other_turns_comes_back(self, tmp_path: Path) -> None:
        runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(gate=threading.Event())])
        async with driving(loading(runtime), tmp_path) as d:
            await d.say("earlier")
            await d.send("a question")
            await d.press("escape")
            await d.settled()
            assert d.chat.prompt.text == "a question"
            assert len(d.chat.transcript.query(ReplyMessage)) == 1
            assert [entry.content for entry in d.chat.current_chat.entries] == ["earlier", "One."]

    async def test_regenerating_without_a_word_keeps_the_old_reply(self, tmp_path: Path) -> None:
        runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(gate=threading.Event())])
        async with driving(loading(runtime), tmp_path) as d:
            await d.say("a question")
            await d.press("ctrl+r")
            await until(d.pilot, lambda: len(runtime.asked) == 2, "the model to be asked")
            assert contents(saved(d)) == ["a question", "One."]
            await d.press("escape")
            await d.settled()
            assert contents(saved(d)) == ["a question", "One."]
            assert "One." in d.transcript()


class TestContinuing:
    async def test_new_chat_offers_to_finish_the_last_one(self, tmp_path: Path) -> None:
        await unfinished_chat(tmp_path, SLOW)
        runtime = ScriptedRuntime(scripts=[Script(text="the end.")])
        async with driving(loading(runtime), tmp_path) as d:
            await d.said(
                "Your last chat, “a question”, has an unfinished reply. Type /continue to finish it."
            )
            (start,) = [each.content for each in saved(d).messages if each.role == "assistant"]
            await d.say("/continue")
            assert contents(saved(d)) == ["a question", f"{start}the end."]
            assert not saved(d).unfinished
            assert len(d.chat.transcript.query(ReplyMessage)) == 1
            assert "the end." in d.transcript()
            assert "unfinished" not in d.transcript()

    @pytest.mark.parametrize("script", [SLOW, Script(gate=threading.Event())], ids=["reply", "question"])
    async def test_opened_chat_says_what_to_do(self, tmp_path: Path, script: Script) -> None:
        await unfinished_chat(tmp_path, script)
        runtime = ScriptedRuntime(scripts=[Script(text="the end.")])
        async with driving(loading(runtime), tmp_path, resume="last") as d:
            await d.said("Type /continue")
            await d.say("/continue")
            assert contents(saved(d))[-1].endswith("the end.")
            assert len(saved(d).messages) == 2

    async def test_no_unfinished_chat(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            await d.say("/continue")
            await d.sees("There is no unfinished reply to continue.")
            await d.say("a question")
            await d.say("/new")
            assert "unfinished" not in d.transcript()

    async def test_stopped_reply_is_continued_in_place_and_stays_one_message(self, tmp_path: Path) -> None:
        runtime = ScriptedRuntime(scripts=[SLOW, SLOW, Script(error=RuntimeError("boom"))])
        async with driving(loading(runtime), tmp_path) as d:
            lengths = []
            for text in ("a question", "/continue"):
                await d.send(text)
                await until(d.pilot, lambda: d.chat.writing, "the reply to start")
                await d.pilot.pause(0.4)
                await d.press("escape")
                await d.settled()
                lengths.append(len(contents(saved(d))[-1]))
            assert 0 < lengths[0] < lengths[1]
            await d.say("/continue")
            assert "boom" in d.transcript()
            assert contents(saved(d))[-1] == d.chat.current_chat.entries[-1].content
            assert len(saved(d).messages[-1].content) == lengths[1]


class TestNothingHangs:
    async def test_broken_chat_template_is_an_error_at_each_message(self, tmp_path: Path) -> None:
        model = write_llama(tmp_path / "broken.gguf", template="{{ 'x")

        def load(progress: Progress) -> Runtime:
            return edgespec.load(str(model), draft="none", threads=1, progress=progress)

        async with driving(load, tmp_path) as d:
            await d.said("chat template is broken")
            for _ in range(2):
                await d.say("a question")
                assert "chat template is broken" in d.transcript()
                assert d.chat.prompt.text == "a question"

    async def test_partial_reply_of_a_turn_that_fails_is_kept(self, tmp_path: Path) -> None:
        fails = Script(text="One two three four five", error=RuntimeError("boom"), error_after=4)
        runtime = ScriptedRuntime(scripts=[fails, Script(text=" and the rest"), Script(text="Fine again.")])
        async with driving(loading(runtime), tmp_path) as d:
            await d.say("a question")
            assert "boom" in d.transcript()
            assert "One two" in d.transcript()
            assert contents(saved(d))[1].startswith("One two")
            assert saved(d).unfinished
            assert not d.chat.prompt.text
            await d.say("/continue")
            assert contents(saved(d))[1].endswith("and the rest")
            assert not saved(d).unfinished
            await d.say("more")
            assert "Fine again." in d.transcript()

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
    async def test_job_that_raises_anything_is_reported(self, tmp_path: Path, error: BaseException) -> None:
        runtime = ScriptedRuntime(scripts=[Script(error=error), Script(text="Fine again.")])
        async with driving(loading(runtime), tmp_path) as d:
            await d.say("a question")
            assert type(error).__name__ in d.transcript()
            await d.press("enter")
            await d.settled()
            assert "Fine again." in d.transcript()

    async def test_chat_that_cannot_be_opened_keeps_its_messages(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            await d.say("a question")
            await d.say("/new")

            def fail(*_: object) -> None:
                raise SystemExit("broken")

            monkeypatch.setattr(ScriptedRuntime, "count_tokens", fail)
            await d.say("/load a question")
            await d.said("SystemExit: broken")
            await d.say("more")
            assert len(d.chat.current_chat.entries) == 4
            assert contents(saved(d)) == [each.content for each in d.chat.current_chat.entries]
            assert contents(saved(d))[2] == "more"

    def test_load_that_ends_the_thread_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def load(progress: Progress) -> Runtime:
            raise SystemExit(3)

        real_run = ChatApp.run
        monkeypatch.setattr(ChatApp, "run", lambda app, **_: real_run(app, headless=True))
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            run_chat(load, store=ChatStore(tmp_path / "chats"))

    async def test_very_long_message_is_shown_in_part_and_kept_in_full(self, tmp_path: Path) -> None:
        message = Message("user", "word " * 400_000)
        ChatStore(tmp_path / "chats").save(SavedChat("one", MessageTree.linear([message]), NOON, NOON))
        async with driving(loading(ScriptedRuntime()), tmp_path, resume="one") as d:
            await d.said("(1,900,000 more characters are not shown; type /copy chat to copy the whole chat)")
            assert d.chat.current_chat.messages == (message,)

    async def test_terminal_of_a_few_columns_does_not_end_the_chat(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime()), tmp_path, size=(3, 40)) as d:
            await d.say("a question")
            await d.pilot.resize_terminal(1, 1)
            await d.say("more")
            await d.pilot.resize_terminal(80, 24)
            await d.sees("more")

    def test_error_on_the_screen_is_a_failure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ValueError("boom")

        monkeypatch.setattr(PromptInput, "render_line", fail)
        real_run = ChatApp.run
        monkeypatch.setattr(ChatApp, "run", lambda app, **_: real_run(app, headless=True))
        with raises(EdgespecError, code="internal_error"):
            run_chat(loading(ScriptedRuntime()), store=ChatStore(tmp_path / "chats"))


class TestInput:
    async def type_and_enter(self, d: Driver, *lines: str) -> None:
        """Press keys without waiting for the chat in between, like a fast typist or a paste."""
        for line in lines:
            for letter in line:
                d.chat.prompt.post_message(_key(letter))
            d.chat.prompt.post_message(_key("enter"))

    async def test_typing_after_a_command_is_not_mixed_with_it(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            await d.pilot.press(*_keys("/new"), "enter", *_keys("what is tar"))
            assert d.chat.prompt.text == "what is tar"

    async def test_two_commands_in_a_row(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            await self.type_and_enter(d, "/set temperature 0.2", "/set top_k 5", "/set seed 7")
            await d.said("seed is now 7")
            assert d.chat.current_chat.settings == {"temperature": 0.2, "top_k": 5, "seed": 7}
            assert d.chat.prompt.text == ""

    async def test_rejected_command_does_not_replace_what_was_typed_since(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            await self.type_and_enter(d, "/set temperature hot")
            d.chat.prompt.post_message(_key("x"))
            await d.said("temperature must be")
            assert d.chat.prompt.text == "x"
            d.chat.prompt.clear()
            await d.say("/set temperature hot")
            assert d.chat.prompt.text == "/set temperature hot"

    async def test_a_message_during_a_reply_waits_and_is_in_the_history(self, tmp_path: Path) -> None:
        async with driving(loading(ScriptedRuntime(scripts=[SLOW])), tmp_path) as d:
            await d.send("go on")
            await d.said("word word")
            await d.send("too early")
            await d.press("up")
            assert d.chat.prompt.text == "too early"
            d.chat.prompt.clear()
            await self.type_and_enter(d, "again")
            d.chat.prompt.post_message(_key("y"))
            await d.pilot.pause(0.1)
            assert d.chat.prompt.text == "y"
            assert d.chat.waiting.texts == ["again"]
            await d.press("up")
            assert d.chat.prompt.text == "again"


def _keys(text: str) -> list[str]:
    return [{" ": "space", "/": "slash"}.get(letter, letter) for letter in text]


def _key(letter: str) -> events.Key:
    return events.Key(letter, letter if len(letter) == 1 else "\r")


async def test_chat_files_with_and_without_the_mark_are_read(tmp_path: Path) -> None:
    await unfinished_chat(tmp_path, SLOW)
    store = ChatStore(tmp_path / "chats")
    (entry,) = store.list()
    marked = entry.path.read_text()
    assert '"version": 2' in marked
    entry.path.write_text(marked.replace('"unfinished": true', '"other": 1'))
    chat = store.load(entry.id)
    assert not chat.unfinished
    assert chat.messages[0] == Message("user", "a question")
    entry.path.write_text(marked.replace('"unfinished": true', '"unfinished": "yes"'))
    assert "`unfinished` must be true or false" in store.list()[0].problem


class TestRefusedMessages:
    async def test_a_refused_first_message_leaves_no_chat(self, tmp_path: Path) -> None:
        """The message is back in the input, so the next chat must not offer to finish its reply."""
        error = TemplateError("no template", "choose another model")
        async with driving(loading(ScriptedRuntime(scripts=[Script(error=error)])), tmp_path) as d:
            await d.say("a question")
            assert d.chat.prompt.text == "a question"
            assert not d.saved()
        async with driving(loading(ScriptedRuntime()), tmp_path) as d:
            assert "unfinished" not in d.transcript()

    async def test_a_refused_message_leaves_the_chat_as_it_was(self, tmp_path: Path) -> None:
        error = ContextFullError("too long", "use a larger context")
        scripts = [Script("One."), Script(error=error), Script("Two.")]
        async with driving(loading(ScriptedRuntime(scripts=scripts)), tmp_path) as d:
            await d.say("a question")
            await d.say("too long")
            assert contents(saved(d)) == ["a question", "One."]
            assert not saved(d).unfinished
            await d.say("shorter")
            assert contents(saved(d)) == ["a question", "One.", "shorter", "Two."]
