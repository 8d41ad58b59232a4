"""The benchmark of thread counts on a busy machine: its table, and the program that occupies a core."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgespec.system.cores import usable_cores
from scripts import bench_busy
from tests.backends.tiny_models import write_llama


@pytest.mark.long
def test_every_combination_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_llama(tmp_path / "tiny.gguf", context=1024)
    arguments = ["--target", str(target), "--draft", "none"]
    arguments += ["--loads", "idle,busy", "--repeats", "1", "--max-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["bench_busy.py", *arguments])
    bench_busy.main()
    _, *lines = capsys.readouterr().out.splitlines()
    threads = ["auto", *map(str, range(1, usable_cores() + 1))]
    cases = [line.split() for line in lines]
    assert [case[:3] for case in cases] == [
        [load, method, count] for load in ("idle", "busy") for method in ("none", "auto") for count in threads
    ]
    assert {case[-1] for case in cases} == {"1/1"}


def test_the_other_program_is_ended() -> None:
    with pytest.raises(KeyboardInterrupt), bench_busy.other_program("alternating"):
        raise KeyboardInterrupt
