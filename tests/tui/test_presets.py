"""`/preset`: choosing, applying and saving presets with only the keyboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from edgespec.options.presets import Preset, preset_path, read_preset, write_preset
from edgespec.tui.screens.dialogs import PresetScreen
from edgespec.tui.worker import Load
from tests.tui.driving import Driver, driving, until
from tests.tui.scripted import ScriptedRuntime, facts, loading


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
