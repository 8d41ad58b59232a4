"""The llama.cpp log is private, even after rotation, and never disturbs replies."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import platformdirs
import pytest

from edgespec.backends.llamacpp import native


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Log to a new folder, and remove the handlers that a test adds."""
    monkeypatch.setattr(platformdirs, "user_log_path", lambda *_, **__: tmp_path / "log")
    before = list(native._LOG.handlers)
    native._LOG.handlers = []
    (tmp_path / "log").mkdir(mode=0o755)
    yield tmp_path / "log" / "llamacpp.log"
    for handler in native._LOG.handlers:
        handler.close()
    native._LOG.handlers = before


def modes(log: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in log.parent.iterdir()}


def test_new_old_and_rotated_logs_are_private(log: Path) -> None:
    old = log.with_name("llamacpp.log.1")
    for file in (log, old):
        file.touch(mode=0o644)
        file.chmod(0o644)
    native._open_log()
    assert modes(log) == {0o600}
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
    for _ in range(3):
        native._LOG.info("x" * 600_000)
    assert old.stat().st_size > 500_000
    assert modes(log) == {0o600}


def test_a_full_disk_prints_nothing(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    native._open_log()
    (handler,) = native._LOG.handlers
    assert isinstance(handler, logging.FileHandler)
    assert handler.stream
    handler.stream.close()
    handler.stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    native._LOG.info("lost")
    with suppress(OSError):  # Closing writes the buffer again.
        handler.stream.close()
    native._LOG.handlers = []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["llamacpp.log", "llamacpp.log.1"])
def test_a_pipe_in_place_of_the_log_does_not_hang(log: Path, name: str) -> None:
    os.mkfifo(log.with_name(name))
    native._open_log()
    assert isinstance(native._LOG.handlers[0], logging.NullHandler)


def test_debug_lines_are_captured_but_not_written(log: Path) -> None:
    native._open_log()
    with native.captured_log() as lines:
        for level, text in ((native._DEBUG, b"tensor 1"), (2, b"layers: 12"), (native._WARN, b"slow")):
            native._on_line(level, text, None)
    assert lines == ["tensor 1", "layers: 12", "slow"]
    assert [line.split(maxsplit=2)[2] for line in log.read_text("utf-8").splitlines()] == lines[1:]
