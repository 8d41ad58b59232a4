"""`edgespec generate --file`."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from tests.cli.conftest import Run, json_of, one_line_error


def test_files_come_before_the_prompt(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("print(1)\n")
    Path("b.py").write_text("print(2)\n")
    options = ("generate", "--json", "--seed", "3", "-n", "8")
    with_files = json_of(run(*options, "--file", "a.py", "--file", "b*", "Explain."))
    as_text = json_of(run(*options, edgespec.attach("Explain.", "a.py", "b.py")))
    assert with_files["tokens"] == as_text["tokens"]
    assert with_files["stats"]["prompt_tokens"] == as_text["stats"]["prompt_tokens"] > 20


def test_a_file_that_cannot_be_attached_is_named(run: Run, tmp_path: Path) -> None:
    result = run("generate", "--file", str(tmp_path / "missing.txt"), "Explain.")
    one_line_error(result, 1, "missing.txt", code="attachment_not_found")


def test_files_that_do_not_fit_are_refused_with_both_sizes(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_text("word " * 100_000)
    result = run("generate", "--file", str(path), "Explain.")
    one_line_error(result, 1, "488 KiB", code="context_length_exceeded")
