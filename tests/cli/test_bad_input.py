"""Whatever is wrong, or oddly named: one printable line with the next step, status 1 or 2, no traceback.

The last tests are about errors that nobody foresaw, and about errors as JSON.
"""

from __future__ import annotations

import errno
import json
import pickle
import re
import shutil
import struct
from pathlib import Path

import pytest

import edgespec
from edgespec.cli.failures import describe, exit_status
from edgespec.errors import BackendError, CancelledError, OptionError
from edgespec.store.catalogue import models_folder
from tests.cli.conftest import ROOT, Run, one_line_error

TARGET = ROOT / "models" / "demo-target-q8_0.gguf"
DRAFT = ROOT / "models" / "demo-draft-q8_0.gguf"


@pytest.mark.parametrize(
    "words",
    [
        "--temperature -1", "--temperature nan", "--temperature warm", "--top-k -4", "--top-p 7",
        "--repetition-penalty 0", "--logit-bias 5=nan", "--logit-bias five", "--memory lots",
        "--method modl", "--draft-length 99", "--draft-branches 3,x", "--draft-branches 3,,2",
        "--draft-confidence 2", "--kv-type q9", "--acceptance maybe", "--seed -1", "--max-tokens 0",
        "--context 0", "--context 10", "--context 999999999", "--stop ",
    ],
)  # fmt: skip
def test_wrong_usage(run: Run, words: str) -> None:
    option, value = words.split(" ")
    line = one_line_error(run("generate", "hello", option, value), 2, code="option_invalid")
    assert option.strip("-") in line.replace("_", "-")
    assert value.rpartition("=")[2] in line


def test_usage_that_is_wrong_in_other_ways(run: Run) -> None:
    result = run("generate", "hello", "--method", "model", "--draft", "none")
    one_line_error(result, 2, "'model'", code="draft_missing")
    one_line_error(run("generate", "hello", "--light"), 2, "--light", code="option_unknown")


@pytest.mark.parametrize("prompt", ["", "  ", "\n\n"])
def test_an_empty_prompt(run: Run, prompt: str) -> None:
    assert one_line_error(run("generate", prompt), 2).startswith("the prompt is empty")
    assert one_line_error(run("generate", "-", input=prompt), 2).startswith("the prompt is empty")


@pytest.mark.long
def test_a_context_larger_than_memory(run: Run) -> None:
    result = run("generate", "--memory", "1GiB", "--context", "9999999", "hello")
    one_line_error(result, 1, "9,999,999", "--context", code="model_does_not_fit")


def test_a_prompt_longer_than_the_context(run: Run) -> None:
    result = run("generate", "-", input="word " * 5000)
    one_line_error(result, 1, "1,024", "shorten it", "trained for", code="context_length_exceeded")


def test_less_memory_than_the_weights(run: Run) -> None:
    one_line_error(run("generate", "--memory", "5MB", "hello"), 1, "--memory", code="model_does_not_fit")


def test_a_name_there_is_not(run: Run) -> None:
    one_line_error(run("generate", "--target", "dmeo", "hello"), 1, "demo", code="model_not_found")


@pytest.mark.parametrize(
    ("data", "quoted", "code"),
    [
        (b"hi", "not valid JSON", "option_invalid"),
        (b'["hi"]', "line 1", "option_invalid"),
        (b'{"prompt": 3}', "line 1", "option_invalid"),
        (b'{"prompt": ""}', "last message", "option_invalid"),
        (b'{"messages": [3]}', "line 1", "option_invalid"),
        (b"\xff\xfe", "not UTF-8", "file_not_read"),
    ],
)
def test_files_that_are_no_prompts(run: Run, tmp_path: Path, data: bytes, quoted: str, code: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(data)
    result = run("bench", "--target", "demo", "--prompts", str(file))
    one_line_error(result, 2, file, quoted, code=code)


@pytest.mark.long
def test_files_that_are_no_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is not a model")
    (tmp_path / "archive.gguf").write_bytes(b"PK\3\4 and more")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "short.gguf").write_bytes(TARGET.read_bytes()[:5_000_000])
    (tmp_path / "header.gguf").write_bytes(TARGET.read_bytes()[:2_000])
    for name, quoted, code in [
        ("text.gguf", "'this is not a mo'", "wrong_file"),
        ("archive.gguf", "50 4B 03 04", "wrong_file"),
        ("empty.gguf", "empty", "wrong_file"),
        ("short.gguf", "5,000,000 bytes", "model_file_damaged"),
        ("header.gguf", "2,000 bytes", "model_file_damaged"),
        ("missing.gguf", "missing.gguf", "model_not_found"),
        ("", "a folder", "wrong_file"),
    ]:
        for option in ("--target", "--draft"):
            result = run("generate", option, f"{tmp_path}/{name}", "hello")
            one_line_error(result, 1, quoted, code=code)


@pytest.mark.long
def test_a_draft_with_another_vocabulary(run: Run, tmp_path: Path) -> None:
    with edgespec.load("demo-draft", "none", threads=1) as runtime:
        pieces = (runtime.vocabulary.raw_piece(token) for token in range(4000, runtime.vocabulary.size))
        piece = next(piece for piece in pieces if piece.isalpha() and len(piece) > 5)
    written = struct.pack("<Q", len(piece)) + piece
    data = DRAFT.read_bytes()
    assert written in data
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace(written, struct.pack("<Q", len(piece)) + b"q" * len(piece), 1))
    result = run("generate", "--draft", str(other), "hello", "-n", "8", "--draft-branches", "2")
    assert result.exit_code == 0, result.output
    with edgespec.load("demo", str(other), threads=1) as runtime:
        assert "tokens, under different IDs, and can draft only those" in runtime.target.notice
        plain = runtime.generate("hello", method="none", max_tokens=8, temperature=0.0)
        assert runtime.generate("hello", method="model", max_tokens=8, temperature=0.0).tokens == plain.tokens


def test_verify_rejects_prompts_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\nnot json\n')
    one_line_error(run("verify", "--prompts", str(file)), 2, "line 2", code="option_invalid")
    one_line_error(run("verify", "--prompts", str(tmp_path / "none.jsonl")), 2, code="file_not_read")


STEERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ODD = "a 'b\n\"c 🙂\x1b]0;owned\x07\u202egnp.gguf"


@pytest.mark.parametrize(
    "words", [("plan",), ("plan", "--memory", "1MiB"), ("models", "show"), ("generate", "hi")]
)
def test_a_file_may_be_called_anything(words: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    path = tmp_path / ODD
    shutil.copyfile(models_folder() / "demo-draft-q8_0.gguf", path)
    options = [str(path)] if words[0] == "models" else ["--target", str(path), "--draft", "none"]
    if words[0] == "generate":
        path.write_bytes(b"GGUF")  # the error names it
    done = run(*words, *options)
    assert done.exit_code == (1 if words[0] == "generate" else 0), "a plan that does not fit is an answer"
    said = done.stdout + done.stderr
    assert "🙂]0;ownedgnp.gguf" in said
    assert not STEERS.search(said)
    assert "'b\n" not in said, "a name is one line"


def failing(error: Exception) -> object:
    def load(*args: object, **options: object) -> None:
        raise error

    return load


def test_an_unforeseen_error_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edgespec, "load", failing(KeyError("two\nlines")))
    result = run("generate", "hi")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: KeyError: ")
    assert "traceback that EDGESPEC_DEBUG=1 shows" in result.stderr


def test_the_traceback_can_be_had(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_DEBUG", "1")
    monkeypatch.setattr(edgespec, "load", failing(KeyError("x")))
    lines = run("generate", "hi").stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: KeyError: 'x'")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (BackendError("it failed", "do this"), 1, "error: it failed; do this"),
        (OptionError("x is 1", "give 2"), 2, "error: x is 1; give 2"),
        (CancelledError("it was stopped"), 130, "interrupted: it was stopped"),
        (
            MemoryError(), 1,
            "error: out of memory; close other programs, or use a smaller model or a smaller --context",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"), 1,
            "error: the disk is full; check disk space and permissions",
        ),
    ],
)  # fmt: skip
def test_known_errors(error: Exception, status: int, line: str) -> None:
    assert (exit_status(error), describe(error)) == (status, line)


@pytest.mark.parametrize(
    ("words", "status", "code", "option"),
    [
        (("generate", "hi", "--json", "--kv-type", "q9"), 2, "option_invalid", "kv_type"),
        (("generate", "hi", "--target", "nonesuch", "--json"), 1, "model_not_found", "target"),
        (("models", "list", "--json", "--jsno"), 2, "option_unknown", "--jsno"),
        (("generate", "--json", "hi", "--context", "no"), 2, "option_invalid", ""),
    ],
)
def test_json_has_the_code_of_an_error(
    run: Run, words: tuple[str, ...], status: int, code: str, option: str
) -> None:
    result = run(*words)
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["code"], error["option"]) == (status, code, option)
    assert error["message"] in result.stderr
    assert error["next_step"] in result.stderr
    assert run("generate", "--target", "nonesuch", "--", "--json").stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("x"), "internal_error"),
        (KeyboardInterrupt(), "cancelled"),
        (OSError(errno.ENOSPC, "No space left on device"), "failed"),
    ],
)
def test_json_has_a_code_for_other_errors(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    monkeypatch.setattr(edgespec, "load", failing(error))
    assert json.loads(run("generate", "hi", "--json").stdout)["error"]["code"] == code


def test_the_code_of_an_error_is_kept() -> None:
    error = BackendError("it failed", "do this", code="process_forked")
    assert repr(error) == "BackendError('it failed; do this', code='process_forked')"
    assert pickle.loads(pickle.dumps(error)).code == "process_forked"
    assert BackendError("it failed").code == BackendError.code
