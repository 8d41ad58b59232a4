"""Fixtures: each test has its own home, cache and fake hub, and none uses the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from edgespec.store import download
from tests.store.fake_stores import OllamaStore
from tests.store.stand_in_hub import StandInHub


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Set the endpoint of huggingface_hub, which reads HF_ENDPOINT only at import."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty home folder."""
    for name in ("HF_TOKEN", "OLLAMA_MODELS", "XDG_CONFIG_HOME", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(download, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(download, "_LOCK_SECONDS", 0.1)
    return home


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Set an empty Hugging Face cache."""
    return tmp_path / "cache"


@pytest.fixture
def ollama(own_home: Path) -> OllamaStore:
    return OllamaStore(own_home / ".ollama" / "models")


@pytest.fixture
def lmstudio(own_home: Path) -> Path:
    folder = own_home / ".lmstudio" / "models"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """Start a hub with one repository: a Q4_K_M file, a Q8_0 file in two parts, a projector and a readme."""
    hub = StandInHub(
        files={
            "README.md": b"# tiny",
            "tiny-Q4_K_M.gguf": b"GGUF" + bytes(range(256)) * 4000,
            "tiny-Q8_0/tiny-Q8_0-00001-of-00002.gguf": b"GGUF" + b"a" * 500_000,
            "tiny-Q8_0/tiny-Q8_0-00002-of-00002.gguf": b"GGUF" + b"b" * 300_000,
            "mmproj-tiny-f16.gguf": b"GGUF projector",
        }
    )
    hub.start()
    use_endpoint(monkeypatch, hub.url)
    yield hub
    hub.stop()
