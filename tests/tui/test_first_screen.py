"""The first screen: one line about the model, one explanation for new users, and models to try.

It suggests larger models that fit in memory: those on this machine, or else downloads.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.content import Content

import edgespec
import edgespec.methods.costs.machine_speed as machine_speed
from edgespec import Exactness, MemoryUse, MethodReport
from edgespec.methods.base import LoadedHead
from edgespec.model.model_facts import ModelInfo
from edgespec.model.registry import format_of
from edgespec.store import installed
from edgespec.store.catalogue import load_catalogue
from edgespec.store.installed import InstalledModel, InstalledModels
from edgespec.tui.commands.information import why_text
from edgespec.tui.preferences import Preferences, preferences_path
from edgespec.tui.texts import drafting_explanation, notices, welcome_line
from tests.loading.test_recommendation import machine
from tests.tui.driving import driving, until
from tests.tui.scripted import METHOD, ScriptedRuntime, as_runtime, facts, loading

# Width of the text in a terminal with 80 columns.
WIDTH = 74
GIB = 1 << 30
LOOKUPS = MethodReport("auto", "suffix", "no draft model was found for demo")
EAGLE = replace(METHOD, effective="eagle")
LOWBIT = replace(METHOD, effective="lowbit+suffix")
NO_ROLLBACK = MethodReport("auto", "none", "demo cannot verify drafts: its state cannot be undone")
HEAD: Any = SimpleNamespace(name="demo-head", path="demo-head")
HEADS: tuple[LoadedHead, ...] = (HEAD,)
EXPLAINED = "guesses the next words"


def unhelped() -> ScriptedRuntime:
    """A model that guessing cannot make faster."""
    return ScriptedRuntime(method=NO_ROLLBACK, draft=None)


def allow_memory(monkeypatch: pytest.MonkeyPatch, runtime: ScriptedRuntime) -> None:
    """Let the runtime use 12 GiB."""
    plan: Any = SimpleNamespace(budget_bytes=lambda _pool: 12 * GIB)
    use = MemoryUse(1, 1, 1, runtime.memory().prefix_cache, plan=plan)
    monkeypatch.setattr(runtime, "memory", lambda: use)


@pytest.mark.parametrize(
    ("runtime", "speed_up"),
    [
        (ScriptedRuntime(), "draft model demo-draft"),
        (
            ScriptedRuntime(draft=None, heads=HEADS, method=EAGLE),
            "head demo-head",
        ),
        (ScriptedRuntime(draft=None, method=LOWBIT), "a low-precision copy of the model"),
        (ScriptedRuntime(draft=None, method=LOOKUPS), "repeated text only, /why"),
        (unhelped(), "none on this machine, /why"),
        (ScriptedRuntime(pass_costs={2: 2.0, 4: 3.9, 8: 7.8}), "none on this machine, /why"),
        (ScriptedRuntime(pass_costs={2: 2.0, 4: 3.0, 8: 5.0}), "draft model demo-draft"),
        (ScriptedRuntime(method=MethodReport("none", "none", "as requested")), "off"),
    ],
)
def test_one_line_says_what_to_expect(runtime: ScriptedRuntime, speed_up: str) -> None:
    line = welcome_line(as_runtime(runtime))
    assert line.startswith(f"demo · context 1,024 tokens · speed-up: {speed_up}")
    assert len(line) <= WIDTH


@pytest.mark.parametrize("effective", ["model+suffix", "eagle", "suffix"])
@pytest.mark.parametrize("is_exact", [True, False])
def test_the_explanation_has_at_most_three_lines(effective: str, is_exact: bool) -> None:
    exactness = Exactness("auto", is_exact, "", (), 1.0)
    runtime = ScriptedRuntime(
        target=replace(facts("demo"), exactness=exactness),
        draft=None,
        heads=HEADS if effective == "eagle" else (),
        method=replace(METHOD, effective=effective),
    )
    explanation = drafting_explanation(as_runtime(runtime))
    assert EXPLAINED in explanation
    assert len(Content(explanation).wrap(WIDTH)) <= 3


async def test_drafting_is_explained_once(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        assert EXPLAINED in d.transcript()
        await d.press("ctrl+n")
        await d.settled()
        assert EXPLAINED not in d.transcript()
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        assert EXPLAINED not in d.transcript()
        assert d.transcript().splitlines() == [welcome_line(as_runtime(ScriptedRuntime()))]


async def test_an_explanation_that_was_not_shown_is_shown_later(tmp_path: Path) -> None:
    path = tmp_path / "preferences.json"
    async with driving(loading(unhelped()), tmp_path, load_other=lambda *_: loading(ScriptedRuntime())) as d:
        assert preferences_path(d.app.store) == path
        assert EXPLAINED not in d.transcript()
        assert not Preferences.read(path).knows_drafting
        await d.send("/model demo-mlx")
        await d.said(EXPLAINED)
        await until(d.pilot, lambda: Preferences.read(path).knows_drafting, seconds=10)


async def test_a_reopened_chat_does_not_explain_drafting(tmp_path: Path) -> None:
    async with driving(loading(unhelped()), tmp_path) as d:
        await d.say("hello")
    async with driving(loading(ScriptedRuntime()), tmp_path, resume="last") as d:
        await d.said("hello")
        assert EXPLAINED not in d.transcript()
        assert not d.app.preferences.knows_drafting


def test_why_answers_before_the_first_reply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    assert "from: draft model + repeated text" in why_text(as_runtime(ScriptedRuntime()), METHOD, None, {})
    assert "/set method auto" in why_text(as_runtime(ScriptedRuntime()), METHOD, None, {"method": "none"})
    runtime = unhelped()
    runtime.pass_costs = {2: 1.57}
    allow_memory(monkeypatch, runtime)
    why = why_text(as_runtime(runtime), NO_ROLLBACK, None, {})
    assert "its state cannot be undone" in why
    assert "checking two tokens at once takes 1.57 times as long as one token" in why
    assert "is loaded" not in why
    assert "would be" not in why, "the machine has not been measured"
    machine_speed.save_machine_speed(format_of("gguf"), machine(50))
    why = why_text(as_runtime(runtime), NO_ROLLBACK, None, {})
    assert "as fast with the draft model" in why
    assert "edgespec " not in why
    runtime.draft = facts("demo-draft")
    why = why_text(as_runtime(runtime), NO_ROLLBACK, None, {})
    assert "The draft model demo-draft is loaded, but not used." in why


def test_the_pass_costs_are_those_of_the_loaded_model() -> None:
    with edgespec.load("demo", "none", context=256, threads=1, exactness="off") as runtime:
        assert set(runtime.pass_costs) == {2, 4, 8}
        assert all(cost > 0 for cost in runtime.pass_costs.values())


@pytest.mark.long
def test_the_first_screen_suggests_a_model_that_fits() -> None:
    with edgespec.load("demo", threads=1, memory="1GiB") as runtime:
        assert notices(runtime) == [runtime.target.notice]
    with edgespec.load("demo", threads=1, memory="12GiB") as runtime:
        (notice,) = notices(runtime)
        assert notice == (
            "The demo is a toy model for offline use. SmolLM2, a small real model, is not installed;"
            " scripts/setup installs it. Press F9 to choose and download a real model. These fit this"
            " machine (sizes"
            " include draft models): qwen3.5-2b (1.7 GiB), qwen3.5-4b (2.8 GiB), qwen3.5-9b (5.5 GiB)."
        )


def test_suggestions_do_not_hide_that_rounding_can_change_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    exactness = edgespec.Exactness("auto", False, "can differ from plain decoding by rounding", (), 0.8)
    with edgespec.load("demo", threads=1, memory="12GiB", measure_costs=False) as runtime:
        facts = replace(runtime.target, exactness=exactness)
        monkeypatch.setattr(edgespec.Runtime, "target", facts)
        suggestion, warning = notices(runtime)
    assert "qwen3.5-9b" in suggestion
    assert "rounding" in warning
    assert "/set exactness bits" in warning


def on_this_machine(*models: tuple[str, int, float]) -> InstalledModels:
    """Return installed models with these references, parameters and sizes in GiB."""
    return InstalledModels(
        tuple(
            InstalledModel(
                name,
                "lmstudio",
                Path(name),
                "gguf",
                ModelInfo(
                    "model", name, "llama", parameters, "Q4_0", round(size * GIB), 1, 1, 1, 1, "", True, ""
                ),
                next((each for each in load_catalogue().entries if each.name == name), None),
            )
            for name, parameters, size in models
        ),
        (),
        (),
    )


@pytest.fixture
def first_model(monkeypatch: pytest.MonkeyPatch) -> ScriptedRuntime:
    """SmolLM2 on a machine that can use 12 GiB."""
    runtime = ScriptedRuntime(target=replace(facts("smollm2"), parameters=134_000_000))
    allow_memory(monkeypatch, runtime)
    return runtime


def test_models_on_this_machine_come_before_downloads(
    first_model: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_this_machine(
        ("maker/tiny", 1_000_000, 0.1),
        ("maker/medium", 4_000_000_000, 2.5),
        ("ollama:8b", 8_000_000_000, 4.5),
        ("maker/huge", 70_000_000_000, 40.0),
    )
    monkeypatch.setattr(installed, "find_installed", lambda **_: found)
    (notice,) = notices(as_runtime(first_model))
    assert notice.endswith("On this machine: maker/medium (2.5 GiB), ollama:8b (4.5 GiB).")
    assert "download" not in notice


def test_an_installed_model_is_not_offered_for_download(
    first_model: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "find_installed", lambda **_: on_this_machine())
    (notice,) = notices(as_runtime(first_model))
    assert "download" in notice
    assert "qwen3.5-9b (" in notice
    # The copy on this machine is larger than the memory, so the model is not offered at all.
    too_large = on_this_machine(("qwen3.5-9b", 9_000_000_000, 18.0))
    monkeypatch.setattr(installed, "find_installed", lambda **_: too_large)
    (notice,) = notices(as_runtime(first_model))
    assert "download" in notice
    assert "qwen3.5-9b (" not in notice
