"""Run the command line in this process or in a separate one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from edgespec.cli.failures import error_json
from edgespec.cli.program import program

ROOT = Path(__file__).resolve().parent.parent.parent
# Settings that skip the trial and measurement of a model's passes, which take most of the loading time. Tests
# that compare replies must not use them.
NO_TRIALS = {"EDGESPEC_EXACTNESS": "off", "EDGESPEC_MEASURE_COSTS": "false"}

Run = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty home folder and an empty cache."""
    home = tmp_path / "home"
    home.mkdir()
    for name in (
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "XDG_STATE_HOME",
        "NO_COLOR",
        "EDGESPEC_CONFIG_DIR",
        "EDGESPEC_DEBUG",
        "OLLAMA_MODELS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """The program that started the tests may have disabled Ctrl-C, as a shell does for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run() -> Run:
    """Run a command in this process, with one compute thread, because tests share the cores."""

    def run(*args: str, **settings: Any) -> Result:
        threads = ["--threads", "1"] if args and args[0] in ("generate", "verify") else []
        return CliRunner().invoke(program, [*args[:1], *threads, *args[1:]], **settings)

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command in a separate process with pipes. The process does not outlive the test.

    If `trials` is set, models' passes are tried and measured, as by default outside of tests.
    """
    started = ExitStack()

    def start(*args: str, code: str = "", trials: bool = False, **settings: Any) -> subprocess.Popen[bytes]:
        python = ["-c", code] if code else ["-m", "edgespec"]
        own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""} | ({} if trials else NO_TRIALS)
        process = subprocess.Popen(
            [sys.executable, *python, *args],
            env=os.environ | own | settings.pop("env", {}),
            stdin=settings.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell that runs the tests in the background makes its programs ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
            **settings,
        )
        started.enter_context(process)
        started.callback(process.kill)
        return process

    yield start
    started.close()


def one_line_error(result: Result, status: int, *quoted: object, code: str = "") -> str:
    """Return the one-line error of a failed command, after checking the error contract.

    There must be no traceback, and JSON only with --json. `quoted` are values in the line, and `code` is the
    error
    code.
    """
    assert result.exit_code == status, result.output
    assert result.stdout == "" or json.loads(result.stdout).keys() == {"error"}
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("usage: edgespec"))
    assert "Traceback" not in result.stderr
    for value in quoted:
        assert str(value) in lines[0]
    if code:
        # The program exits while it handles the error.
        assert result.exception
        assert result.exception.__context__
        assert error_json(result.exception.__context__)["error"]["code"] == code, result.stderr
    return lines[0].removeprefix("error: ")


def json_of(result: Result) -> dict[str, Any]:
    """The one JSON object of a command."""
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value
