"""`edgespec prepare`: what it prints, how it ends, and what is left when it is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.tiny_models import write_llama
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "prepared"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf", layers=3)


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


def test_layerskip_as_a_table(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("edgespec.cli.prepare.note", said.append)
    result = run("prepare", "layerskip", str(model), "--exit", "1")
    assert result.exit_code == 0
    assert "SAME TOKEN" in result.stdout
    assert "exit after layer 1 of 3" in result.stdout
    assert said == ["This model was not trained for early exit, so it would not be faster here."]


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
    assert f"{halves} is already prepared; use the GGUF file" in result.stderr


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


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such limits")
def test_a_file_that_may_not_grow_is_said_in_words(tmp_path: Path) -> None:
    import resource

    model = write_llama(tmp_path / "model.gguf", layers=3)
    at_most_bytes = model.stat().st_size // 4
    result = subprocess.run(
        [sys.executable, "-m", "edgespec", "prepare", "layerskip", str(model), "--exit", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (at_most_bytes, at_most_bytes)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "cannot be written: only part of the file was written; check " in result.stderr
