"""The demo target split at several exit layers, shared by the tests of self-drafting."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.loading.prepare.layerskip import prepare_layerskip

EXITS = (1, 4, 9)


@pytest.fixture(scope="session")
def folders(
    demo_target: Path, demo_in_halves: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """The demo target split at each exit layer."""
    folder = tmp_path_factory.mktemp("split")
    return {4: demo_in_halves} | {
        exit_layer: prepare_layerskip(demo_target, exit_layer, to=folder / str(exit_layer)).folder
        for exit_layer in EXITS
        if exit_layer != 4
    }
