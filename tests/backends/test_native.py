"""llama.cpp's log, and the libraries next to llama-cpp-python: which ones are loaded or cannot be."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import platformdirs
import pytest

from edgespec.backends.llamacpp import native
from edgespec.backends.llamacpp.native import GpuLibrary, library, library_path, load_gpu_library


@pytest.fixture
def copy_in(tmp_path: Path) -> ModuleType:
    """Return a module in another folder that acts as the installed llama_cpp, without GPUs."""
    real = library()
    module = ModuleType("llama_cpp")
    module.__file__ = str(tmp_path / "__init__.py")
    module.__version__ = real.__version__  # type: ignore[attr-defined]
    module.llama_supports_gpu_offload = lambda: False  # type: ignore[attr-defined]
    (tmp_path / "lib").mkdir()
    return module


def test_without_a_library_nothing_is_loaded(copy_in: ModuleType) -> None:
    assert load_gpu_library(copy_in) == GpuLibrary()


def test_a_library_that_cannot_be_loaded_is_a_problem(copy_in: ModuleType) -> None:
    library_path(copy_in, "vulkan").write_bytes(b"not a library")
    found = load_gpu_library(copy_in)
    assert found.name == "vulkan"
    assert str(library_path(copy_in, "vulkan")) in found.problem


def test_a_library_of_another_version_is_ignored(copy_in: ModuleType) -> None:
    library_path(copy_in, "vulkan").write_bytes(b"not a library")
    copy_in.__version__ = "0.0.1"  # type: ignore[attr-defined]
    assert load_gpu_library(copy_in) == GpuLibrary()


def test_a_build_with_gpu_support_needs_no_library(copy_in: ModuleType) -> None:
    library_path(copy_in, "vulkan").write_bytes(b"not a library")
    copy_in.llama_supports_gpu_offload = lambda: True  # type: ignore[attr-defined]
    assert load_gpu_library(copy_in) == GpuLibrary()


def test_a_library_without_a_backend_is_a_problem(copy_in: ModuleType) -> None:
    base = next((Path(str(library().__file__)).parent / "lib").glob("libggml-base.*"))
    shutil.copy(base, library_path(copy_in, "cuda"))
    found = load_gpu_library(copy_in)
    assert found.name == "cuda"
    assert found.problem


_LOAD_RPC = """
import os, sys
from edgespec.backends.llamacpp.native import ggml, library
ggml().ggml_backend_load(os.fsencode(sys.argv[1]))
print(library().llama_supports_rpc())
"""


def test_llama_cpp_knows_the_libraries_that_are_loaded() -> None:
    """ggml must be loaded only once, because a second copy would have its own list of devices."""
    path = library_path(library(), "rpc")
    if not path.is_file():
        pytest.skip("the RPC library is not built; run scripts/setup dev")
    command = [sys.executable, "-c", _LOAD_RPC, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


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
