"""`scripts/bench_host.py`: its output, and that drafts do not change its replies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import bench_host

OPTIONS = ["--vocabularies", "20000", "--passes", "16", "--repeats", "1"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["llamacpp", "mlx"])
def test_each_time_is_measured(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    monkeypatch.setattr(sys, "argv", ["bench_host.py", *OPTIONS, "--backend", backend, "--json", str(path)])
    bench_host.main()
    ((times,),) = json.loads(path.read_text(encoding="utf-8"))
    assert list(times) == [f"20,000 {name}" for name in bench_host.SETTINGS]
    for case in times.values():
        assert min(case["pass"], case["cold pass"], case["drafted token"]) > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in times)
    assert "row, accepted" in printed


@pytest.mark.long
def test_two_checkouts_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    this = Path(bench_host.__file__).parent.parent
    monkeypatch.setattr(sys, "argv", ["bench_host.py", *OPTIONS, "--against", str(this)])
    bench_host.main()
    assert "this checkout / other checkout" in capsys.readouterr().out
