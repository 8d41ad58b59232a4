"""Model files that are truncated while they are mapped, which would kill the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import ModelFileError
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.methods.lowbit.drafter import lowbit_file
from edgespec.store.catalogue import models_folder
from edgespec.system.files import MappedFiles
from tests.backends.tiny_models import write_llama
from tests.raising import raises

SCRIPT = """
import os, sys
import edgespec

target, draft = sys.argv[1:]
options = {"method": "none", "threads": 1, "measure_costs": False, "prefix_cache": "none"}
with edgespec.load(target, draft, **options) as runtime:
    said = runtime.generate("the file", raw=True, max_tokens=2, seed=1).tokens
    for path in (target, draft):
        whole = open(path, "rb").read()
        os.truncate(path, 4096)
        try:
            runtime.generate("a list of the file", raw=True, max_tokens=2, seed=1)
        except edgespec.EdgespecError as error:
            print(error)
        with open(path, "r+b") as file:
            file.write(whole)
        print(runtime.generate("the file", raw=True, max_tokens=2, seed=1).tokens == said)
"""


COPY = """
import os, sys
import edgespec

options = {"method": "lowbit", "threads": 1, "measure_costs": False, "prefix_cache": "none", "context": 256}
with edgespec.load("demo", "none", **options) as runtime:
    runtime.generate("the file", raw=True, max_tokens=2, seed=1)
    os.truncate(sys.argv[1], 4096)
    try:
        runtime.generate("a list of the file", raw=True, max_tokens=2, seed=1)
    except edgespec.EdgespecError as error:
        print(error)
"""

HEAD = COPY.replace('"lowbit", ', '"eagle", "head": sys.argv[1], ')


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="a file that is mapped cannot be cut there")
def test_file_of_a_low_bit_copy_is_checked_too(
    demo_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    # No processor repacks this type, so all weights are read through the mapping.
    copy = lowbit_file(prepare_lowbit(demo_target, "Q5_0"))
    command = [sys.executable, "-c", COPY, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{copy} was truncated while it was in use" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="a file that is mapped cannot be cut there")
def test_file_of_a_head_is_checked_too(tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    shutil.copyfile(models_folder() / "demo-head-q8_0.gguf", head)
    command = [sys.executable, "-c", HEAD, str(head)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{head} was truncated while it was in use" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="a file that is mapped cannot be cut there")
def test_truncated_file_raises_at_the_next_reply(tmp_path: Path) -> None:
    paths = [write_llama(tmp_path / f"{name}.gguf", seed=seed) for seed, name in enumerate(("big", "small"))]
    command = [sys.executable, "-c", SCRIPT, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1::2] == ["True", "True"]
    for line, path in zip(lines[::2], paths, strict=True):
        assert f"{path} was truncated while it was in use" in line
        assert "load the model again" in line


def test_replaced_file_is_a_different_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(100))
    files = MappedFiles([path])
    files.check()
    path.write_bytes(bytes(101))
    files.check()
    (tmp_path / "new").write_bytes(bytes(3))
    os.replace(tmp_path / "new", path)
    files.check()
    path.unlink()
    files.check()


def test_truncated_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(100))
    files = MappedFiles([path, tmp_path / "none"])
    with path.open("r+b") as file:
        file.truncate(99)
    with raises(ModelFileError, "99 of", "100"):
        files.check()
