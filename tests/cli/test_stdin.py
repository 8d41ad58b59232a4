"""`edgespec generate` with text on stdin: pipes, files, devices, and pipes that stay silent."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from edgespec.cli import generate
from edgespec.errors import OptionError
from tests.cases import first
from tests.cli.conftest import Run, Start, json_of, one_line_error

_SHORT_WAIT = """
from edgespec.cli import generate
from edgespec.cli.program import program
generate._NOTICE_SECONDS, generate._WAIT_SECONDS = 0.1, 0.3
program()
"""


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the prompts that `generate` would answer, instead of answering them."""
    found: list[str] = []

    def refuse(_stop: object, prompt: tuple[str, object], *_: object) -> None:
        found.append(prompt[0])
        raise OptionError("the test ends here")

    monkeypatch.setattr(generate, "_answer", refuse)
    return found


@pytest.mark.parametrize(
    ("args", "text", "prompt"),
    [
        (["Summarise this"], "a long text\n", "a long text\n\nSummarise this"),
        (["Summarise this", "-"], "a long text\r\n", "a long text\n\nSummarise this"),
        (["-", "Summarise this"], "a long text", "a long text\n\nSummarise this"),
        (["Summarise this"], "", "Summarise this"),
        (["Summarise this"], " \n\n", "Summarise this"),
        ([""], "only the pipe\n", "only the pipe"),
        (["-"], "only the pipe\n", "only the pipe"),
        ([], "two\nlines\n", "two\nlines"),
    ],
)
def test_the_text_on_stdin_comes_before_the_prompt(
    run: Run, prompts: list[str], args: list[str], text: str, prompt: str
) -> None:
    run("generate", *args, input=text)
    assert prompts == [prompt]


@pytest.mark.long
def test_the_reply_is_that_of_the_joined_prompt(run: Run) -> None:
    options = ("generate", "--json", "--seed", "7", "-n", "8")
    piped = json_of(run(*options, "What does it do?", input="tar\n"))
    assert piped["tokens"] == json_of(run(*options, "tar\n\nWhat does it do?"))["tokens"]


def test_bytes_that_are_not_text(run: Run) -> None:
    one_line_error(run("generate", "hi", input=b"ab\xff"), 2, "byte 3", code="invalid_encoding")


def test_endless_text_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_MAX_BYTES", 10_000)
    one_line_error(run("generate", "hi", input="y\n" * 10_000), 2, "9.8 KiB", code="input_too_large")


@pytest.mark.long
@pytest.mark.parametrize("option", ["--json", "--raw"])
def test_a_text_that_cannot_fit_is_refused_by_its_size(run: Run, option: str) -> None:
    began = time.process_time()
    result = run("generate", option, input="some text\n" * 3_000_000)
    one_line_error(result, 1, "28.6 MiB", "1,024", code="context_length_exceeded")
    assert time.process_time() - began < 10


@pytest.mark.long
def test_a_file(start: Start, run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("tar")
    options = ("generate", "What does it do?", "-n", "1", "--json")
    with (tmp_path / "file").open("rb") as file:
        output, _ = start(*options, stdin=file).communicate(timeout=120)
    tokens = json.loads(output)["stats"]["prompt_tokens"]
    assert tokens > json_of(run(*options, input=""))["stats"]["prompt_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("kind", first(["pipe", "socket"]))
def test_an_open_pipe_that_nobody_writes_to_is_ignored(start: Start, kind: str) -> None:
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        import socket

        ends = socket.socketpair()
        reader, writer = (end.detach() for end in ends)
    process = start("generate", "hi", "-n", "2", code=_SHORT_WAIT, stdin=reader)
    output, errors = process.communicate(timeout=120)
    os.close(reader)
    os.close(writer)
    assert process.returncode == 0
    assert output.strip()
    assert b"waiting up to 0 seconds for input on stdin" in errors
    assert b"to wait for the pipe, add - after the prompt" in errors


@pytest.mark.long
def test_a_slow_pipe_is_waited_for(start: Start) -> None:
    code = _SHORT_WAIT.replace("0.1, 0.3", "0.1, 60.0")
    process = start("generate", "hi", "-n", "2", code=code, stdin=subprocess.PIPE)
    assert process.stderr
    assert b"waiting up to 60 seconds" in process.stderr.readline()
    assert process.poll() is None
    process.communicate(b"there", timeout=120)
    assert process.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("device", first(["/dev/zero", "/dev/null"]))
def test_devices_are_not_read(start: Start, device: str) -> None:
    with Path(device).open("rb") as file:
        process = start("generate", "hi", "-n", "2", stdin=file)
        assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 0
