"""The system prompt, the settings, the display preferences, the schema files and the presets of a chat."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, TextArea

from edgespec.errors import OptionError
from edgespec.options.option import TextFile
from edgespec.options.presets import Preset, preset_path, read_preset, write_preset
from edgespec.store.installed import RecommendedSetting
from edgespec.tui.screens.dialogs import PresetScreen, SettingsScreen, SystemScreen
from edgespec.tui.screens.help import HelpScreen
from edgespec.tui.settings import accepted, read_schema
from edgespec.tui.widgets.details import StatusLine
from edgespec.tui.worker import Load
from tests.raising import raises
from tests.tui.driving import ASK, STEADY, Driver, driving, until
from tests.tui.scripted import ScriptedRuntime, facts, loading


async def test_the_system_prompt_reaches_the_model(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        await d.say(ASK)
        plain = d.chat.query_one(StatusLine).facts.context_used_tokens
        await d.press("f5")
        await d.pilot.pause()
        assert isinstance(d.app.screen, SystemScreen)
        d.app.screen.query_one(TextArea).text = "Answer in the style of a very patient teacher."
        await d.press("ctrl+s")
        await d.settled()
        assert d.chat.current_chat.system == "Answer in the style of a very patient teacher."
        await d.press("ctrl+r")
        await d.settled()
        reply = d.chat.current_chat.entries[-1].reply
        assert reply is not None
        assert reply.stats.prompt_tokens > 18
        assert d.chat.query_one(StatusLine).facts.context_used_tokens != plain


async def test_settings_are_checked_where_they_are_typed(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path) as d:
        await d.press("f6")
        await d.pilot.pause()
        screen = d.app.screen
        assert isinstance(screen, SettingsScreen)
        await d.write("hot")
        await d.sees("a number from 0 to 100")
        await d.press("ctrl+s")
        assert d.app.screen is screen
        fields = {field.name: field for field in screen.query(Input)}
        fields["temperature"].value = "0.2"
        fields["top_p"].value = "3"
        await d.sees("from 0 to 1")
        fields["top_p"].value = ""
        fields["max_tokens"].value = "5"
        await d.press("ctrl+s")
        await d.settled()
        assert d.chat.current_chat.settings == {"temperature": 0.2, "max_tokens": 5}
        await d.say("Show me examples of `tar`")
        reply = d.chat.current_chat.entries[-1].reply
        assert reply is not None
        assert reply.finish_reason == "length"
        assert "stopped: the reply reached its maximum length" in d.transcript()


@pytest.mark.long
async def test_invalid_option_is_shown_as_an_error_panel(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, settings=STEADY) as d:
        d.chat.current_chat.settings["method"] = "telepathy"  # as an older chat may have it
        await d.say(ASK)
        assert "telepathy" in d.transcript()
        assert d.chat.current_chat.entries == []
        assert d.chat.prompt.text == ASK
        d.chat.prompt.clear()
        await d.say("/set method default")
        await d.say("/set method telepathy")
        assert "telepathy" in d.transcript()
        d.chat.prompt.clear()
        await d.say("/set method lowbit")
        assert "without the method lowbit" in d.transcript()
        assert "method" not in d.chat.current_chat.settings
        d.chat.prompt.clear()
        await d.say("/set method none")
        await d.say(ASK)
        assert d.chat.query_one(StatusLine).facts.speed_up == "speed-up off"
        assert len(d.chat.current_chat.entries) == 2


@pytest.mark.long
async def test_help_theme_and_preferences(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path) as d:
        await d.write("?")
        await d.pilot.pause()
        assert isinstance(d.app.screen, HelpScreen)
        await d.press("escape")
        await d.press("f8", "f3")
        await d.pilot.pause()
        assert d.app.theme == "edgespec-light"
    async with driving(demo, tmp_path) as d:
        assert d.app.theme == "edgespec-light"
        assert d.chat.query_one("#details").display


@pytest.mark.long
async def test_show_and_set(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path) as d:
        await d.say("/set parameter temp 0.5")
        assert "temperature is now 0.5" in d.transcript()
        await d.say("/set top_p 7")
        assert "from 0 to 1" in d.transcript()
        await d.say("/set tempreture 1")
        assert "Did you mean temperature?" in d.transcript()
        assert "?." not in d.transcript()
        await d.say("/show")
        assert "top_k 40 (default)" in " ".join(d.transcript().split())
        await d.say("/set temperature default")
        assert d.chat.current_chat.settings == {}


async def test_a_schema_applies_until_it_is_removed(demo: Load, tmp_path: Path) -> None:
    schema, broken = tmp_path / "schema.json", tmp_path / "broken.json"
    schema.write_text('{"const": {"answer": 42}}', "utf-8")
    broken.write_text('{"type": "integer", "minimum": 2, "maximum": 1}', "utf-8")
    async with driving(demo, tmp_path) as d:
        await d.say(f"/schema {schema}")
        assert "Replies will now match the schema" in d.transcript()
        await d.say("What is the answer?")
        assert d.chat.current_chat.messages[-1].content == '{"answer": 42}'
        await d.say(f"/schema {broken}")
        assert "Unsatisfiable schema" in d.transcript()
        d.chat.prompt.clear()
        await d.say(f"/schema {tmp_path / 'missing.json'}")
        assert "cannot be read: No such file" in " ".join(d.transcript().split())
        d.chat.prompt.clear()
        assert d.chat.current_chat.settings == {"schema": '{"const": {"answer": 42}}'}
        await d.say("/schema none")
        assert "The schema was removed." in d.transcript()
        assert d.chat.current_chat.settings == {}


async def test_a_saved_schema_is_checked() -> None:
    assert accepted({"schema": '{"const": 1}'}) == ({"schema": '{"const": 1}'}, [])
    assert accepted({"schema": "{"})[0] == {}


@pytest.mark.long
async def test_show_names_the_source_of_recommended_settings(tmp_path: Path) -> None:
    recommended = {"temperature": RecommendedSetting(0.6, "Ollama")}
    runtime = ScriptedRuntime(recommended_sampling=recommended)
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("/show")
        await d.said("temperature")
        shown = " ".join(d.transcript().split())
        assert "temperature 0.6 (default, from Ollama)" in shown
        assert "top_p 0.95 (default)" in shown
        await d.send("/set temperature 0.1")
        await d.send("/show")
        await until(d.pilot, lambda: "temperature 0.1" in " ".join(d.transcript().split()), "the new value")


def test_pipes_devices_and_folders_are_no_schema(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        with raises(OptionError, code="file_not_read"):
            read_schema(path)


def test_an_endless_file_is_refused() -> None:
    with raises(OptionError, "16.0", code="file_not_read"):
        TextFile().parse("/dev/zero")


def test_a_text_from_a_pipe_is_read_without_the_line_ends_of_windows() -> None:
    read, write = os.pipe()
    os.write(write, "é\r\n".encode())
    os.close(write)
    assert TextFile().parse(f"/dev/fd/{read}") == "é\n"
    os.close(read)


@pytest.fixture(autouse=True)
def own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config folder without presets."""
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path / "config"))


def words(driver: Driver) -> str:
    return " ".join(driver.transcript().split())


async def test_save_and_apply(demo: Load, tmp_path: Path) -> None:
    async with driving(demo, tmp_path, system="Be brief.") as d:
        await d.say("/preset")
        assert "There are no presets yet" in words(d)
        await d.say("/set temperature 0")
        await d.say("/set stop END,a b")
        await d.say("/preset save terse")
        await d.said("Saved the preset terse")
        expected = {"system": "Be brief.", "target": "demo", "temperature": 0.0, "stop": ("END", "a b")}
        assert read_preset("terse").settings == expected
        await d.press("ctrl+n")
        await d.say("/set top_k 3")
        await d.say("/system none")
        await d.say("/preset terse")
        await d.said("The preset terse takes effect with your next message.")
        assert "cannot change while a model is loaded" not in words(d)
        chat = d.chat.current_chat
        assert (chat.system, chat.settings) == ("Be brief.", {"temperature": 0.0, "stop": ["END", "a b"]})
        await d.say("Hi")
        assert chat.messages[-1].role == "assistant"


async def test_load_options_are_saved_and_applied(tmp_path: Path) -> None:
    loads: list[Mapping[str, Any]] = []

    def load_other(_reference: str, changed: Mapping[str, Any]) -> Load:
        loads.append(changed)
        return loading(ScriptedRuntime())

    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other) as d:
        for command in ("/context 768", "/set memory 4GiB", "/draft none"):
            await d.send(command)
            await d.said(f"{command.split()[-2].removeprefix('/')} is now ")
            await d.settled()
        expected = {"context": 768, "memory": 4 << 30, "draft": "none"}
        await d.say("/preset save small")
        await d.said("Saved the preset small")
        assert read_preset("small").settings == {"target": "demo", **expected}
        await d.say("/preset small")
        assert len(loads) == 3, "the model is loaded with these options already"
        await d.send("/set context default")
        await until(d.pilot, lambda: len(loads) == 4 and d.app.screen is d.chat, "the model")
        await d.settled()
        assert "context" not in d.chat.changed_load_options
        await d.send("/preset small")
        await until(d.pilot, lambda: len(loads) == 5 and d.app.screen is d.chat, "the model")
        await d.settled()
        assert d.chat.changed_load_options == expected
        await d.press("f6")
        await d.pilot.pause()
        assert {field.name: field.value for field in d.app.screen.query(Input)}["memory"] == "4096MiB"


async def test_a_preset_for_another_model_loads_it_with_its_options(tmp_path: Path) -> None:
    write_preset(Preset("other", {"target": "demo-draft", "context": 768, "method": "suffix"}))
    loads: list[tuple[Any, ...]] = []

    def load_other(*arguments: Any) -> Load:
        loads.append(arguments)
        return loading(ScriptedRuntime(target=facts("demo-draft")))

    async with driving(loading(ScriptedRuntime()), tmp_path, load_other=load_other) as d:
        await d.send("/preset other")
        await d.said("This chat now uses demo-draft.")
        await d.settled()
        assert loads == [("demo-draft", {"context": 768})]
        assert d.chat.current_chat.settings == {"method": "suffix"}


async def test_choose_with_the_keyboard(tmp_path: Path) -> None:
    write_preset(Preset("alpha", {"system": "First."}))
    write_preset(Preset("beta", {"system": "Second.", "target": "8b-q4", "context": 4096}))
    preset_path("broken").write_text("temprature = 1\n")
    runtime = ScriptedRuntime()
    async with driving(loading(runtime), tmp_path) as d:
        await d.say("/preset")
        await until(d.pilot, lambda: isinstance(d.app.screen, PresetScreen), "the presets")
        # The path before this text decides where the line is broken.
        await d.sees("'temprature'")
        await d.press("down", "enter")
        # The preset's model is not on this machine, so its context cannot be used yet.
        await d.said("After the download, type /preset beta again")
        assert d.chat.current_chat.system == "Second."
        await d.say("/preset")
        await until(d.pilot, lambda: isinstance(d.app.screen, PresetScreen), "the presets")
        await d.press("escape")
        await d.say("Hi")
    assert runtime.asked[0][0] == "Second."


async def test_an_existing_preset_is_replaced_only_after_confirmation(tmp_path: Path) -> None:
    write_preset(Preset("mine", {"seed": 1}))
    async with driving(loading(ScriptedRuntime()), tmp_path, settings={"seed": 2}) as d:
        await d.say("/preset save mine")
        await d.sees("Replace the existing")
        await d.press("escape")
        await until(d.pilot, lambda: d.app.screen is d.chat)
        assert read_preset("mine").settings == {"seed": 1}
        await d.say("/preset save mine")
        await d.sees("Replace the existing")
        await d.press("y")
        await d.said("Saved the preset mine")
        assert read_preset("mine").settings == {"target": "demo", "seed": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("/preset nothing", "There is no preset 'nothing'"),
        ("/preset broken", "line 1: there is no setting 'temprature'; did you mean temperature?"),
        ("/preset unusable", "method 'lowbit' cannot be used"),
        ("/preset save", "The preset needs a name"),
        ("/preset save a/b", "is not a valid preset name"),
    ],
)
async def test_what_cannot_be_done(tmp_path: Path, command: str, problem: str) -> None:
    preset_path("broken").parent.mkdir(parents=True)
    preset_path("broken").write_text("temprature = 1\n")
    write_preset(Preset("unusable", {"system": "No.", "method": "lowbit"}))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.say(command)
        await until(d.pilot, lambda: problem.lower().replace(";", ".") in words(d).lower().replace(";", "."))
        assert d.chat.current_chat.system is None
        assert d.chat.current_chat.settings == {}
