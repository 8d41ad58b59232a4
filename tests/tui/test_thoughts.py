"""Models that think before they answer: their reasoning is folded, never copied, and saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from edgespec.chat.exporting import messages_as_markdown
from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.tui.app import ChatApp
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.widgets.messages import ReplyMessage
from edgespec.tui.worker import Load
from tests.tui.driving import Driver, driving, save_chat, until
from tests.tui.scripted import Script, ScriptedRuntime, loading

THOUGHT = "<think>\nThe user wants `ls`. What else?\n</think>\n\n"
ANSWER = "Use `ls -S`."


def reply(driver: Driver) -> ReplyMessage:
    """The widget of the last reply."""
    return driver.chat.transcript.query(ReplyMessage).last()


@pytest.mark.long
async def test_reasoning_is_folded_above_the_answer(tmp_path: Path) -> None:
    runtime = ScriptedRuntime([Script(THOUGHT + ANSWER, pause_seconds=0.03)])
    async with driving(loading(runtime), tmp_path) as driver:
        await driver.say("How do I sort files?")
        # Without a time if the whole reply arrives at once.
        await driver.sees("Thought")
        await driver.sees("Use ls -S.")
        shown = "\n".join(driver.screen_text())
        assert "The user wants" not in shown
        assert "<think>" not in shown
        await driver.press("f7")
        await driver.sees("The user wants `ls`. What else?")
        await driver.press("f7")
        await until(driver.pilot, lambda: "The user wants" not in "\n".join(driver.screen_text()))
        await driver.pilot.click("CollapsibleTitle")
        await driver.sees("The user wants `ls`. What else?")


@pytest.mark.long
async def test_while_the_model_thinks_one_line_counts_its_tokens(tmp_path: Path) -> None:
    runtime = ScriptedRuntime([Script(THOUGHT + "word " * 1000, pause_seconds=0.25)])
    async with driving(loading(runtime), tmp_path) as driver:
        await driver.send("How do I sort files?")
        await until(
            driver.pilot,
            lambda: re.search(r"Thinking… \d+ tokens", "\n".join(driver.screen_text())) is not None,
            "the number of tokens",
        )
        assert "The user" not in "\n".join(driver.screen_text())
        await driver.press("f7")
        await driver.sees("The user wants")
        await driver.sees("Thought for ")
        assert driver.chat.writing
        await driver.press("escape")
        await driver.settled()
        assert reply(driver).text.startswith("word ")


async def test_enter_unfolds_the_reasoning_of_the_selected_reply(tmp_path: Path) -> None:
    async with driving(
        loading(ScriptedRuntime([Script(THOUGHT + ANSWER), Script(ANSWER)])), tmp_path
    ) as driver:
        await driver.say("How do I sort files?")
        await driver.say("And without thinking?")
        await driver.press("shift+up")
        assert "Enter unfold" not in "\n".join(driver.screen_text())
        await driver.press("up", "up")
        await driver.sees("Enter unfold")
        await driver.press("enter")
        await driver.sees("The user wants")
        await driver.press("enter")
        await until(driver.pilot, lambda: "The user wants" not in "\n".join(driver.screen_text()), "the fold")


async def test_copying_takes_the_answer_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []

    async def copy(_app: ChatApp, text: str, name: str) -> str:
        copied.append(text)
        return f"Copied the {name}."

    monkeypatch.setattr("edgespec.tui.screen_commands.copy_text", copy)
    async with driving(loading(ScriptedRuntime([Script(THOUGHT + ANSWER)])), tmp_path) as driver:
        await driver.say("How do I sort files?")
        await driver.press("ctrl+y")
        assert copied == [ANSWER]
        assert "The user wants" not in messages_as_markdown(driver.chat.current_chat.messages)


async def test_colours_show_where_tokens_came_from(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime([Script(THOUGHT + ANSWER)])), tmp_path) as driver:
        await driver.say("How do I sort files?")
        await driver.press("f4")
        await driver.sees("guessed correctly")
        assert "The user wants" not in "\n".join(driver.screen_text())
        await driver.press("f7")
        await driver.sees("The user wants `ls`. What else?")
        await driver.sees("Use ls -S.")


@pytest.mark.long
async def test_a_saved_chat_keeps_the_reasoning_and_its_time(tmp_path: Path) -> None:
    runtime = ScriptedRuntime([Script(THOUGHT + ANSWER, pause_seconds=0.05)])
    async with driving(loading(runtime), tmp_path) as driver:
        await driver.say("How do I sort files?")
        tokens = sum(chunk.token_count for chunk in reply(driver).chunks if chunk.reasoning)
        time, _, length = reply(driver).thoughts.title.partition(" · ")
        assert time.startswith("Thought for ")
        assert length == f"{tokens} tokens"
        (path,) = driver.saved()
    saved = json.loads(path.read_text("utf-8"))["messages"][1]
    assert (saved["content"], saved["reasoning"]) == (ANSWER, "The user wants `ls`. What else?")
    assert saved["reasoning_seconds"] > 0
    runtime = ScriptedRuntime([Script("More.")])
    async with driving(loading(runtime), tmp_path, resume="last") as driver:
        await driver.sees(f"{time} · 6 words")
        assert "The user wants" not in "\n".join(driver.screen_text())
        await driver.press("f7")
        await driver.sees("The user wants `ls`. What else?")
        await driver.say("And by name?")
        (path,) = driver.saved()
    messages = json.loads(path.read_text("utf-8"))["messages"]
    assert messages[1] == saved
    assert "reasoning" not in messages[3]


async def test_a_reply_stopped_while_thinking_is_kept_and_can_be_continued(tmp_path: Path) -> None:
    runtime = ScriptedRuntime([Script("<think>\n" + "word " * 1000, pause_seconds=0.25)])
    async with driving(loading(runtime), tmp_path) as driver:
        await driver.send("How do I sort files?")
        await driver.sees("Thinking…")
        await driver.press("escape")
        await driver.settled()
        await driver.sees("stopped")
        entry = driver.chat.current_chat.entries[-1]
        assert entry.content == ""
        assert entry.reasoning
        (path,) = driver.saved()
        assert json.loads(path.read_text("utf-8"))["messages"][1]["reasoning"] == entry.reasoning


async def test_a_continued_reply_does_not_claim_a_time(tmp_path: Path) -> None:
    reply_so_far = Message("assistant", "", "The user", ("<think>\n", ""))
    save_chat(tmp_path, Message("user", "How?"), reply_so_far, unfinished=True)
    runtime = ScriptedRuntime([Script(" wants `ls`.\n</think>\n\nYes.", pause_seconds=0.1)])
    async with driving(loading(runtime), tmp_path, resume="one") as driver:
        await driver.sees("ended without an answer")
        await driver.say("/continue")
        entry = driver.chat.current_chat.entries[-1]
        assert (entry.content, entry.reasoning) == ("Yes.", "The user wants `ls`.")
        await driver.sees("Thoughts")
        await driver.press("f7")
        await driver.sees("The user wants `ls`.")


@pytest.mark.long
async def test_f7_without_reasoning_says_so(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime([Script("Use `<think>` tags.")])), tmp_path) as driver:
        await driver.say("How do models think?")
        assert "Use <think> tags." in driver.transcript()
        await driver.press("f7")
        await driver.sees("No reply in this chat includes the model's reasoning.")


def test_a_running_turn_saves_the_reasoning_so_far() -> None:
    chat = OpenChat()
    turn = chat.send(Message("user", "How?"))
    turn.written.extend(["<think>\n", "The user ", "wants"])
    saved = chat.saved("demo", turn)
    assert saved.messages == (Message("user", "How?"), Message("assistant", "", "The user wants"))
    assert saved.messages[1].text == "<think>\nThe user wants"


THINKING_SWITCH = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.mark.long
async def test_think_switches_the_reasoning_of_a_model_that_has_a_switch(tmp_path: Path) -> None:
    template = ChatTemplate(THINKING_SWITCH, "", "")
    runtime = ScriptedRuntime(template=template)
    async with driving(loading(runtime), tmp_path) as driver:
        await driver.say("/think off")
        await driver.said("the model will be asked not to reason.")
        await driver.say("Hello")
        await driver.say("/think on")
        await driver.said("the model will be asked to reason.")
        await driver.say("/think")
        await driver.said("Reasoning: on.")
        await driver.say("Hello")
        await driver.say("/think auto")
        assert driver.chat.current_chat.settings == {}
        await driver.say("/think maybe")
        await driver.said("maybe")
    template.close()
    assert [options["thinking"] for _, _, options in runtime.asked] == ["off", "on"]


async def test_think_says_that_the_demo_has_no_switch(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path) as driver:
        await driver.say("/think off")
        await driver.said("Reasoning cannot be turned on or off for the model demo")
        assert driver.chat.current_chat.settings == {}


@pytest.mark.long
@pytest.mark.parametrize("source", ["{{ raise_exception('never') }}", "{% if %}"])
async def test_think_with_a_broken_template(tmp_path: Path, source: str) -> None:
    template = ChatTemplate(source, "", "")
    async with driving(loading(ScriptedRuntime(template=template)), tmp_path) as driver:
        await driver.say("/think off")
        await driver.said("Reasoning cannot be turned on or off for the model demo")
    template.close()
