"""A home of its own for settings, where nothing is set yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, json_of


@pytest.fixture
def file(own_home: Path) -> Path:
    """Return the path of the settings file. The folder exists, but the file does not."""
    path = own_home / "config" / "config.toml"
    path.parent.mkdir()
    return path


@pytest.fixture(autouse=True)
def own_settings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EDGESPEC_")]:
        if name not in ("EDGESPEC_DATA_DIR", "EDGESPEC_CACHE_DIR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(file.parent))


def reply(run: Run, *options: str) -> dict[str, Any]:
    return json_of(run("generate", "--json", *options, "hi"))
