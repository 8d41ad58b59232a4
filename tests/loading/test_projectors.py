"""Projectors (mmproj files) that do not fit the model: planning, loading and the CLI give the same error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.errors import ModelFileError
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_vision import EncoderSizes, VisionModel, write_projector, write_vision_model

OPTIONS: dict[str, Any] = {"draft": "none", "method": "none", "gpu_layers": 0, "threads": 1, "context": 512}


def of_another_model(folder: Path) -> Path:
    write_projector(folder / "mmproj-other.gguf", "llava", EncoderSizes(output=48))
    return folder / "mmproj-other.gguf"


def of_an_unknown_type(folder: Path) -> Path:
    path = folder / "mmproj-unknown.gguf"
    write_projector(path, "llava")
    # The same length, so that the rest of the header stays valid.
    path.write_bytes(path.read_bytes().replace(b"mlp", b"zzz"))
    return path


def language_model(folder: Path) -> Path:
    return write_llama(folder / "text.gguf")


WRONG: dict[Callable[[Path], Path], str] = {
    of_another_model: "is the image projector of another model: its embeddings have 48 values, but",
    of_an_unknown_type: "is an image projector of type zzz, which the installed llama.cpp does not support",
    language_model: "is not an image projector",
}


@pytest.fixture
def files(tmp_path: Path) -> VisionModel:
    return write_vision_model(tmp_path / "model", "llava")


@pytest.mark.parametrize("write", WRONG)
def test_planning_and_loading_reject_a_wrong_projector(
    write: Callable[[Path], Path], files: VisionModel, tmp_path: Path
) -> None:
    path = write(tmp_path)
    with pytest.raises(ModelFileError) as planning:
        edgespec.plan(files.model, mmproj=path, **OPTIONS)
    with pytest.raises(ModelFileError) as loading:
        edgespec.load(files.model, mmproj=path, **OPTIONS)
    planned, loaded = planning.value, loading.value
    assert planned.what.startswith(f"{path} {WRONG[write]}")
    assert (planned.code, planned.option) == ("model_file_not_supported", "mmproj")
    assert (loaded.what, loaded.next_step) == (planned.what, planned.next_step)
    assert (loaded.code, loaded.option) == (planned.code, planned.option)


@pytest.mark.parametrize("command", [("plan",), ("generate", "the file"), ("chat", "--plain")])
def test_the_cli_reports_a_wrong_projector_once(
    command: tuple[str, ...], files: VisionModel, tmp_path: Path
) -> None:
    path = of_another_model(tmp_path)
    options = ["--target", str(files.model), "--draft", "none", "--mmproj", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", *command, *options],
        input="",
        env={**os.environ, "EDGESPEC_DATA_DIR": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert f"{path} {WRONG[of_another_model]}" in errors[0]
    assert "Traceback" not in done.stderr


def test_a_projector_with_an_old_header_is_accepted(files: VisionModel) -> None:
    """Old files contain CLIP's own output size, so the size of the last tensor counts."""
    key = b"clip.vision.projection_dim"
    data = files.projector.read_bytes()
    at = data.index(key) + len(key) + 4  # The value follows its type.
    files.projector.write_bytes(data[:at] + (768).to_bytes(4, "little") + data[at + 4 :])
    for choice in (files.projector, "auto"):
        plan = edgespec.plan(files.model, mmproj=choice, **OPTIONS).plan
        assert any(item.role == "projector" for item in plan.items)


@pytest.mark.parametrize("write", [of_another_model, of_an_unknown_type])
def test_json_errors_name_the_option(
    write: Callable[[Path], Path], files: VisionModel, tmp_path: Path
) -> None:
    options = ["--target", str(files.model), "--draft", "none", "--mmproj", str(write(tmp_path))]
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", "plan", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["option"]) == ("model_file_not_supported", "mmproj")
