"""Fixtures: tiny targets for EAGLE-1 and EAGLE-2 heads, shared by the tests in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.backends import mlx
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.eagle1.targets import CONTEXT, load, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle1")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def mlx_target(folder: Path) -> Iterator[LanguageModel]:
    model = mlx.load(str(folder / "mlx"), "mlx", LoadOptions(context_tokens=CONTEXT))
    yield model
    model.close()


@pytest.fixture
def target(folder: Path) -> Iterator[LanguageModel]:
    model = load(folder / "llama.gguf")
    yield model
    model.close()
