"""The first screen suggests larger models that fit in memory: those on this machine, or else downloads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec
from edgespec import MemoryUse
from edgespec.model.model_facts import ModelInfo
from edgespec.store import installed
from edgespec.store.catalogue import load_catalogue
from edgespec.store.installed import InstalledModel, InstalledModels
from edgespec.tui.texts import notices
from tests.tui.scripted import ScriptedRuntime, as_runtime, facts

GIB = 1 << 30


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
    plan: Any = SimpleNamespace(budget_bytes=lambda _pool: 12 * GIB)
    use = MemoryUse(1, 1, 1, runtime.memory().prefix_cache, plan=plan)
    monkeypatch.setattr(runtime, "memory", lambda: use)
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
