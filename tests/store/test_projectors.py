"""Finding the projector of a model, which lets it see images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edgespec.store.download import _choose_model
from edgespec.store.hub_files import HubFile, best_projector
from edgespec.store.installed import find_projector
from edgespec.store.reference import resolve
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_vision import VisionModel, write_vision_model


@pytest.fixture
def files(tmp_path: Path) -> VisionModel:
    return write_vision_model(tmp_path / "model", "llava")


def test_a_projector_next_to_the_model_is_found(files: VisionModel) -> None:
    assert find_projector(resolve(str(files.model))) == files.projector


def test_a_folder_without_projectors_has_none(tmp_path: Path) -> None:
    assert find_projector(resolve(str(write_llama(tmp_path / "tiny.gguf")))) is None


def test_projectors_that_cannot_fit_are_skipped(files: VisionModel) -> None:
    # The name fits best, but this is a language model.
    shutil.copy(files.model, files.model.with_name("mmproj-tiny.gguf.gguf"))
    files.model.with_name("mmproj-tin.gguf").write_bytes(b"GGUF")
    assert find_projector(resolve(str(files.model))) == files.projector


@pytest.mark.parametrize(
    ("names", "best"),
    [
        (["a-Q4_K_M.gguf"], None),
        (["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-F16.gguf"),
        (["mmproj-a-f32.gguf", "mmproj-b-f16.gguf"], "mmproj-a-f32.gguf"),
        (["a-mmproj-Q8_0.gguf", "mmproj.txt"], "a-mmproj-Q8_0.gguf"),
    ],
)
def test_the_best_projector_has_a_fitting_name_and_type(names: list[str], best: str | None) -> None:
    assert best_projector(names, "sub/a-Q4_K_M.gguf") == best


def test_a_projector_is_downloaded_with_its_model() -> None:
    files = [HubFile(name) for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a-f16.gguf")]
    assert [file.name for file in _choose_model("u/r", files, None)] == ["a-Q4_K_M.gguf", "mmproj-a-f16.gguf"]


def test_ollama_stores_projectors_as_layers(
    files: VisionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    (store / "blobs").mkdir(parents=True)
    layers = []
    for number, (kind, file) in enumerate((("model", files.model), ("projector", files.projector))):
        digest = f"{number:064x}"
        shutil.copy(file, store / "blobs" / f"sha256-{digest}")
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "seer" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))
    found = find_projector(resolve("ollama:seer"))
    assert found is not None
    assert found.name == f"sha256-{1:064x}"
