"""Failures during loading, replies, saving and quitting, with a scripted runtime that fails on demand."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from textual import events

from edgespec import Runtime
from edgespec.chat.message import Message
from edgespec.chat.prompt_history import PromptHistory
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import BackendError, CancelledError, EdgespecError, ModelFileError
from edgespec.store.download import Progress
from edgespec.tui.app import ChatApp, LoadingScreen, run_chat
from edgespec.tui.chat_view import ChatView
from edgespec.tui.widgets.messages import ReplyMessage
from tests.cases import first
from tests.tui.driving import driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, as_runtime, loading

SLOW = Script(text=LONG_TEXT, pause_seconds=0.005)


async def test_loading_shows_progress(tmp_path: Path) -> None:
    gate = threading.Event()

    def load(progress: Progress) -> Runtime:
        progress("loading 70b-q4", 0.42)
        gate.wait(60)
        return as_runtime(ScriptedRuntime())

    async with driving(load, tmp_path, wait=False) as d:
        await d.sees("loading 70b-q4")
        await d.sees("42%")
        await d.write("typed aheadd")
        await d.press("backspace", "ctrl+j")
        await d.write("two lines")
        d.app.post_message(events.Paste(" [pasted]"))
        await d.press("enter")
        await d.sees("two lines [pasted]")
        await d.sees("This message will be sent as soon as the model is loaded.")
        gate.set()
        await d.settled()
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 2, "the reply")
        assert d.chat.prompt.text == ""
        sent, _reply = d.chat.current_chat.entries
        assert sent.message.text == "typed ahead\ntwo lines [pasted]"


async def test_enter_while_loading_can_be_taken_back(tmp_path: Path) -> None:
    gate = threading.Event()
    async with driving(loading(ScriptedRuntime(), gate=gate), tmp_path, wait=False) as d:
        await d.write("question")
        await d.press("enter")
        await d.sees("This message will be sent as soon as the model is loaded.")
        await d.write("x")
        await d.press("backspace", "backspace")
        await d.write("s")
        gate.set()
        await d.settled()
        assert d.chat.prompt.text == "questions"
        assert not d.chat.current_chat.entries


async def test_every_message_typed_while_loading_is_sent_in_order(tmp_path: Path) -> None:
    gate = threading.Event()
    runtime = ScriptedRuntime(scripts=[Script("First."), Script("Second.")])
    async with driving(loading(runtime, gate=gate), tmp_path, wait=False) as d:
        await d.write("/set seed 7")
        await d.press("enter")
        await d.sees("This command will run as soon as the model is loaded.")
        await d.write("one")
        await d.press("enter")
        await d.sees("Waiting  one")
        await d.sees("These messages and commands will be handled")
        await d.write('"""two')
        await d.press("enter")
        await d.write('lines"""')
        await d.press("enter")
        await d.write("three")
        await d.press("enter", "enter")
        await d.press("backspace", "up")
        await d.write("!")
        gate.set()
        await d.settled()
        await until(d.pilot, lambda: len(d.chat.current_chat.entries) == 4, "two replies")
        await d.settled()
        said = [entry.content for entry in d.chat.current_chat.entries if entry.role == "user"]
        assert said == ["one", "two\nlines"]
        assert d.chat.current_chat.settings == {"seed": 7}
        assert runtime.asked[0][2]["seed"] == 7, "a command runs before the messages after it"
        assert d.chat.prompt.text == "three!"


async def test_a_pasted_text_that_is_too_long_is_refused_while_loading_too(tmp_path: Path) -> None:
    gate = threading.Event()
    async with driving(loading(ScriptedRuntime(), gate=gate), tmp_path, wait=False) as d:
        await until(d.pilot, lambda: isinstance(d.app.screen, LoadingScreen))
        d.app.post_message(events.Paste("x" * 500_001))
        await d.sees("500,001 characters")
        gate.set()
        await d.settled()
        assert d.chat.prompt.text == ""


def contains(screen: LoadingScreen, text: str) -> bool:
    return text in screen.typed


async def test_files_and_long_texts_are_added_while_loading_as_in_the_input(tmp_path: Path) -> None:
    gate, pasted = threading.Event(), "word " * 300
    (tmp_path / "my notes.txt").write_text("notes")
    runtime = ScriptedRuntime()
    async with driving(loading(runtime, gate=gate), tmp_path, wait=False) as d:
        await until(d.pilot, lambda: isinstance(d.app.screen, LoadingScreen))
        screen = d.app.screen
        assert isinstance(screen, LoadingScreen)
        for text, shown in ((pasted, "[Pasted text 1: 1 line"), (str(tmp_path / "my notes.txt"), '@"')):
            d.app.post_message(events.Paste(text))
            await until(d.pilot, partial(contains, screen, shown), shown)
        await d.press("enter")
        assert screen.waiting.texts == [f'{pasted} @"{tmp_path / "my notes.txt"}" ']
        await d.press("up", "backspace")
        assert screen.typed.startswith("[Pasted text 1")
        screen.typed = ""
        d.app.post_message(events.Paste(pasted))
        await until(d.pilot, lambda: bool(screen.typed), "the label")
        await d.press("backspace")
        assert screen.typed == ""
        d.app.post_message(events.Paste(pasted))
        await until(d.pilot, lambda: bool(screen.typed), "the label")
        gate.set()
        await d.settled()
        assert d.chat.prompt.text.startswith("[Pasted text ")
        assert d.chat.prompt.whole_text == pasted


@pytest.mark.parametrize("key", first(["ctrl+c", "escape", "ctrl+q"]))
async def test_loading_can_be_cancelled(tmp_path: Path, key: str) -> None:
    app = ChatApp(
        loading(ScriptedRuntime(), steps=6000, pause_seconds=0.01), store=ChatStore(tmp_path / "chats")
    )
    async with app.run_test() as pilot:
        await until(pilot, lambda: isinstance(app.screen, LoadingScreen))
        await pilot.press(key)
        await until(pilot, lambda: not app.is_running, "the app to end", seconds=30)
    assert isinstance(app.load_error, CancelledError)
    assert app.model_thread.join(60)


@pytest.mark.parametrize("remembers", [True, False])
async def test_what_was_typed_before_loading_was_cancelled_is_kept(tmp_path: Path, remembers: bool) -> None:
    load, store = loading(ScriptedRuntime(), steps=6000, pause_seconds=0.01), ChatStore(tmp_path / "chats")
    app = ChatApp(load, store=store, remember=remembers)
    async with app.run_test() as pilot:
        await until(pilot, lambda: isinstance(app.screen, LoadingScreen))
        await pilot.press("o", "n", "e", "enter", "t", "w", "o", "escape")
        await until(pilot, lambda: not app.is_running, "the app to end", seconds=30)
    assert app.model_thread.join(60)
    note = app.keep_typed()
    assert PromptHistory(store.folder.parent).read() == (["one\ntwo"] if remembers else [])
    assert ("one" in note) != remembers
    assert app.keep_typed() == ""


async def test_quit_during_a_load_that_ignores_cancel(tmp_path: Path) -> None:
    gate = threading.Event()
    app = ChatApp(loading(ScriptedRuntime(), gate=gate), store=ChatStore(tmp_path / "chats"))
    async with app.run_test() as pilot:
        await until(pilot, lambda: isinstance(app.screen, LoadingScreen))
        await pilot.press("escape", "escape")
        await until(pilot, lambda: not app.is_running, "the app to end", seconds=30)
    assert isinstance(app.load_error, CancelledError)
    gate.set()
    assert app.model_thread.join(60)


def test_run_chat_raises_what_loading_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ModelFileError("big.gguf is not a GGUF file", "download it again")

    def load(progress: Progress) -> Runtime:
        raise problem

    real_run = ChatApp.run
    monkeypatch.setattr(ChatApp, "run", lambda app, **_: real_run(app, headless=True))
    with pytest.raises(ModelFileError) as caught:
        run_chat(load, store=ChatStore(tmp_path / "chats"))
    assert caught.value is problem


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "title", "body"),
    [
        (
            BackendError("llama_decode returned 1", "use a larger --context"),
            "llama_decode returned 1",
            "Use a larger",
        ),
        (RuntimeError("boom\nwith two lines"), "Unexpected error: RuntimeError", "boom with two lines"),
        (MemoryError(), "Unexpected error: MemoryError", "Your chat is saved"),
    ],
)
async def test_an_engine_error_is_a_panel_and_the_chat_goes_on(
    tmp_path: Path, error: Exception, title: str, body: str
) -> None:
    runtime = ScriptedRuntime(scripts=[Script(error=error), Script(text="Fine again.")])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("a question")
        assert title in d.transcript()
        assert body in d.transcript()
        assert d.chat.prompt.text == "a question"
        assert len(d.chat.transcript.query(ReplyMessage)) == 0
        await d.press("enter")
        await d.settled()
        assert "Fine again." in d.transcript()
        assert title not in d.transcript()
        assert [entry.role for entry in d.chat.current_chat.entries] == ["user", "assistant"]


async def test_a_failed_edit_keeps_the_conversation(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(error=BackendError("no", "try again"))])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("first")
        await d.press("ctrl+p")
        await d.say("second")
        assert [entry.content for entry in d.chat.current_chat.entries] == ["first", "One."]
        assert d.chat.editing == 0
        assert d.chat.prompt.text == "second"


async def test_reply_stopped_before_its_first_word_restores_the_input(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(gate=threading.Event())])
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("never mind")
        await d.press("escape")
        await d.settled()
        assert d.chat.current_chat.entries == []
        assert d.chat.prompt.text == "never mind"


@pytest.mark.long
async def test_quit_during_a_reply_stops_and_saves_it(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[SLOW])
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("go on")
        await d.said("word word")
        began = time.monotonic()
        await d.press("ctrl+q")
        await until(d.pilot, lambda: not d.app.is_running, "the app to end", seconds=5)
        assert time.monotonic() - began < 30
        (path,) = d.saved()
    assert runtime.closed
    assert "word word" in path.read_text()


@pytest.mark.long
async def test_quit_has_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.tui.app._QUIT_SECONDS", 0.3)
    deaf = Script(text="word " * 400, pause_seconds=0.005, ignores_cancel=True)
    async with driving(loading(ScriptedRuntime(scripts=[deaf])), tmp_path) as d:
        await d.send("go on")
        await d.said("word word")
        await d.press("ctrl+q")
        await until(d.pilot, lambda: not d.app.is_running, "the app to end", seconds=3)


async def test_control_c_stops_then_clears_then_quits(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime(scripts=[SLOW])), tmp_path) as d:
        await d.send("go on")
        await d.said("word word")
        await d.press("ctrl+c")
        await d.settled()
        assert d.chat.current_chat.entries[-1].role == "assistant"
        await d.write("half")
        await d.press("ctrl+c")
        assert d.chat.prompt.text == ""
        await d.press("up")
        assert d.chat.prompt.text == "half"
        await d.press("ctrl+c")
        await d.press("ctrl+c", "ctrl+c")
        await until(d.pilot, lambda: not d.app.is_running, "the app to end", seconds=5)


@pytest.mark.long
async def test_a_busy_processor_is_mentioned_once(tmp_path: Path) -> None:
    note = "slower than usual, because other programs were using the processor"
    busy = Script(busy_passes=1000)
    async with driving(loading(ScriptedRuntime([Script(), busy, busy])), tmp_path, size=(120, 40)) as d:
        await d.say("one")
        assert note not in d.transcript()
        await d.say("two")
        assert note in d.transcript()
        await d.say("three")
        assert note not in d.transcript()
        await d.press("f3")
        await d.sees("fewer than usual")


@pytest.mark.long
async def test_a_reply_stopped_while_the_processor_is_busy_can_be_continued(tmp_path: Path) -> None:
    busy = Script(LONG_TEXT, pause_seconds=0.005, busy_passes=5000)
    async with driving(loading(ScriptedRuntime([busy])), tmp_path, size=(100, 30)) as d:
        await d.send("one")
        await d.sees("word word")
        await d.press("escape")
        await d.sees("Stopped. Type /continue to finish the reply.")
        assert "slower than usual" in d.transcript()


async def test_a_list_of_chats_closed_with_escape_stays_closed(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(100, 30)) as d:
        await d.press("f2")
        assert (d.chat.sidebar.display, d.chat.preferences.sidebar) == (True, True)
        await d.press("escape")
        assert (d.chat.sidebar.display, d.chat.preferences.sidebar) == (False, False)


async def test_chat_with_invalid_settings_still_opens(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats")
    chat = _odd_chat(store)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/load odd")
        assert d.chat.current_chat.id == chat.id
        assert d.chat.current_chat.settings == {"top_k": 20}
        assert "temperature must be a number from 0 to 100, not 'hot'" in d.transcript()
        assert "This chat used 8b-q4, and now uses demo. Type /model to switch" in d.transcript()


def _odd_chat(store: ChatStore) -> SavedChat:
    now = datetime.now(UTC)
    chat = SavedChat(
        store.new_id(),
        MessageTree.linear([Message("user", "odd")]),
        now,
        now,
        target="8b-q4",
        sampling={"temperature": "hot", "top_k": 20, "warp": 9},
    )
    store.save(chat)
    return chat


@pytest.mark.long
async def test_text_the_model_writes_is_never_markup(tmp_path: Path) -> None:
    odd = "Use #include <stdio.h> and [bold]x[/bold] and [/] and $primary."
    runtime = ScriptedRuntime(scripts=[Script(text=odd), Script(text=odd)])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("[red]hello[/red] [/] <b>")
        assert "[red]hello[/red] [/] <b>" in d.transcript()
        assert odd in d.transcript()
        await d.press("f4")
        await d.say("again [/]")
        assert d.transcript().count(odd) == 2


async def test_the_message_that_a_reply_is_not_finished_ends_with_the_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(self: ChatView, text: str) -> None:
        self.notify(text, timeout=600)

    monkeypatch.setattr(ChatView, "say", say)
    gate = threading.Event()
    async with driving(loading(ScriptedRuntime(scripts=[Script(gate=gate)])), tmp_path) as d:
        await d.send("a question")
        await d.send("/continue")
        await d.sees("The reply is not finished yet")
        gate.set()
        await d.settled()
        await until(d.pilot, lambda: "not finished" not in "\n".join(d.screen_text()), "no message")


@pytest.mark.parametrize(("advice", "lines"), [("", 1), ("Do something.", 2)])
async def test_an_error_without_advice_takes_one_line(tmp_path: Path, advice: str, lines: int) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.chat.show_error(EdgespecError("it failed", advice))
        await d.pilot.pause()
        assert d.chat.query_one(".panel").size.height == lines


async def test_the_input_has_the_focus_from_the_first_frame(tmp_path: Path) -> None:
    focused: list[str] = []
    async with driving(loading(ScriptedRuntime()), tmp_path, wait=False) as d:
        await until(d.pilot, lambda: any(isinstance(screen, ChatView) for screen in d.app.screen_stack))
        while "F1 help" not in str(d.chat.prompt.border_subtitle):
            focused.append(str(d.chat.prompt.border_subtitle))
            await d.pilot.pause(0)
        assert not any("Ctrl+R renames" in hint for hint in focused)
