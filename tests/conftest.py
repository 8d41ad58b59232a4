"""What tests of several folders share: where the embedded models are, and a place of their own for logs."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import platformdirs
import pytest

from edgespec.backends.llamacpp.quantise import quantise
from edgespec.catalog.catalogue import models_folder


@pytest.fixture(scope="module", autouse=True)
def older_objects_aside() -> None:
    """Closing a model collects garbage: what was there before is not searched again each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def logs_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Native logs of tests do not end up among the user's."""
    folder = tmp_path_factory.mktemp("logs")
    platformdirs.user_log_path = lambda *_, **__: folder


@pytest.fixture(scope="session", autouse=True)
def learnt_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests learn or save does not end up among the user's."""
    os.environ["EDGESPEC_DATA_DIR"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session", autouse=True)
def set_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's settings and aliases are not those of tests."""
    os.environ["EDGESPEC_CONFIG_DIR"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module", autouse=True)
def prepared_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor what they prepare, which another file's `auto` would use as well."""
    os.environ["EDGESPEC_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The embedded target."""
    return models_folder() / "demo-target-q8_0.gguf"


@pytest.fixture(scope="session")
def demo_draft() -> Path:
    """The embedded draft."""
    return models_folder() / "demo-draft-q8_0.gguf"


@pytest.fixture(scope="session")
def low_bit_copy(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded target with fewer bits."""
    copy = tmp_path_factory.mktemp("low-bit") / "copy.gguf"
    quantise(demo_target, copy, "Q2_K")
    return copy
