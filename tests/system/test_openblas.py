"""OpenBLAS is loaded before MLX, if it is installed."""

from __future__ import annotations

import ctypes
import sys

import pytest

from edgespec.system import openblas
from edgespec.system.openblas import load_openblas, why_slow


@pytest.fixture(autouse=True)
def linux_without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(openblas, "_loaded", [])


def test_it_is_loaded_once_for_all_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: loaded.append((name, mode)))
    load_openblas()
    load_openblas()
    assert loaded == [("libopenblas.so.0", ctypes.RTLD_GLOBAL)]
    assert why_slow() == ""


@pytest.mark.parametrize("reason", ["missing", "mlx"])
def test_training_without_it_is_slow(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def missing(_name: str, mode: int) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    if reason == "mlx":
        # MLX has already chosen its library.
        monkeypatch.setitem(sys.modules, "mlx.core", sys)
        monkeypatch.setattr(ctypes, "CDLL", None)
    load_openblas()
    assert "OpenBLAS" in why_slow()


def test_other_systems_have_fast_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    load_openblas()
    assert why_slow() == ""
