"""Tests of the reported MLX versions and device."""

from __future__ import annotations

from importlib import metadata

import pytest

from edgespec.backends.mlx.build_info import build_info
from edgespec.errors import BackendMissingError
from tests.raising import raises


def test_build_info_does_not_import_mlx_lm() -> None:
    facts = build_info()
    assert facts.version.split(".")[0].isdigit()
    assert facts.lm_version.startswith("0.")
    assert facts.device.startswith("CPU" if not (facts.metal or facts.cuda) else "GPU")


def test_build_info_names_the_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with raises(BackendMissingError, "mlx-lm"):
        build_info()
