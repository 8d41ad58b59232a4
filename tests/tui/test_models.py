"""The list of models: filtering, searching, downloading in the background, and switching."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from huggingface_hub import constants
from textual.widgets import OptionList

import edgespec
from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, ModelReferences, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import ModelFileError
from edgespec.store import download
from edgespec.store.catalogue import models_folder
from edgespec.store.download import Progress
from edgespec.system.files import format_bytes
from edgespec.tui.downloads import Download
from edgespec.tui.screens.models import ModelsScreen, default_for_chats
from edgespec.tui.worker import Load
from tests.backends.tiny_models import write_llama
from tests.store.conftest import use_endpoint
from tests.store.stand_in_hub import REPOSITORY, StandInHub
from tests.tui.driving import Driver, check_screen, driving, until
from tests.tui.scripted import LONG_TEXT, Script, ScriptedRuntime, loading

REFERENCE = f"hf:{REPOSITORY}"


@pytest.fixture(autouse=True)
def own_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use empty model folders and no network."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(download, "_RETRY_SECONDS", 0.0)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """Start a hub with one repository, which contains the demo model."""
    data = (models_folder() / "demo-target-q8_0.gguf").read_bytes()
    hub = StandInHub(files={"tiny-Q4_K_M.gguf": data})
    hub.found = [{"id": REPOSITORY, "gguf": {"total": 11_540_736, "architecture": "llama"}}]
    hub.start()
    use_endpoint(monkeypatch, hub.url)
    yield hub
    hub.stop()


def load_here(reference: str, changed: Mapping[str, Any] | None = None) -> Load:
    def load(progress: Progress) -> edgespec.Runtime:
        options: dict[str, Any] = {"draft": "none"} if "mlx" in reference else {"threads": 1}
        options |= {"exactness": "off", "measure_costs": False, "memory": "4GiB", **(changed or {})}
        return edgespec.load(reference, progress=progress, **options)

    return load


async def open_list(d: Driver) -> ModelsScreen:
    await d.press("f9")
    await until(d.pilot, lambda: isinstance(d.app.screen, ModelsScreen), "the list")
    await d.sees("To download")
    screen = d.app.screen
    assert isinstance(screen, ModelsScreen)
    return screen


def highlighted(d: Driver) -> str:
    option = d.app.screen.query_one(OptionList).highlighted_option
    return option.id or "" if option else ""


async def test_the_list_filters_and_switches_with_the_keyboard(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await open_list(d)
        assert highlighted(d) == "demo"
        await d.press("enter")
        assert isinstance(d.app.screen, ModelsScreen), "the model in use cannot be chosen"
        await d.press("down")
        assert highlighted(d) == "demo-mlx"
        await d.press("escape")
        await open_list(d)
        await d.write("mlx")
        await until(d.pilot, lambda: highlighted(d) == "demo-mlx", "the filter")
        assert "smollm2-135m " not in "\n".join(d.screen_text())
        await d.press("enter")
        await d.said("This chat now uses demo-mlx.")
        await d.settled()
        assert d.chat.runtime.target.name == "demo-mlx"


@pytest.mark.long
async def test_a_chat_opened_from_the_list_loads_its_own_models(tmp_path: Path) -> None:
    store, now = ChatStore(tmp_path / "chats"), datetime.now(UTC)
    messages = MessageTree.linear([Message("user", "Hello"), Message("assistant", "Hi")])
    models = ModelReferences("demo-draft", "none")
    store.save(SavedChat("2026-a", messages, now, now, target="demo-draft", title="old", models=models))
    gone = ModelReferences(str(tmp_path / "gone.gguf"))
    store.save(SavedChat("2026-b", messages, now, now, target="gone", title="gone", models=gone))
    async with driving(load_here("demo"), tmp_path, load_other=load_here, size=(100, 40)) as d:
        await d.send("/load old")
        await d.said("This chat now uses demo-draft.")
        await d.settled()
        assert d.chat.runtime.target.name == "demo-draft"
        assert d.chat.models == models
        assert d.chat.current_chat.id == "2026-a"
        await d.say("/load gone")
        await d.said("This chat used gone, and now uses demo-draft.")


@pytest.mark.long
async def test_a_part_of_a_name_opens_the_list_of_matching_models(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here) as d:
        await d.send("/model mlx")
        await until(d.pilot, lambda: highlighted(d) == "demo-mlx", "the filtered list")
        assert d.chat.prompt.text == ""
        assert "smollm2-135m " not in "\n".join(d.screen_text())
        await d.press("enter")
        await d.said("This chat now uses demo-mlx.")


@pytest.mark.long
async def test_models_that_do_not_fit_are_not_downloaded(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path, size=(100, 40)) as d:
        await open_list(d)
        await d.write("70b-q4")
        await d.sees("too large")
        await d.press("enter")
        await d.sees("70b-q4 was not downloaded, because it is too large for this machine.")
        assert d.chat.downloads.status == ""


async def test_a_found_model_is_downloaded_while_one_chats_and_then_used(
    hub: StandInHub, tmp_path: Path
) -> None:
    async with driving(load_here("demo"), tmp_path, load_other=load_here, size=(100, 40)) as d:
        await open_list(d)
        await d.write("tiny")
        await d.sees(REFERENCE)
        await until(d.pilot, lambda: highlighted(d) == REFERENCE, "the result")
        await d.press("enter")
        await d.said(f"Downloading {REFERENCE}")
        await d.say("How do I list files by size?")
        assert len(d.chat.current_chat.entries) == 2
        await until(d.pilot, lambda: not d.chat.downloads.is_running(REFERENCE), "the download")
        await open_list(d)
        await d.write("tiny")
        await until(d.pilot, lambda: highlighted(d) == f"{REPOSITORY}:Q4_K_M", "the downloaded model")
        await d.pilot.pause(1)
        await until(d.pilot, lambda: "Searching" not in "\n".join(d.screen_text()), "the results")
        assert REFERENCE not in "\n".join(d.screen_text()), "the downloaded model is listed once"
        await d.press("enter")
        await d.said("This chat now uses")
        await d.settled()
        assert d.chat.runtime.target.path.endswith("tiny-Q4_K_M.gguf")
        assert len(d.chat.current_chat.entries) == 2


async def test_a_download_is_stopped_and_resumed(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2)
    monkeypatch.setattr(download, "_MAX_RETRIES", 1000)
    hub.stall_after_bytes = [4_000_000, *[0] * 1000]
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(100, 40)) as d:
        await d.send(f"/model {REFERENCE}")
        await until(d.pilot, lambda: "%" in d.chat.downloads.status, "the download", seconds=30)
        await d.sees(f"% of {REFERENCE}")
        await d.say("Hello")
        await open_list(d)
        await d.sees("Downloads")
        assert highlighted(d) == REFERENCE, "the download comes first in the list"
        await d.sees("Press Enter to stop the download")
        await d.press("enter")
        await until(d.pilot, lambda: not d.chat.downloads.is_running(REFERENCE), "the end", seconds=30)
        await d.sees("stopped at")
        await d.press("escape")
        await d.said(f"The download of {REFERENCE} was stopped. To resume it, type /model {REFERENCE}")
        kept = next((tmp_path / "cache").rglob("*.edgespec")).stat().st_size
        hub.stall_after_bytes.clear()
        hub.ranges.clear()
        await d.send(f"/model {REFERENCE}")
        await until(d.pilot, lambda: not d.chat.downloads.is_running(REFERENCE), "the end", seconds=30)
        await d.said(f"{REFERENCE} is downloaded. To switch to it, type /model {REFERENCE}")
        assert hub.ranges == ([f"bytes={kept}-"] if kept else [])


def test_the_remaining_time_counts_only_what_this_download_has_loaded() -> None:
    assert Download("x", fraction=0.5, _start=(monotonic() - 1, 0.5)).time_left == ""
    assert Download("x", fraction=0.75, _start=(monotonic() - 30, 0.5)).time_left == ", 30 s left"
    assert Download("x", fraction=0.1, _start=(monotonic() - 60, 0.0)).time_left == ", 9 min left"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("network", "cannot reach http"),
        ("gated", "is gated: you must accept its licence first. Accept it at"),
        ("disk", "has only 1.0 KiB free"),
        ("missing", "has no model repository"),
    ],
)
async def test_a_failed_download_says_why_in_one_sentence(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    if fault == "network":
        hub.stop()
    elif fault == "gated":
        hub.status, hub.error_code = 403, "GatedRepo"
    elif fault == "missing":
        hub.status, hub.error_code = 404, "RepoNotFound"
    else:
        usage = shutil.disk_usage(tmp_path)._replace(free=1024)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await d.send(f"/model {REFERENCE}")
        await d.said(f"{REFERENCE} was not downloaded:")
        assert text in d.transcript()
        await d.say("Hello")


async def test_a_model_that_was_installed_after_its_download_failed_is_listed_once(
    hub: StandInHub, tmp_path: Path
) -> None:
    reference = f"{REPOSITORY}:Q4_K_M"
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(100, 40)) as d:
        failed = Download(reference, draft="demo-draft", error=RuntimeError())
        failed.ended.set()
        d.chat.downloads._downloads[reference] = failed
        edgespec.download_model(REFERENCE)
        screen = await open_list(d)
        options = screen.query_one(OptionList).options
        assert [option.id for option in options].count(reference) == 1
        # The model can be used, even though its download failed, for example that of its draft model.
        assert screen._shown[reference].is_installed


async def test_without_a_network_the_list_says_so_in_one_line(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(120, 40)) as d:
        await open_list(d)
        await d.write("zz")
        await d.sees("http://127.0.0.1:9 cannot be reached.")


async def test_the_memory_and_the_draft_model_come_from_the_plan(tmp_path: Path) -> None:
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(100, 40)) as d:
        budget = d.chat.runtime.plan.budget.total_bytes if d.chat.runtime.plan else None
        planned = edgespec.plan("demo", memory=budget)
        await open_list(d)
        await d.write("demo")
        await until(d.pilot, lambda: highlighted(d) == "demo", "the demo")
        await d.sees("It needs about")
        await d.sees(f"It needs {format_bytes(planned.plan.total_bytes)} of memory.")
        await d.sees(f"the draft model {planned.draft}")


async def test_running_waits_for_the_end_of_the_reply(tmp_path: Path) -> None:
    runtime = ScriptedRuntime([Script(text=LONG_TEXT, pause_seconds=0.005)])
    async with driving(loading(runtime), tmp_path) as d:
        await d.send("Hello")
        await d.said("word word")
        await open_list(d)
        await d.press("ctrl+s")
        await d.sees("cannot be measured during a reply")


async def test_the_list_on_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The plan depends on this process's memory, so the picture shows the estimate.
    monkeypatch.setattr("edgespec.tui.screens.models._PLAN_DELAY_SECONDS", 3600)
    # Which models fit must not depend on the machine's memory.
    list_models = edgespec.list_models
    monkeypatch.setattr(edgespec, "list_models", lambda memory, also: list_models("256GiB", also))
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        await open_list(d)
        await check_screen(d, "models")


@pytest.mark.long
async def test_a_model_opened_by_path_is_listed_and_has_the_cursor(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "my own model.gguf")
    async with driving(load_here(str(path)), tmp_path, load_other=load_here) as d:
        await open_list(d)
        assert highlighted(d) == str(path)
        assert "my own model.gguf" in "\n".join(d.screen_text())
        await d.sees("This chat uses this model.")
        await d.press("escape")
        await d.say("/model demo-mlx")
        await d.said("This chat now uses demo-mlx.")
        await d.settled()
        await open_list(d)
        assert highlighted(d) == "demo-mlx"
        assert "my own model.gguf" in "\n".join(d.screen_text())


async def test_the_plan_uses_the_options_that_another_model_keeps(tmp_path: Path) -> None:
    planned: list[tuple[str, dict[str, Any]]] = []

    def plan(reference: str, options: Mapping[str, Any]) -> edgespec.Preview:
        planned.append((reference, {**options}))
        raise ModelFileError("it is damaged", "download it again")

    changed = {"context": 512, "draft": "demo-draft"}
    async with driving(loading(ScriptedRuntime()), tmp_path, plan_other=plan, changed=changed) as d:
        await open_list(d)
        await d.press("down")
        await until(d.pilot, lambda: bool(planned), "the plan")
        assert planned == [(highlighted(d), {"context": 512})]


async def test_a_model_becomes_the_default_for_new_chats_and_again_not(tmp_path: Path) -> None:
    async with driving(load_here("demo"), tmp_path) as d:
        await open_list(d)
        await d.press("down", "ctrl+d")
        await d.sees("demo-mlx is now the default for new chats.")
        await d.sees("demo-mlx (default)")
        assert default_for_chats() == "demo-mlx"
        await d.press("escape")
        await open_list(d)
        assert highlighted(d) == "demo"
        await d.press("down", "ctrl+d")
        await d.sees("There is no default")
        assert default_for_chats() == ""
        assert "(default)" not in "\n".join(d.screen_text())
        await d.write("70b-q4")
        await until(d.pilot, lambda: highlighted(d) == "70b-q4", "the filter")
        await d.press("ctrl+d")
        await d.sees("not on this machine yet")
        assert default_for_chats() == ""
