"""Names that could control the terminal or disguise themselves are shown without those characters."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from edgespec.store.catalogue import models_folder
from tests.cli.conftest import Run

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
