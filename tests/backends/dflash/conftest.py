"""Fixtures: a tiny target for DFlash and DSpark heads, and matching heads. The tests in a file share them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.backends.llamacpp.model import LlamaCppModel
from tests.backends.dflash.targets import Files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("dflash"))


@pytest.fixture
def target(files: Files) -> Iterator[LlamaCppModel]:
    model = files.load()
    yield model
    model.close()
