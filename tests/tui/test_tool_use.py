"""Tools in the chat: off by default, calls approved with the keyboard, and results folded and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import edgespec.tui.tool_use
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import Setting
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.tools.server_config import read_servers, servers_path
from edgespec.tools.tool import Tool
from edgespec.tui.tool_use import ApprovalScreen, ToolsScreen
from edgespec.tui.worker import Load
from tests.tui.driving import Driver, driving, save_chat, until
from tests.tui.scripted import ScriptedRuntime, loading
from tests.tui.tool_servers import configure, force_calls


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate configuration folder without servers."""
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path / "config"))
    servers_path().parent.mkdir()
    return servers_path()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return force_calls(monkeypatch)


async def tools_on(driver: Driver, least: int = 1) -> None:
    await driver.say("/tools on")
    await until(driver.pilot, lambda: len(driver.chat.tool_use.tools) >= least, "the tools", 60)


async def asked(driver: Driver) -> ApprovalScreen:
    """Wait until the approval dialog is open and accepts keys."""
    await until(driver.pilot, lambda: isinstance(driver.app.screen, ApprovalScreen), "the question", 180)
    screen = driver.app.screen
    assert isinstance(screen, ApprovalScreen)
    await until(driver.pilot, lambda: screen.focused is not None, "the buttons")
    return screen


async def finished(driver: Driver) -> None:
    """Wait until the model has generated its answer, which takes longer than other replies."""
    await until(driver.pilot, lambda: driver.chat.idle and not driver.chat.writing, "the answer", 180)
    await driver.settled()


def roles(driver: Driver) -> list[str]:
    return [message.role for message in driver.chat.current_chat.messages]


def results(driver: Driver) -> list[str]:
    return [each.content for each in driver.chat.current_chat.messages if each.role == "tool"]


def shown(driver: Driver) -> str:
    return " ".join("\n".join(driver.screen_text()).split())


async def test_calls_are_not_begun_while_another_model_is_loaded(
    demo: Load, tmp_path: Path, forced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("good", "good_server.py", "stdio")
    async with driving(demo, tmp_path, settings={"temperature": 0.0, "max_tokens": 60}) as d:
        await tools_on(d)
        forced.append("good_colour")
        end_turn = d.chat._end_turn

        async def while_loading(*arguments: Any) -> None:
            d.chat.holds_waiting = True
            await end_turn(*arguments)

        monkeypatch.setattr(d.chat, "_end_turn", while_loading)
        await d.send("Is red warm?")
        await until(d.pilot, lambda: "assistant" in roles(d), "the call", 180)
        await d.settled()
        assert not d.chat.calling_tools
        assert not isinstance(d.app.screen, ApprovalScreen)


@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.long), "auto"])
async def test_a_call_is_shown_approved_made_and_answered(
    demo: Load, tmp_path: Path, forced: list[str], method: str
) -> None:
    configure("good", "good_server.py", "stdio")
    settings: dict[str, Setting] = {"temperature": 0.0, "max_tokens": 60, "method": method}
    async with driving(demo, tmp_path, size=(100, 40), settings=settings) as d:
        await tools_on(d)
        forced.append("good_colour")
        await d.send("Is red warm?")
        await asked(d)
        await d.sees("Tool colour of the server good")
        await d.sees('"name": ')
        assert results(d) == []
        await d.press("enter")
        await finished(d)
        assert roles(d) == ["user", "assistant", "tool", "assistant"]
        call = d.chat.current_chat.messages[1].tool_calls[0]
        colour = json.loads(call.arguments)["name"]
        assert results(d) == [{"red": "red is warm", "blue": "blue is cold"}[colour]]
        await d.sees("Tool good_colour")
        assert results(d)[0] not in shown(d)
        await d.press("shift+up", "up")
        await d.sees("Enter unfold")
        await d.sees("▌ ▶ Tool good_colour")
        await d.press("enter")
        await d.sees(results(d)[0])
        await d.sees("Enter fold")
        (path,) = d.saved()
    saved = json.loads(path.read_text("utf-8"))["messages"]
    assert saved[1]["tool_calls"][0]["function"]["name"] == "good_colour"
    assert (saved[2]["role"], saved[2]["tool_call_id"]) == ("tool", saved[1]["tool_calls"][0]["id"])
    async with driving(demo, tmp_path, size=(100, 40), resume="last") as d:
        await d.sees("Tool good_colour")
        assert results(d) == [saved[2]["content"]]
        await d.send("Thanks")
        await finished(d)
        assert roles(d)[-2:] == ["user", "assistant"]
    assert "unfinished" not in json.loads(path.read_text("utf-8"))


async def test_what_the_user_decides(demo: Load, tmp_path: Path, forced: list[str]) -> None:
    configure("good", "hostile_server.py", "polite")
    settings = {"temperature": 0.0, "max_tokens": 120}
    async with driving(demo, tmp_path, size=(100, 40), settings=settings) as d:
        await tools_on(d)
        # After a refusal, the model continues.
        forced.append("good_act")
        await d.send("Is red warm?")
        await asked(d)
        await d.press("up", "enter")
        await finished(d)
        assert results(d) == ["Error: The user does not allow this call."]
        assert roles(d)[-1] == "assistant"
        # "Allow in this chat": two calls need only one approval.
        forced += ["good_act", "good_act"]
        await d.send("Is blue warm?")
        await asked(d)
        await d.press("down", "enter")
        await finished(d)
        assert len(results(d)) == 3
        assert read_servers()[0].allow == ()
        # In another chat, the dialog opens again. Esc stops the reply.
        await d.press("ctrl+n")
        forced.append("good_act")
        await d.send("And now?")
        await asked(d)
        await d.press("escape")
        await finished(d)
        assert roles(d) == ["user", "assistant", "tool"]
        assert "stopped" in results(d)[0]
        # "Always allow this tool": the choice is saved, and the dialog does not open again.
        forced += ["good_act"]
        await d.send("Once more?")
        await asked(d)
        await d.press("down", "down", "enter")
        await d.sees("good_act is now called without asking.")
        await finished(d)
        assert read_servers()[0].allow == ("act",)
        await d.say("/tools")
        await d.sees("called without asking")
        await d.press("escape")
        await d.say("/tools off")
        await tools_on(d)
        await d.said("You will be asked before each call, except for 1 tool that you always allow.")
        await d.press("ctrl+n")
        forced.append("good_act")
        await d.send("Again?")
        await finished(d)
        assert roles(d) == ["user", "assistant", "tool", "assistant"]


@pytest.mark.long
async def test_keys_typed_while_the_question_opens_decide_nothing(
    demo: Load, tmp_path: Path, forced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wait longer than usual, so that the test also passes on a busy machine.
    monkeypatch.setattr(edgespec.tui.tool_use, "_QUIET_SECONDS", 5.0)
    configure("good", "hostile_server.py", "polite")
    async with driving(demo, tmp_path, settings={"max_tokens": 120, "temperature": 0.0}) as d:
        await tools_on(d)
        forced.append("good_act")
        await d.send("Is red warm?")
        await until(d.pilot, lambda: isinstance(d.app.screen, ApprovalScreen), "the question", 60)
        for _ in range(5):
            await d.press("y", "enter", "1")
        assert isinstance(d.app.screen, ApprovalScreen)
        assert results(d) == []
        # A letter shows that the user goes on typing.
        await asked(d)
        await d.press("y", "enter")
        assert isinstance(d.app.screen, ApprovalScreen)
        await asked(d)
        await d.press("enter")
        await finished(d)
        assert len(results(d)) == 1


async def test_a_key_that_arrives_before_the_dialog_is_ready_decides_nothing(
    demo: Load, tmp_path: Path, forced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without `on_mount`, the dialog stays in its first state.
    monkeypatch.setattr(ApprovalScreen, "on_mount", lambda self: None)
    configure("good", "hostile_server.py", "polite")
    async with driving(demo, tmp_path, settings={"max_tokens": 120, "temperature": 0.0}) as d:
        await tools_on(d)
        forced.append("good_act")
        await d.send("Is red warm?")
        await until(d.pilot, lambda: isinstance(d.app.screen, ApprovalScreen), "the question")
        await d.press("enter", "tab", "enter")
        assert isinstance(d.app.screen, ApprovalScreen)
        assert results(d) == []
        await d.press("escape")
        await finished(d)


async def test_esc_stops_a_call_that_hangs(demo: Load, tmp_path: Path, forced: list[str]) -> None:
    configure("good", "hostile_server.py", "hangs")
    async with driving(demo, tmp_path, settings={"max_tokens": 120, "temperature": 0.0}) as d:
        await tools_on(d)
        forced.append("good_act")
        await d.send("Sleep")
        await asked(d)
        await d.press("enter")
        await d.sees("calling…")
        await d.press("escape")
        await finished(d)
        assert results(d) == ["Error: The user stopped this call."]
        assert d.chat.current_chat.messages[-1].ended_early == "stopped"
        await d.sees("· stopped")
        # The conversation continues.
        await d.say("/continue")
        assert roles(d) == ["user", "assistant", "tool", "assistant"]


async def test_a_hostile_server_cannot_draw_on_the_screen_or_end_the_chat(
    demo: Load, tmp_path: Path, forced: list[str]
) -> None:
    configure("evil", "hostile_server.py", "evil")
    configure("dies", "hostile_server.py", "dies")
    configure("gone", "hostile_server.py", "ends")
    settings = {"max_tokens": 120, "temperature": 0.0, "seed": 1}
    async with driving(demo, tmp_path, size=(100, 40), settings=settings) as d:
        await tools_on(d, 2)
        await d.said("The server gone cannot be used: the program ended with status 1")
        await d.say("/tools")
        await until(d.pilot, lambda: isinstance(d.app.screen, ToolsScreen), "the list")
        await d.sees(r"\x1b[2J\u202eApproved\u200b \x07[bold]run[/bold]")
        await d.press("escape")
        for name in ("evil_act", "dies_act"):
            await d.press("ctrl+n")
            forced.append(name)
            await d.send("Act")
            await asked(d)
            await d.press("enter")
            await finished(d)
            assert roles(d)[:3] == ["user", "assistant", "tool"]
        assert "the program ended with status 3" in results(d)[0]
        await d.sees("failed: the server dies has")
        await d.say("/tools")
        await until(d.pilot, lambda: isinstance(d.app.screen, ToolsScreen), "the list")
        await d.sees("dies  ended: the program ended with status 3")
        await d.press("escape")
        # The model can still call the tool, which restarts the server.
        forced.append("dies_act")
        await d.send("Act")
        await asked(d)
        await d.press("escape")
        await finished(d)


@pytest.mark.long
async def test_long_results_are_limited(demo: Load, tmp_path: Path, forced: list[str]) -> None:
    configure("bad", "hostile_server.py", "long")
    async with driving(demo, tmp_path, settings={"max_tokens": 120, "temperature": 0.0}) as d:
        await tools_on(d)
        forced.append("bad_act")
        await d.send("Act")
        await asked(d)
        await d.press("enter")
        await finished(d)
        assert "[This result has 100,000 characters. The last" in results(d)[0]
        assert len(results(d)[0]) < 1500


@pytest.mark.long
async def test_the_number_of_rounds_is_limited(
    demo: Load, tmp_path: Path, forced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edgespec.tui.tool_use, "MAX_ROUNDS", 2)
    configure("good", "hostile_server.py", "polite")
    servers_path().write_text(servers_path().read_text() + 'allow = ["act"]\n')
    async with driving(demo, tmp_path, settings={"max_tokens": 120, "temperature": 0.0}) as d:
        await tools_on(d)
        forced += ["good_act"] * 5
        await d.send("Is red warm?")
        await finished(d)
        assert len(results(d)) == 3
        assert "Not called" in results(d)[2]
        await d.said("Stopped after 2 rounds of tool calls.")
        forced.clear()
        await d.say("/continue")
        assert roles(d)[-1] == "assistant"


async def test_tools_are_off_until_the_user_turns_them_on(tmp_path: Path) -> None:
    configure("good", "good_server.py", "stdio")
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("Hello")
        await d.say("/tools")
        await until(d.pilot, lambda: isinstance(d.app.screen, ToolsScreen), "the list")
        await d.sees("good  off")
        assert not d.chat.tool_use.toolbox.servers["good"].running
        await d.press("enter")
        await until(d.pilot, lambda: len(d.chat.tool_use.tools) > 3, "the tools", 30)
        await d.sees("✓ add")
        before = len(d.chat.tool_use.tools)
        await d.press("down", "enter", "escape")
        assert len(d.chat.tool_use.tools) == before - 1
        await d.sees(f"{before - 1} tools on")
        assert "good_add" not in [tool.call_name for tool in d.chat.tool_use.tools]
        await d.say("Hello")
        await d.say("/tools off")
        await d.say("Hello")
    assert ["tools" in options for _, _, options in runtime.asked] == [False, True, False]


async def test_the_list_shows_how_a_start_ends(tmp_path: Path, config: Path) -> None:
    config.write_text('[slow]\ncommand = "sh"\nargs = ["-c", "sleep 3; exit 4"]\n')
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/tools on")
        await d.say("/tools")
        await d.sees("slow  starting…")
        await d.sees("slow  not running: the program ended with status 4")


@pytest.mark.long
async def test_a_message_sent_too_early_says_that_the_tools_are_missing(tmp_path: Path, config: Path) -> None:
    config.write_text('[slow]\ncommand = "sleep"\nargs = ["60"]\n')
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/tools on")
        await until(d.pilot, lambda: d.chat.tool_use.is_starting, "the start")
        await d.say("Hello")
        await d.sees("Some tools are still starting.")


async def test_without_servers_it_says_how_to_add_one(tmp_path: Path, config: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say("/tools")
        await d.said("There are no tools yet.")
        config.write_text("[good]\ncomand = 1\n")
        await d.say("/tools on")
        await d.said("Did you mean command?")
        d.chat.prompt.clear()
        await d.say("/tools maybe")
        await d.said("Type /tools, /tools on or /tools off")


async def test_a_saved_call_with_huge_arguments_is_refused_without_asking(tmp_path: Path) -> None:
    configure("good", "hostile_server.py", "polite")
    call = ToolCall("1", "good_act", json.dumps({"text": "x" * 200_000}))
    save_chat(tmp_path, Message("user", "Add."), Message("assistant", "", tool_calls=(call,)))
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="last") as d:
        await tools_on(d)
        await d.send("/continue")
        await until(d.pilot, lambda: len(results(d)) == 1, "the result", 30)
        await d.settled()
        assert results(d)[0].startswith("Error: The arguments have 200,012 characters")


@pytest.mark.parametrize("size", [(100, 30), (40, 20)])
async def test_long_arguments_are_read_with_the_keyboard(tmp_path: Path, size: tuple[int, int]) -> None:
    arguments = json.dumps({"text": "word " * 300, "hidden": "delete everything"})
    async with driving(loading(ScriptedRuntime()), tmp_path, size=size) as d:
        d.app.push_screen(ApprovalScreen(Tool("good", "act", "", {}), arguments))
        await asked(d)
        await d.sees("PgUp PgDn scroll")
        assert "delete everything" not in shown(d)
        await d.press(*["pagedown"] * 20)
        await d.sees("delete everything")
        await d.press(*["pageup"] * 20)
        await d.sees('"text": "word')
        await d.press("escape")
        d.app.push_screen(ApprovalScreen(Tool("good", "act", "", {}), "{}"))
        await asked(d)
        await d.sees("Enter picks · Esc stops the reply")
        assert "PgUp" not in shown(d)
