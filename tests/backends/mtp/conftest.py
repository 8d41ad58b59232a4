"""Fixtures: tiny targets with MTP layers, shared by the tests in a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.model.base import LanguageModel
from tests.backends.mtp.targets import Files
from tests.backends.tiny_mtp_models import SHAPES


@pytest.fixture(scope="module", params=SHAPES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("mtp"), request.param)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("glm"), "glm4moe")


@pytest.fixture
def target(glm: Files) -> Iterator[LanguageModel]:
    model = glm.load()
    yield model
    model.close()
