"""`edgespec prepare`: its output, how it ends, and what remains if it is stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.loading.prepare import layerskip as preparing
from edgespec.methods.costs.curve import CostCurve
from edgespec.store.catalogue import models_folder
from tests.backends.published_heads import write_published
from tests.backends.tiny_models import write_llama
from tests.cli.conftest import Run, one_line_error


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "prepared"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf", layers=3)


@pytest.fixture
def usual_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the pass costs of an idle machine, because a busy one would change this small model's results."""
    curve = CostCurve((1, 2, 8, 13), (1e-3, 1.1e-3, 2e-3, 3e-3))
    monkeypatch.setattr(preparing, "measure_costs", lambda *_: curve)


@pytest.mark.long
def test_layerskip_as_json(run: Run, model: Path, tmp_path: Path) -> None:
    result = run(
        "prepare", "layerskip", str(model), "--exit", "1", "--to", str(tmp_path / "halves"), "--json"
    )
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["kind"] == "layerskip"
    assert told["settings"] == {"exit_layer": 1}
    assert told["layer_count"] == 3
    assert [found["exit_layer"] for found in told["exits"]] == [1]
    assert Path(told["folder"]).is_dir()
    assert told["file_bytes"] >= model.stat().st_size // 2


@pytest.mark.usefixtures("usual_costs")
def test_layerskip_as_a_table(run: Run, model: Path) -> None:
    result = run("prepare", "layerskip", str(model), "--exit", "1")
    assert result.exit_code == 0
    assert "SAME TOKEN" in result.stdout
    assert "exit after layer 1 of 3" in result.stdout
    warning = "warning: this model was not trained for early exit, so it would not be faster here (0."
    assert result.stderr.count(warning) == 1
    again = run("prepare", "layerskip", str(model), "--exit", "1", "--json")
    assert json.loads(again.stdout)["exits"]
    assert warning in again.stderr


def test_a_draft_model_is_converted(run: Run, tmp_path: Path) -> None:
    draft, to = models_folder() / "demo-mlx-draft", tmp_path / "draft.gguf"
    result = run("prepare", "draft", str(draft), "demo", "--to", str(to), "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told == {"kind": "draft", "file": str(to), "file_bytes": to.stat().st_size}
    failed = run("prepare", "draft", str(draft), "demo-mlx", "--to", str(to))
    one_line_error(failed, 2, code="wrong_file")


@pytest.mark.usefixtures("usual_costs")
def test_a_model_without_a_paying_exit_fails_with_one_line(run: Run, model: Path) -> None:
    result = run("prepare", "layerskip", str(model))
    assert result.exit_code == 1
    assert "was not trained for early exit" in result.stderr


@pytest.mark.parametrize("exit_layer", ["x", "0", "3", "1.5"])
def test_a_wrong_exit_is_wrong_usage(run: Run, model: Path, exit_layer: str) -> None:
    result = run("prepare", "layerskip", str(model), "--exit", exit_layer)
    assert result.exit_code == 2


def test_an_mlx_model_needs_no_preparing(run: Run) -> None:
    assert run("prepare", "layerskip", "demo-mlx", "--exit", "1").exit_code == 2


def test_what_was_prepared_for_early_exit_is_not_prepared_for_it_again(
    run: Run, model: Path, tmp_path: Path
) -> None:
    halves = tmp_path / "halves.gguf"
    assert run("prepare", "layerskip", str(model), "--exit", "1", "--to", str(halves)).exit_code == 0
    result = run("prepare", "layerskip", str(halves))
    assert result.exit_code == 2
    assert f"{halves} is already prepared; " in result.stderr


def test_what_was_prepared_for_early_exit_gets_a_copy(run: Run, model: Path, tmp_path: Path) -> None:
    halves = tmp_path / "halves"
    assert run("prepare", "layerskip", str(model), "--exit", "1", "--to", str(halves)).exit_code == 0
    model.unlink()
    # By its folder, and by the file that is gone.
    copies = [run("prepare", "lowbit", str(name), "--json") for name in (halves, model)]
    assert [result.exit_code for result in copies] == [0, 0]
    first, second = (json.loads(result.stdout) for result in copies)
    assert first == second
    assert first["source"] == str(halves)
    (Path(first["folder"]) / "copy.gguf").rename(tmp_path / "copy.gguf")
    result = run("prepare", "lowbit", str(first["folder"]))
    assert result.exit_code == 1
    assert f"use the model that they were made from: {halves}" in result.stderr


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="there are no such limits")
@pytest.mark.parametrize("command", ["layerskip", "lowbit"])
def test_a_file_that_may_not_grow_is_said_in_words(tmp_path: Path, command: str) -> None:
    import resource

    model = write_llama(tmp_path / "model.gguf", layers=3)
    at_most_bytes = model.stat().st_size // 6
    result = subprocess.run(
        [sys.executable, "-m", "edgespec", "prepare", command, str(model)]
        + (["--exit", "1"] if command == "layerskip" else []),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (at_most_bytes, at_most_bytes)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "cannot write to " in result.stderr
    assert ": the file size limit was reached; raise the limit with `ulimit -f" in result.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ("-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder))
    if sys.platform != "linux" or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("needs Linux and the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("free_kib", [0, 4, 40, 120, 208])
def test_a_disk_that_becomes_full_leaves_nothing_half_written(
    run: Run, model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, free_kib: int
) -> None:
    """Another program fills the disk after the check of the free space."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    (small_disk / "other").write_bytes(bytes((1024 - free_kib) << 10))
    to = small_disk / "halves"
    command = ("prepare", "layerskip", str(model), "--exit", "1", "--to", str(to))
    one_line_error(run(*command), 1, to, "disk is full", small_disk, code="file_not_written")
    assert not to.exists()
    assert list(small_disk.glob("*/*.tmp")) == []
    (small_disk / "other").unlink()
    assert run(*command).exit_code == 0
    assert run("generate", "--target", str(to), "--raw", "a", "--max-tokens", "2").exit_code == 0


def test_a_low_bit_copy_on_a_disk_that_becomes_full(
    run: Run, model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    (small_disk / "other").write_bytes(bytes((1024 - 20) << 10))
    to = small_disk / "copy"
    result = run("prepare", "lowbit", str(model), "--to", str(to))
    one_line_error(result, 1, to, "disk is full", code="file_not_written")
    assert [path.name for path in small_disk.glob("*/*")] == ["journal.json"]


@pytest.mark.long
def test_a_full_disk_of_the_store_is_not_confused_with_the_disk_of_the_result(
    run: Run, model: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(small_disk))
    (small_disk / "other").write_bytes(bytes(1 << 20))
    to = tmp_path / "halves"
    result = run("prepare", "layerskip", str(model), "--exit", "1", "--to", str(to))
    quoted = (to, small_disk / "prepared" / "layerskip", "disk is full", "EDGESPEC_CACHE_DIR")
    one_line_error(result, 1, *quoted, code="file_not_written")


@pytest.mark.parametrize("free_kib", [0, 4, 20])
def test_a_head_on_a_disk_that_becomes_full(
    run: Run, model: Path, small_disk: Path, tmp_path: Path, free_kib: int
) -> None:
    head = write_published(tmp_path / "head")
    (small_disk / "other").write_bytes(bytes((1024 - free_kib) << 10))
    to = small_disk / "head.gguf"
    command = ("prepare", "head", str(head), str(model), "--to", str(to))
    one_line_error(run(*command), 1, head, to, "disk is full", "--to", code="file_not_written")
    assert [path.name for path in small_disk.iterdir()] == ["other"]
    (small_disk / "other").unlink()
    assert run(*command).exit_code == 0
    assert [path.name for path in small_disk.iterdir()] == ["head.gguf"]


def test_a_head_that_is_converted_when_it_is_used_on_a_full_disk(
    run: Run, model: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(small_disk))
    head = write_published(tmp_path / "head")
    stale = small_disk / "heads" / ".edgespec-killed"
    stale.mkdir(parents=True)
    (stale / "head.gguf").write_bytes(bytes(100))
    os.utime(stale, (0, 0))
    (small_disk / "other").write_bytes(bytes((1024 - 12) << 10))
    options = ("--target", str(model), "--head", str(head), "--method", "eagle", "--max-tokens", "2")
    command = ("generate", *options, "--raw", "a")
    quoted = (head, small_disk, "disk is full", "EDGESPEC_CACHE_DIR")
    one_line_error(run(*command), 1, *quoted, code="file_not_written")
    assert list((small_disk / "heads").iterdir()) == []
    (small_disk / "other").unlink()
    assert run(*command).exit_code == 0


def test_a_head_of_the_catalogue_is_converted(run: Run, tmp_path: Path) -> None:
    to = tmp_path / "head.gguf"
    told = json.loads(run("prepare", "head", "demo-mlx-head", "demo", "--to", str(to), "--json").stdout)
    assert told == {"kind": "head", "file": str(to), "file_bytes": to.stat().st_size}
    failed = run("prepare", "head", "demo-mlx-haed", "demo", "--to", str(to))
    one_line_error(failed, 1, code="head_not_found")


@pytest.mark.parametrize("kind", ["head", "draft"])
def test_a_missing_folder(run: Run, model: Path, tmp_path: Path, kind: str) -> None:
    missing = tmp_path / "nope"
    result = run("prepare", kind, str(missing), str(model), "--to", str(tmp_path / "new.gguf"))
    one_line_error(result, 1, missing, code="model_not_found")
