"""Fixtures: a tiny Llama model, shared by the tests in a file, and its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.backends import mlx
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.mlx.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Iterator[LanguageModel]:
    model = mlx.load(
        str(write_checkpoint(folder / "llama", "llama")), "llama", LoadOptions(context_tokens=512)
    )
    yield model
    model.close()
