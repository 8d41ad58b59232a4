"""Tests of `scripts/bench_tables.py`: which runs it keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import bench_tables
from scripts.bench_tables import Model

_RUN = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('{\"replies\": []}'); sys.exit(%d)"


@pytest.mark.parametrize("status", [0, 1, 130])
def test_only_complete_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    results = tmp_path / "model.json"
    monkeypatch.setattr(bench_tables, "MODELS", (Model("a model", "model.gguf"),))
    monkeypatch.setattr(Model, "results", results)
    monkeypatch.setattr(Model, "command", lambda self, server: ["-c", _RUN % status, "the results"])
    monkeypatch.setattr(sys, "argv", ["bench_tables.py", "--llama-server", "llama-server"])
    assert bench_tables.main() == status
    assert results.exists() == (status == 0)
