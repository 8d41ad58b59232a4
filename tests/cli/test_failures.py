"""What is said about errors nobody foresaw."""

from __future__ import annotations

import errno
import json
import pickle

import pytest

import edgespec
from edgespec.cli.failures import describe, exit_status
from edgespec.errors import BackendError, CancelledError, OptionError
from tests.cli.conftest import Run


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
