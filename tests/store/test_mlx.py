"""MLX models: folders, repositories without GGUF files, and incomplete models."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from huggingface_hub import constants, try_to_load_from_cache

from edgespec.errors import (
    BackendMissingError,
    CancelledError,
    DownloadError,
    EdgespecError,
    ModelFileError,
    ModelNotFoundError,
)
from edgespec.model.formats import mlx_files
from edgespec.model.formats.mlx_files import missing_files
from edgespec.store import download
from edgespec.store.catalogue import models_folder
from edgespec.store.download import fetch
from edgespec.store.drafts import choose_draft
from edgespec.store.installed import model_info
from edgespec.store.reference import resolve
from edgespec.store.remote_header import fetch_metadata
from tests.model.heads.residual_files import write_arrays
from tests.raising import raises
from tests.store.stand_in_hub import COMMIT, REPOSITORY, StandInHub

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NEEDED = {"config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", INDEX, FIRST, SECOND}


@pytest.fixture(autouse=True)
def mlx_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_files, "mlx_installed", lambda: True)


@pytest.fixture
def mlx_hub(hub: StandInHub) -> StandInHub:
    """Return the stand-in hub with an MLX model in two parts and other files of a repository."""
    index = {"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}
    hub.files = {
        "README.md": b"# tiny",
        "config.json": b"{}",
        "tokenizer.json": b"{}" + b" " * 5000,
        "merges.txt": b"",
        "chat_template.jinja": b"{{ messages }}",
        "modeling_tiny.py": b"raise SystemExit",
        "pytorch_model.bin": b"p" * 1000,
        "consolidated.safetensors": b"c" * 900_000,
        "original/model.safetensors": b"o" * 900_000,
        INDEX: json.dumps(index).encode(),
        FIRST: bytes(range(256)) * 2000,
        SECOND: b"b" * 300_000,
    }
    return hub


def folder_of(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


class TestFolders:
    """Tests of paths that are folders."""

    def test_a_complete_folder_is_a_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = folder_of(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
        found = resolve(str(folder))
        assert (found.path, found.format, found.source, found.name) == (folder, "mlx", "path", "model")
        assert found.entry is None
        monkeypatch.chdir(folder)
        assert resolve(".").name == "model"
        assert resolve("./").format == "mlx"

    @pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_the_missing_file_is_named(self, tmp_path: Path, missing: str) -> None:
        names = {"config.json", "tokenizer.json", "model.safetensors"} - {missing}
        with raises(ModelFileError, missing, code="model_file_incomplete") as caught:
            resolve(str(folder_of(tmp_path, *names)))
        assert "\n" not in str(caught.value)

    def test_a_missing_weight_file_is_named(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "config.json", "tokenizer.json", FIRST)
        with raises(ModelFileError, SECOND, code="model_file_incomplete"):
            resolve(str(folder))

    def test_a_weight_file_of_the_index_is_missed(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
        (folder / INDEX).write_text('{"weight_map": {"a": "model-b.safetensors", "b": "model.safetensors"}}')
        assert missing_files(folder) == ["model-b.safetensors"]

    @pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "\udcff"])
    def test_a_broken_index_is_one_line(self, tmp_path: Path, text: str) -> None:
        folder = folder_of(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
        (folder / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
        with raises(ModelFileError, INDEX):
            resolve(str(folder))

    def test_many_missing_weight_files_are_counted(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "config.json", "tokenizer.json", "model-00001-of-00030.safetensors")
        with raises(ModelFileError, "model-00002-of-00030.safetensors", code="model_file_incomplete"):
            resolve(str(folder))

    def test_an_adapter_is_not_a_model(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "adapter_config.json", "adapters.safetensors")
        with raises(
            ModelFileError, "config.json, tokenizer.json, model.safetensors", code="model_file_incomplete"
        ):
            resolve(str(folder))

    def test_a_gguf_file_in_the_folder_is_named(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "config.json", "a.gguf")
        with raises(ModelFileError, "a.gguf", code="wrong_file"):
            resolve(str(folder))

    def test_a_file_of_a_model_is_not_the_model(self) -> None:
        with raises(ModelFileError, "its folder", code="wrong_file"):
            resolve(str(models_folder() / "demo-mlx" / "model.safetensors"))

    def test_a_gguf_file_beside_a_config_is_still_gguf(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path, "config.json", "tokenizer.json", "model.safetensors", "a.gguf")
        assert resolve(str(folder / "a.gguf")).format == "gguf"


class TestEmbedded:
    """Tests of the embedded MLX models."""

    def test_the_embedded_model_resolves_by_name_and_path(self) -> None:
        target = resolve("demo-mlx", allow_download=False)
        draft = choose_draft(target).draft
        assert draft is not None
        assert [model.path.name for model in (target, draft)] == ["demo-mlx", "demo-mlx-draft"]
        assert (target.format, target.source, draft.format) == ("mlx", "embedded", "mlx")
        assert resolve(str(target.path)).entry == target.entry

    def test_another_quantisation(self) -> None:
        with raises(ModelNotFoundError, "demo-mlx", "8-bit", "Q4_0", code="quantisation_unavailable"):
            resolve("demo-mlx:Q4_0")
        with raises(
            ModelNotFoundError,
            "8b-mlx",
            "4-bit",
            "Q8_0",
            "llama-3.1-8b:Q8_0",
            code="quantisation_unavailable",
        ):
            resolve("llama-3.1-8b-mlx:Q8_0")


class TestDownload:
    """Tests of repositories with an MLX model and no GGUF files."""

    def test_an_mlx_model_is_stored_in_the_shared_cache(self, mlx_hub: StandInHub, cache: Path) -> None:
        seen: list[float] = []

        def progress(what: str, fraction: float) -> bool:
            assert what.endswith(" KiB)")
            seen.append(fraction)
            return True

        found = resolve(f"hf:{REPOSITORY}", progress=progress)
        assert (found.format, found.source) == ("mlx", "hub")
        assert {path.name for path in found.path.iterdir()} == NEEDED
        assert found.path.name == COMMIT
        assert (found.path / FIRST).read_bytes() == mlx_hub.files[FIRST]
        assert try_to_load_from_cache(REPOSITORY, SECOND, cache_dir=cache) == str(found.path / SECOND)
        assert seen == sorted(seen)
        assert seen[-1] == 1.0

    @pytest.mark.parametrize("name", ["mtp.safetensors", "mtp/weights.safetensors", "optiq/mtp.safetensors"])
    def test_separate_mtp_layers_are_downloaded_too(self, mlx_hub: StandInHub, name: str) -> None:
        mlx_hub.files[name] = b"m" * 100
        found = resolve(f"hf:{REPOSITORY}")
        assert (found.path / name).read_bytes() == mlx_hub.files[name]
        assert (found.path / SECOND).exists()

    @pytest.mark.parametrize("name", ["mtp.safetensors", "mtp/weights.safetensors", "optiq/mtp.safetensors"])
    def test_a_plan_and_a_later_download_show_separate_mtp_layers(
        self, mlx_hub: StandInHub, tmp_path: Path, name: str
    ) -> None:
        model = models_folder() / "demo-mlx-draft"
        layers = write_arrays(tmp_path / "layers.safetensors", {"mtp.norm.weight": np.ones(4, np.float32)})
        mlx_hub.files = {file.name: file.read_bytes() for file in model.iterdir()}
        folder = fetch(REPOSITORY, None)
        assert not model_info(folder, "mlx").heads
        mlx_hub.files[name] = layers.read_bytes()
        headers = fetch_metadata(REPOSITORY, None, folder=tmp_path / "headers", content=download.MODEL)
        assert model_info(headers, "mlx").heads
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(layers, folder / name)
        assert model_info(folder, "mlx").heads

    def test_a_cached_model_needs_no_network(
        self, mlx_hub: StandInHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = fetch(REPOSITORY, None)
        mlx_hub.stop()
        asked = len(mlx_hub.requests)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert fetch(REPOSITORY, None) == first
        assert resolve(REPOSITORY, allow_download=False).path == first
        assert len(mlx_hub.requests) == asked

    def test_a_gguf_model_is_preferred(self, mlx_hub: StandInHub) -> None:
        mlx_hub.files["tiny-Q4_K_M.gguf"] = b"GGUF" + b"q" * 1000
        found = resolve(REPOSITORY)
        assert (found.format, found.path.name) == ("gguf", "tiny-Q4_K_M.gguf")
        assert not any(FIRST in request for request in mlx_hub.requests)

    def test_a_lost_connection_is_resumed(self, mlx_hub: StandInHub) -> None:
        small = sum(len(mlx_hub.files[name]) < 10_000 for name in NEEDED)
        mlx_hub.cut_after_bytes = [*[10_000] * small, 300_000, 100_000]
        assert (fetch(REPOSITORY, None) / FIRST).read_bytes() == mlx_hub.files[FIRST]
        assert len(mlx_hub.ranges) == 2
        assert "bytes=0-" not in mlx_hub.ranges

    def test_a_partial_download_is_not_a_model_and_is_resumed(self, mlx_hub: StandInHub, cache: Path) -> None:
        with raises(CancelledError, "cancelled at"):
            fetch(REPOSITORY, None, progress=lambda what, fraction: SECOND not in what or fraction < 0.8)
        with raises(ModelNotFoundError, code="model_not_downloaded"):
            resolve(REPOSITORY, allow_download=False)
        kept = next(cache.rglob("*.edgespec")).stat().st_size
        assert kept > 0
        mlx_hub.requests.clear()
        mlx_hub.ranges.clear()
        assert not missing_files(fetch(REPOSITORY, None))
        assert mlx_hub.ranges == [f"bytes={kept}-"]
        assert f"GET /{REPOSITORY}/resolve/{COMMIT}/{FIRST}" not in mlx_hub.requests

    def test_a_cache_without_links_is_resumed(
        self, mlx_hub: StandInHub, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, "not supported")

        monkeypatch.setattr(Path, "symlink_to", refuse)
        with pytest.raises(CancelledError):
            fetch(REPOSITORY, None, progress=lambda what, _: SECOND not in what)
        mlx_hub.requests.clear()
        assert not missing_files(fetch(REPOSITORY, None))
        assert f"GET /{REPOSITORY}/resolve/{COMMIT}/{FIRST}" not in mlx_hub.requests
        assert not list(cache.glob("models--*/blobs/*"))

    def test_a_cached_model_without_a_file_is_downloaded_again(self, mlx_hub: StandInHub) -> None:
        folder = fetch(REPOSITORY, None)
        (folder / SECOND).resolve().unlink()
        with raises(ModelNotFoundError, code="model_not_downloaded"):
            fetch(REPOSITORY, None, allow_download=False)
        assert fetch(REPOSITORY, None) == folder
        assert (folder / SECOND).exists()

    def test_a_file_missing_on_the_hub_fails_before_the_download(self, mlx_hub: StandInHub) -> None:
        del mlx_hub.files[SECOND]
        with raises(ModelNotFoundError, SECOND, code="repository_unusable"):
            fetch(REPOSITORY, None)
        assert not any("resolve" in request for request in mlx_hub.requests)

    def test_a_missing_file_of_the_index(self, mlx_hub: StandInHub) -> None:
        mlx_hub.files[INDEX] = b'{"weight_map": {"a": "model-more.safetensors"}}'
        with raises(DownloadError, "model-more.safetensors", code="repository_unusable"):
            fetch(REPOSITORY, None)
        with raises(ModelNotFoundError, code="model_not_downloaded"):
            fetch(REPOSITORY, None, allow_download=False)

    def test_a_deleted_file(self, mlx_hub: StandInHub) -> None:
        mlx_hub.gone = {SECOND}
        with raises(DownloadError, "someone/tiny-GGUF"):
            fetch(REPOSITORY, None)

    @pytest.mark.parametrize("name", [FIRST, "config.json"])
    def test_damaged_files_are_rejected(self, mlx_hub: StandInHub, cache: Path, name: str) -> None:
        # Small files are verified by git hash, large ones by SHA-256.
        mlx_hub.files = {key: data for key, data in mlx_hub.files.items() if data}
        ready = fetch(REPOSITORY, None)
        blob = (ready / name).resolve()
        blob.unlink()
        mlx_hub.damaged = True
        with raises(DownloadError, name, code="download_damaged"):
            fetch(REPOSITORY, None)
        assert not blob.exists()
        assert not list(cache.rglob("*.edgespec"))

    def test_an_mlx_repository_has_one_quantisation(self, mlx_hub: StandInHub) -> None:
        with raises(ModelNotFoundError, "Q4_K_M", code="quantisation_unavailable"):
            resolve(f"{REPOSITORY}:Q4_K_M")
        assert not any("resolve" in request for request in mlx_hub.requests)

    def test_without_mlx_nothing_is_downloaded(
        self, mlx_hub: StandInHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mlx_files, "mlx_installed", lambda: False)
        with raises(BackendMissingError, "scripts/setup mlx"):
            resolve(REPOSITORY)
        assert not any("resolve" in request for request in mlx_hub.requests)

    @pytest.mark.parametrize(
        ("spoil", "line"),
        [
            (lambda files: files.pop("config.json"), "config.json"),
            (lambda files: files.pop("tokenizer.json"), "lacks tokenizer.json"),
            (lambda files: files.clear(), "config.json, tokenizer.json, model.safetensors"),
        ],
    )
    def test_a_repository_without_a_model(
        self, mlx_hub: StandInHub, spoil: Callable[[dict[str, bytes]], object], line: str
    ) -> None:
        spoil(mlx_hub.files)
        with raises(ModelNotFoundError, line, code="repository_unusable") as caught:
            fetch(REPOSITORY, None)
        assert caught.value.next_step

    def test_only_missing_files_need_disk_space(
        self, mlx_hub: StandInHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Usage(NamedTuple):
            total: int
            used: int
            free: int

        with pytest.raises(CancelledError):
            fetch(REPOSITORY, None, progress=lambda what, _: SECOND not in what)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1000))
        with raises(DownloadError, code="disk_full"):
            fetch(REPOSITORY, None)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 100_000))
        assert not missing_files(fetch(REPOSITORY, None))

    def test_a_full_disk(self, mlx_hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(download, "_stream", full)
        with raises(DownloadError, "free some space", "disk is", code="file_not_written"):
            fetch(REPOSITORY, None)

    def test_offline_mode(self, mlx_hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with raises(DownloadError, code="offline"):
            fetch(REPOSITORY, None)

    @pytest.mark.parametrize("reference", ["8b-mlx", "hf:mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"])
    def test_a_catalogue_model_that_is_not_installed(self, reference: str) -> None:
        with raises(EdgespecError, "Meta-Llama-3.1-8B-Instruct-4bit", code="model_not_downloaded"):
            resolve(reference, allow_download=False)

    def test_auto_takes_an_mlx_draft(self, tmp_path: Path) -> None:
        whole = ("config.json", "tokenizer.json", "model.safetensors")
        for name in ("Llama-3.3-70B-Instruct", "Llama-3.2-1B-Instruct"):
            folder = tmp_path / f"cache/models--mlx-community--{name}-4bit/snapshots/abc"
            folder.mkdir(parents=True)
            for file in whole:
                (folder / file).write_text("{}")
        target = resolve("70b-mlx", allow_download=False)
        draft = choose_draft(target).draft
        assert draft is not None
        assert (target.format, draft.name, draft.format) == ("mlx", "llama-3.2-1b-mlx", "mlx")
