"""Searches of the model stores end soon, whatever links, special files and numbers of files they contain."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from edgespec.errors import ModelNotFoundError
from edgespec.store import stored_models
from edgespec.store.installed import find_installed
from edgespec.store.reference import resolve
from tests.store.fake_stores import REGISTRY, OllamaStore, add_to_hub, add_to_lmstudio
from tests.store.test_installed import DRAFT, MLX, references, why_skipped


def test_a_snapshot_that_links_to_the_root(cache: Path) -> None:
    one = add_to_hub(cache, "maker/One-GGUF", DRAFT) / DRAFT.name
    for folder in (cache / "models--maker--One-GGUF" / "snapshots", one.parent):
        (folder / "y").symlink_to("/")
    for name in ("models--a--b", "models--a--c"):
        (cache / name).mkdir()
    (cache / "models--a--b" / "snapshots").symlink_to("/")
    (cache / "models--a--d").symlink_to("/")
    began = time.monotonic()
    assert [model.path for model in find_installed().models] == [one]
    with pytest.raises(ModelNotFoundError):
        resolve("hf:a/b", allow_download=False)
    assert resolve("hf:maker/One-GGUF", allow_download=False).path == one
    assert time.monotonic() - began < 20


def test_links_out_of_a_cached_repository_are_ignored(cache: Path, tmp_path: Path) -> None:
    outside = add_to_lmstudio(tmp_path, "outside/elsewhere-Q8_0.gguf", DRAFT)
    snapshot = add_to_hub(cache, "maker/One-GGUF", DRAFT)
    (snapshot / outside.name).symlink_to(outside)
    (snapshot / "folder").symlink_to(outside.parent)
    assert [model.path for model in find_installed().models] == [snapshot / DRAFT.name]
    with pytest.raises(ModelNotFoundError):
        resolve(f"hf:maker/One-GGUF:{outside.name}", allow_download=False)


def test_a_cache_and_a_repository_on_another_disk(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    one = add_to_hub(disk, "maker/One-GGUF", DRAFT)
    add_to_hub(tmp_path / "disk2", "maker/Two-GGUF", DRAFT)
    (disk / "models--maker--Two-GGUF").symlink_to(tmp_path / "disk2" / "models--maker--Two-GGUF")
    cache.symlink_to(disk)
    assert references() == ["maker/One-GGUF:Q8_0", "maker/Two-GGUF:Q8_0"]
    found = resolve("hf:maker/One-GGUF", allow_download=False)
    assert found.path.samefile(one / DRAFT.name)


def test_an_ollama_manifest_folder_that_links_elsewhere(ollama: OllamaStore) -> None:
    ollama.add("tiny", "latest", DRAFT.read_bytes())
    (ollama.folder / "manifests" / "all").symlink_to("/usr")
    (ollama.folder / "manifests" / "again").symlink_to(ollama.folder / "manifests")
    os.mkfifo(ollama.folder / "manifests" / REGISTRY / "library" / "tiny" / "pipe")
    (ollama.folder / "manifests" / REGISTRY / "library" / "tiny" / "zero").symlink_to("/dev/zero")
    assert references() == ["tiny:latest"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pipe", "socket", "/dev/zero", "loop", "unreadable"])
@pytest.mark.parametrize("name", ["model-Q8_0.gguf", "config.json", "snapshots", "refs", "folder"])
def test_special_files_do_not_hang(cache: Path, kind: str, name: str) -> None:
    snapshot = add_to_hub(cache, "maker/One", DRAFT)
    place = {"snapshots": cache / "models--m" / "snapshots", "refs": cache / "models--m" / "refs" / "main"}
    path = place.get(name, snapshot / name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
            server.bind(path.name)
    elif kind == "unreadable":
        path.mkdir(mode=0)
    else:
        path.symlink_to(path.name if kind == "loop" else kind)
    assert references() == ["maker/One:Q8_0"]


def test_a_special_file_in_every_file_of_an_mlx_model(lmstudio: Path) -> None:
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
    for number, name in enumerate((*names, "README.md")):
        folder = add_to_lmstudio(lmstudio, f"maker/m{number}", MLX)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert len(find_installed().models) + len(why_skipped()) >= 4


def test_a_store_with_too_many_files_is_reported(
    lmstudio: Path, cache: Path, ollama: OllamaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_models, "_MAX_ENTRIES", 5)
    for number in range(9):
        (lmstudio / f"folder{number}").mkdir(parents=True)
        (cache / f"models--a--{number}").mkdir(parents=True)
        (ollama.folder / "manifests" / str(number)).mkdir(parents=True)
    skipped = why_skipped()
    assert skipped.keys() == {str(lmstudio), str(cache), str(ollama.folder / "manifests")}
    assert "limit: 5 in total" in skipped[str(cache)]


@pytest.mark.parametrize("limit", [1_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_folder_of_too_many_files(lmstudio: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(stored_models, "_MAX_ENTRIES", limit)
    one = add_to_lmstudio(lmstudio, "maker/One/one.gguf", DRAFT)
    (lmstudio / "notes").mkdir()
    for number in range(limit + 1):
        os.close(os.open(lmstudio / "notes" / f"{number}.txt", os.O_CREAT | os.O_WRONLY))
    began = time.monotonic()
    installed = find_installed()
    assert time.monotonic() - began < 60
    assert [model.path for model in installed.models] == [one]
    assert "too many files" in installed.unusable[0].reason


def test_an_unknown_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "~")
    assert find_installed().models == ()
