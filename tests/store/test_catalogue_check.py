"""`scripts/check_catalogue` compares the catalogue with the files on Hugging Face."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.store.catalogue import Catalogue, HeadEntry, ModelEntry, load_catalogue, models_folder
from scripts import catalogue_check
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_vision import write_vision_model
from tests.store.stand_in_hub import REPOSITORY, StandInHub

HEAD_FILE = "demo-head.gguf"


def demo_on(hub: StandInHub) -> tuple[ModelEntry, ModelEntry, HeadEntry]:
    """Put the demo's files on the hub, and return their entries."""
    catalogue, folder = load_catalogue(), models_folder()
    entries = []
    for name, quantisation in (("demo", "Q8_0"), ("demo-draft", "Q8_1")):
        found = catalogue.find(name)
        assert found is not None
        path = found[0].embedded_path
        assert path is not None
        hub.files[f"{name}-{quantisation}.gguf"] = path.read_bytes()
        entries.append(
            replace(found[0], gguf_repository=REPOSITORY, embedded_file="", quantisation=quantisation)
        )
    hub.files[HEAD_FILE] = (folder / "demo-head-q8_0.gguf").read_bytes()
    head = catalogue.find_head("demo-head")
    assert head is not None
    return entries[0], entries[1], replace(head, repository=REPOSITORY, embedded_file="", gguf_file=HEAD_FILE)


def check(monkeypatch: pytest.MonkeyPatch, *entries: ModelEntry | HeadEntry) -> int:
    models = [entry for entry in entries if isinstance(entry, ModelEntry)]
    heads = [entry for entry in entries if isinstance(entry, HeadEntry)]
    monkeypatch.setattr(catalogue_check, "load_catalogue", lambda: Catalogue(models, heads))
    return catalogue_check.main([])


@pytest.fixture
def demo(hub: StandInHub) -> tuple[ModelEntry, ModelEntry, HeadEntry]:
    hub.files.clear()
    return demo_on(hub)


def test_a_correct_catalogue_has_no_differences(
    demo: tuple[ModelEntry, ModelEntry, HeadEntry],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(monkeypatch, *demo) == 0
    assert capsys.readouterr().out == "Checked 2 models and 1 heads: 0 differences.\n"


def test_every_wrong_fact_is_reported(
    demo: tuple[ModelEntry, ModelEntry, HeadEntry],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft, _ = demo
    wrong = replace(
        target,
        parameters=20_000_000,
        approximate_file_bytes=1 << 30,
        context_tokens=4096,
        licence="MIT",
        heads=("MTP",),
        active_parameters=1_000_000,
        drafts=(),
    )
    unavailable = replace(draft, quantisation="Q4_K_M")
    gone = replace(draft, name="gone", gguf_repository="someone/else")
    assert check(monkeypatch, wrong, unavailable, gone) == 1
    found = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    facts = ("parameters", "size", "context", "licence", "heads", "experts")
    assert found[-9:-1] == [*(["demo", fact] for fact in facts), ["demo-draft", "files"], ["gone", "files"]]


@pytest.mark.parametrize(("listed", "is_right"), [(0, False), (400_000, True), (500_000, False)])
def test_the_size_of_the_projector_is_compared(
    demo: tuple[ModelEntry, ModelEntry, HeadEntry],
    hub: StandInHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listed: int,
    is_right: bool,
) -> None:
    projector = write_vision_model(tmp_path, "llava").projector.read_bytes()
    hub.files["mmproj-demo-F16.gguf"] = projector + bytes(400_000 - len(projector))
    target = replace(demo[0], drafts=(), approximate_projector_bytes=listed)
    assert check(monkeypatch, target) == (0 if is_right else 1)
    assert ("projector" in capsys.readouterr().out) is not is_right


def test_a_draft_model_with_other_tokens_is_reported(
    demo: tuple[ModelEntry, ModelEntry, HeadEntry],
    hub: StandInHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft, _ = demo
    hub.files[f"demo-draft-{draft.quantisation}.gguf"] = write_llama(tmp_path / "other.gguf").read_bytes()
    assert check(monkeypatch, target, draft) == 1
    assert "tokens of demo-draft" in capsys.readouterr().out


def test_a_head_for_another_model_is_reported(
    demo: tuple[ModelEntry, ModelEntry, HeadEntry],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft, head = demo
    wrong = replace(head, targets=("demo-draft",), kind="DFlash", approximate_file_bytes=1 << 30)
    assert check(monkeypatch, target, draft, wrong) == 1
    found = {
        line.split()[1] for line in capsys.readouterr().out.splitlines() if "demo-head" in line.split()[:1]
    }
    assert found == {"kind", "size", "target"}


def test_the_licence_of_a_head_in_a_folder_is_read_from_its_card(hub: StandInHub, tmp_path: Path) -> None:
    hub.files.clear()
    folder = models_folder() / "demo-mlx-head"
    hub.files |= {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.files["README.md"] = b"---\nlicense: mit\n---\nA head."
    head = load_catalogue().find_head("demo-mlx-head")
    assert head is not None
    published = replace(head, repository=REPOSITORY, embedded_file="")
    for licence, differences in {
        "MIT": [],
        "": [("demo-mlx-head", "licence", "none", "mit")],
        "CC-BY-4.0": [("demo-mlx-head", "licence", "CC-BY-4.0", "mit")],
    }.items():
        listed = replace(published, licence=licence)
        found = catalogue_check.compare([], [listed], tmp_path / licence, lambda description, done: True)
        assert found == differences


@pytest.mark.parametrize("offline", [False, True])
def test_one_line_says_that_the_hub_cannot_be_reached(
    offline: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    assert catalogue_check.main(["qwen3-8b"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("The catalogue was not checked: ")
    assert said.err.count("\n") == 1
