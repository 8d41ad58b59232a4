"""Selected messages: the keys that edit, re-run, delete and fork them, and switch between versions."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.tui import selection
from edgespec.tui.screens.help import HelpScreen
from edgespec.tui.widgets.details import StatusLine
from edgespec.tui.widgets.messages import MESSAGE_KEYS, message_key_hint
from edgespec.tui.worker import Load
from tests.cases import first
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, loading

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def replies(*texts: str) -> ScriptedRuntime:
    return ScriptedRuntime(scripts=[Script(text=text) for text in texts])


def conversation(d: Driver) -> list[str]:
    return [entry.content for entry in d.chat.current_chat.entries]


def saved(d: Driver, place: int = 0) -> SavedChat:
    path = d.saved()[place]
    return ChatStore(path.parent).load(path.stem)


async def act(d: Driver, *keys: str) -> None:
    """Press keys and, if they start a reply, wait until it ends."""
    await d.press(*keys)
    await d.pilot.pause(0.05)
    await d.settled()


@pytest.mark.long
async def test_rerunning_and_editing_keep_the_earlier_versions(tmp_path: Path) -> None:
    async with driving(loading(replies("One.", "Two.", "Three.", "Four.")), tmp_path) as d:
        await d.say("first")
        await d.say("second")
        await act(d, "shift+up", "up", "up", "r")
        assert conversation(d) == ["first", "Three."]
        assert "‹ 2/2 ›" in d.transcript()
        await act(d, "shift+up", "up", "e")
        assert d.chat.prompt.text == "first"
        await d.say("first, again")
        assert conversation(d) == ["first, again", "Four."]
        await act(d, "shift+up", "up", "left")
        assert conversation(d) == ["first", "Three."]
        await act(d, "down", "left")
        assert conversation(d) == ["first", "One.", "second", "Two."]
        await act(d, "left")
        assert conversation(d) == ["first", "One.", "second", "Two."]
        assert len(saved(d).tree.messages) == 7
        assert [message.content for message in saved(d).messages] == conversation(d)


async def test_the_hint_lists_the_keys_only_while_a_message_is_selected(tmp_path: Path) -> None:
    async with driving(loading(replies("One.", "Two.")), tmp_path) as d:
        await d.say("first")
        assert "e edit" not in "\n".join(d.screen_text())
        await d.press("shift+tab")
        await d.sees("e edit · r re-run · g go on · c copy · d delete · F1 more · Esc back")
        await d.press("f1")
        await until(d.pilot, lambda: isinstance(d.app.screen, HelpScreen), "the help page")
        await d.press("end")
        await d.sees("copy its last code block")
        await d.press("escape")
        await d.sees("F1 more")
        await act(d, "r", "shift+up")
        await d.sees("Version 2/2")
        await d.sees("←→ version · e edit")
        await d.press("escape")
        await d.sees("Enter sends")
        await d.press("shift+up", "down")
        assert d.chat.prompt.has_focus


def test_the_hint_fits_any_width() -> None:
    for width in range(8, 100):
        assert len(message_key_hint(width, versions=True, fold="Enter unfold")) <= width


def test_every_key_for_the_selected_message_has_an_action() -> None:
    assert {each.action for each in MESSAGE_KEYS} == selection.ACTIONS.keys()


@pytest.mark.long
async def test_letters_are_typed_unless_a_message_is_selected(tmp_path: Path) -> None:
    async with driving(loading(replies("One.")), tmp_path) as d:
        await d.say("first")
        await d.press("shift+up")
        await d.write("what")
        assert d.chat.prompt.text == "what"
        await d.pilot.click(".user")
        await d.write(" ended")
        assert d.chat.prompt.text == "what ended"
        assert conversation(d) == ["first", "One."]


async def test_deleted_messages_can_be_restored(tmp_path: Path) -> None:
    async with driving(loading(replies("One.", "Two.", "Three.")), tmp_path) as d:
        await d.say("first")
        await d.say("second")
        await act(d, "shift+up", "up", "d")
        assert conversation(d) == ["first", "One."]
        await d.sees("Deleted 2 messages.")
        assert [message.content for message in saved(d).tree.messages] == ["first", "One."]
        await act(d, "u", "escape")
        assert conversation(d) == ["first", "One.", "second", "Two."]
        await d.say("/delete")
        await d.say("/delete")
        assert conversation(d) == []
        assert saved(d).messages == ()
        await d.say("/undo")
        await d.say("/undo")
        assert conversation(d) == ["first", "One.", "second", "Two."]
        await d.say("/undo")
        await d.sees("There is nothing to restore.")
        await d.say("/delete")
        await d.say("third")
        await d.say("/undo")
        assert conversation(d) == ["first", "One.", "second", "Two."]
        assert len(saved(d).tree.messages) == 6


async def test_restored_messages_are_scrolled_into_view(tmp_path: Path) -> None:
    async with driving(loading(replies(*("Long.\n" * 9 for _ in range(3)), "Last.")), tmp_path) as d:
        for question in ("first", "second", "third", "fourth"):
            await d.say(question)
        await d.say("/delete")
        await d.sees("third")
        await d.say("/undo")
        await d.sees("fourth")
        await act(d, "shift+up", "up", "d", "u")
        await d.sees("fourth")


async def test_a_fork_is_a_new_chat_and_leaves_the_old_one_unchanged(tmp_path: Path) -> None:
    async with driving(loading(replies("One.", "Two.", "Three.")), tmp_path) as d:
        await d.say("first")
        await d.say("second")
        old = saved(d)
        await act(d, "shift+up", "up", "up", "f")
        assert conversation(d) == ["first", "One."]
        await d.said("This is a new chat with 2 messages from “first”, which is unchanged.")
        await d.say("third")
        chats = [ChatStore(path.parent).load(path.stem) for path in d.saved()]
        assert {chat.title: len(chat.messages) for chat in chats} == {"first": 4, "first (fork)": 4}
        assert {chat.models.target for chat in chats} == {"demo"}
        assert old in chats
        await d.say("/fork")
        assert len(d.saved()) == 3


async def test_an_edited_reply_is_a_version_that_can_be_continued(tmp_path: Path) -> None:
    async with driving(loading(replies("One.", " and the rest")), tmp_path) as d:
        await d.say("first")
        await act(d, "shift+up", "e")
        await d.sees("Editing the reply")
        await d.sees("Enter saves · Esc cancels")
        await d.say("Two")
        assert conversation(d) == ["first", "Two"]
        assert "‹ 2/2 ›" in d.transcript()
        await act(d, "shift+up", "g")
        assert conversation(d) == ["first", "Two and the rest"]
        assert len(saved(d).tree.messages) == 3


async def test_a_reply_before_other_messages_is_continued_as_a_new_version(tmp_path: Path) -> None:
    async with driving(loading(replies("One.", "Two.", " More.")), tmp_path) as d:
        await d.say("first")
        await d.say("second")
        await act(d, "shift+up", "up", "up", "g")
        assert conversation(d) == ["first", "One. More."]
        assert "‹ 2/2 ›" in d.transcript()
        await act(d, "shift+up", "left")
        assert conversation(d) == ["first", "One.", "second", "Two."]


@pytest.mark.long
async def test_keys_during_a_reply_stop_it_first(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(text=LONG_TEXT, pause_seconds=0.005)])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("first")
        await d.send("second")
        await d.said("word word")
        await act(d, "shift+up", "up", "up", "d")
        await until(d.pilot, lambda: conversation(d) == ["first"], "the deletion")
        assert len(saved(d).tree.messages) == 1
        await act(d, "u")
        assert conversation(d)[:3] == ["first", "One.", "second"]


@pytest.mark.long
async def test_the_selection_reaches_every_message_of_a_long_chat(tmp_path: Path) -> None:
    messages = [Message("user" if n % 2 == 0 else "assistant", f"message {n}") for n in range(130)]
    store = ChatStore(tmp_path / "chats")
    store.save(SavedChat("one", MessageTree.linear(messages), NOON, NOON, title="long"))
    async with driving(loading(replies("Another.")), tmp_path, resume="one") as d:
        await d.said("message 129")
        await d.press("shift+up")
        for _ in range(129):
            await selection.select(d.chat, -1)
        selected = d.chat.selected
        assert selected is not None
        assert selected.place == 0
        assert len(d.chat.transcript.query("UserMessage, ReplyMessage")) < 80
        for _ in range(60):
            await selection.select(d.chat, 1)
        assert d.chat.selected is not None
        assert d.chat.selected.place == 60
        await act(d, "d", "u")
        assert len(conversation(d)) == 130
        await act(d, "r")
        assert conversation(d)[-2:] == ["message 60", "Another."]
        await act(d, "shift+up", "left")
        assert len(conversation(d)) == 130


@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
async def test_other_versions_do_not_change_replies(demo: Load, tmp_path: Path, temperature: float) -> None:
    """Other versions of messages do not affect a reply: the same messages and seed give the same reply."""
    settings: dict[str, str | int | float | bool | list[str]] = {
        "temperature": temperature, "seed": 3, "max_tokens": 24,
    }  # fmt: skip
    async with driving(demo, tmp_path, settings=settings) as d:
        await d.say("How do I list files?")
        await d.say("And by size?")
        wanted = conversation(d)
        await act(d, "shift+up", "up", "e")
        await d.say("How do I delete a folder?")
        await act(d, "shift+up", "up", "left", "down", "r")
        assert conversation(d) == wanted


@pytest.mark.long
async def test_an_edited_message_that_is_deleted_meanwhile_is_sent_as_a_new_one(tmp_path: Path) -> None:
    async with driving(loading(replies("One.", "Two.", "Three.")), tmp_path) as d:
        await d.say("first")
        await d.say("second")
        await act(d, "shift+up", "up", "e")
        await act(d, "shift+up", "up", "up", "up", "d")
        assert conversation(d) == []
        d.chat.prompt.focus()
        await act(d, "enter")
        await d.sees("The message you edited is gone.")
        assert d.chat.prompt.text == "second"
        await act(d, "enter")
        assert conversation(d) == ["second", "Three."]
        assert [message.content for message in saved(d).messages] == ["second", "Three."]


def used_tokens(d: Driver) -> int:
    return d.chat.query_one(StatusLine).facts.context_used_tokens


async def test_deleting_the_only_message_removes_the_outdated_note(tmp_path: Path) -> None:
    async with driving(loading(replies("One.")), tmp_path) as d:
        await d.say("first")
        await act(d, "shift+up", "up", "f")
        assert "This is a new chat with 1 message" in d.transcript()
        await until(d.pilot, lambda: used_tokens(d) > 0, "the number of tokens")
        await act(d, "shift+up", "d")
        await d.sees("Press u or type /undo to undo.")
        assert "This is a new chat" not in d.transcript()
        await until(d.pilot, lambda: used_tokens(d) == 0, "the number of tokens")


async def test_u_restores_the_only_message(tmp_path: Path) -> None:
    async with driving(loading(replies("One.")), tmp_path) as d:
        await d.say("first")
        await act(d, "shift+up", "up", "d")
        assert conversation(d) == []
        await d.sees("u undoes · Esc back")
        await act(d, "u")
        assert conversation(d) == ["first", "One."]
        # The message is selected again. Deleting it again, and then typing any other letter, returns to the
        # input.
        await act(d, "d", "x", "u")
        assert conversation(d) == []
        assert d.chat.prompt.text == "xu"


async def test_the_same_note_is_shown_once(tmp_path: Path) -> None:
    async with driving(loading(replies("One.")), tmp_path) as d:
        await d.say("/preset")
        await d.send("/race")
        await d.said("There is no message to race with yet")
        d.chat.prompt.clear()
        await d.say("/preset")
        assert d.transcript().count("There are no presets yet.") == 1
        assert d.transcript().index("There are no presets yet.") > d.transcript().index("no message to race")


SLOW = Script(text=LONG_TEXT, pause_seconds=0.005)


async def test_delete_during_a_reply_deletes_only_this_exchange(tmp_path: Path) -> None:
    runtime = ScriptedRuntime(scripts=[Script(text="One."), SLOW, SLOW])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("first")
        await d.send("second")
        await d.sees("word word")
        await d.send("/delete")
        await d.settled()
        assert conversation(d) == ["first", "One."]
        # When its reply stops, the message that is being edited becomes another version.
        await d.press("ctrl+p")
        await d.write(", edited")
        await d.press("enter")
        await d.sees("word word")
        await d.send("/delete")
        await d.settled()
        assert d.app.is_running
        assert conversation(d) == ["first", "One."]


@pytest.mark.parametrize("key", ["d", "right"])
async def test_keys_for_a_reply_that_is_being_continued(tmp_path: Path, key: str) -> None:
    runtime = ScriptedRuntime(scripts=[Script(text="One."), Script(text="Two."), SLOW])
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("first")
        await d.say("second")
        await d.press("shift+up", "up", "up", "g")
        await d.sees("word word")
        await act(d, "shift+up", key)
        assert d.app.is_running
        assert conversation(d)[0] == "first"


async def test_an_edit_survives_another_model_and_ctrl_c_keeps_the_draft(tmp_path: Path) -> None:
    other = ScriptedRuntime()
    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=lambda *_: loading(other)) as d:
        await d.say("first")
        await d.write("half")
        await d.press("ctrl+p")
        await d.write(" edited")
        d.chat.post_message(d.chat.ModelChosen("other", None))
        await d.said("This chat now uses")
        await d.settled()
        assert (d.chat.editing, d.chat.prompt.text) == (0, "first edited")
        await d.press("ctrl+c")
        assert (d.chat.editing, d.chat.prompt.text) == (None, "half")
