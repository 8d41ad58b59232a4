"""Fixtures: tiny MLX targets and EAGLE heads, shared by the tests in a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.backends.mlx.model import MlxModel
from tests.backends.mlx.eagle.targets import Files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("eagle"))


@pytest.fixture
def target(files: Files) -> Iterator[MlxModel]:
    model = files.load()
    yield model
    model.close()
