"""The command line starts quickly, and imports only modules that it needs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import NO_TRIALS, Start

_SHOW_MODULES = "import sys; print(*sorted(sys.modules), file=sys.stderr)"
_RUN = """
import sys
sys.argv = ["edgespec", *sys.argv[1:]]
from edgespec.cli import main
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
"""
# Each argument is the command line of one command.
_RUN_EACH = """
import sys
from edgespec.cli import main
for line in sys.argv[1:]:
    sys.argv = ["edgespec", *line.split()]
    try:
        main()
    except SystemExit as ending:
        assert not ending.code, ending.code
"""
HEAVY = {
    "llama_cpp",
    "mlx",
    "mlx_lm",
    "transformers",
    "textual",
    "numpy",
    "rich",
    "jinja2",
    "huggingface_hub",
}


def imported_after(start: Start, code: str, *args: str) -> set[str]:
    """The modules that are imported once `code` has run."""
    process = start(*args, code=code + _SHOW_MODULES)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return set(stderr.decode().split())


def modules_after(start: Start, code: str, *args: str) -> set[str]:
    """The top-level modules among them."""
    return {name.partition(".")[0] for name in imported_after(start, code, *args)}


def test_importing_edgespec_is_light(start: Start) -> None:
    assert not modules_after(start, "import edgespec\n") & HEAVY


def test_help_and_version_are_light(start: Start) -> None:
    lines = ["--help", "--version", "generate --help", "chat --help", "models list --help"]
    assert not modules_after(start, _RUN_EACH, *lines) & HEAVY


@pytest.mark.long
def test_generating_needs_no_screen(start: Start) -> None:
    loaded = modules_after(start, _RUN, "generate", "--threads", "1", "-n", "1", "hi")
    assert "llama_cpp" in loaded
    assert not loaded & {"textual", "rich", "mlx", "mlx_lm", "transformers"}


@pytest.mark.long
def test_an_adapter_is_refused_before_anything_is_loaded(start: Start, tmp_path: Path) -> None:
    code = _RUN.replace("assert not ending.code, ending.code", "assert ending.code == 1")
    loaded = modules_after(start, code, "generate", "--adapter", str(tmp_path), "hi")
    assert not loaded & {"llama_cpp", "mlx", "mlx_lm"}


@pytest.mark.long
def test_an_mlx_model_needs_no_llama_cpp(start: Start) -> None:
    loaded = modules_after(start, _RUN, "generate", "--target", "demo-mlx-draft", "-n", "1", "hi")
    assert "mlx" in loaded
    assert not loaded & {"textual", "rich", "llama_cpp"}


@pytest.mark.long
def test_a_process_that_ran_mlx_in_a_thread_ends_well(start: Start) -> None:
    """MLX aborts a process that exits while a thread that compiled something is ending."""
    code = (
        "import edgespec, threading\n"
        "def work():\n"
        "    for _ in range(2):\n"
        "        with edgespec.load('demo-mlx', context=256) as it: it.generate('hi', max_tokens=2)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "for thread in threading.enumerate()[1:]: thread.join()\n"
    )
    process = start(code=code)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (0, b"")


def test_help_imports_little_beside_click(start: Start) -> None:
    """Imports determine the startup time. They are counted, because durations depend on other programs.

    Each drafting method and each command adds imports, because its record is read.
    """
    of_click = imported_after(start, "import click\n")
    assert len(imported_after(start, _RUN, "--help") - of_click) < 140


@pytest.mark.long
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_reader_that_has_left_before_it_speaks(start: Start, option: str) -> None:
    process = start(option, code=_RUN.replace("import sys\n", "import sys, time; time.sleep(0.2)\n", 1))
    assert process.stdout
    process.stdout.close()
    assert process.wait(120) == 0
    assert process.stderr
    assert process.stderr.read() == b""


def test_ctrl_c_while_it_starts(start: Start) -> None:
    code = (
        "import sys, signal\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'edgespec.cli.help': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from edgespec.cli import main; main()\n"
    )
    process = start("models", code=code)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (130, b"interrupted\n")


@pytest.mark.skipif(os.name != "posix", reason="a shell closes stderr")
def test_a_closed_stderr_loses_only_its_text() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m edgespec chat demo --draft none --plain 2>&-"
    done = subprocess.run(
        ["sh", "-c", command],
        input="/think x\n/show\n",
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, **NO_TRIALS},
    )
    assert done.returncode == 0
    assert "demo" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="a shell closes stdout")
def test_a_closed_stdout_is_an_error() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m edgespec models list >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot write output because stdout is closed\n",
    )
