"""Low-bit copies of split models, with and without the original file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.errors import CancelledError, CapabilityError, ModelFileError, OptionError
from edgespec.loading.prepare.gguf_parts import GgufParts, merged_file
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.methods.lowbit.drafter import check_lowbit, find_lowbit, lowbit_file
from edgespec.model.base import LoadOptions, LowBit
from edgespec.store import prepared_builder
from edgespec.store.prepared_files import PreparedModel, check_prepared, store_folder
from tests.backends.contract import step, tokens_for
from tests.backends.tiny_models import write_gemma3, write_llama
from tests.cases import first
from tests.raising import raises


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf", layers=3)


@pytest.fixture
def split_model(source: Path) -> PreparedModel:
    return prepare_layerskip(source, 1)


@pytest.fixture
def demo(tmp_path: Path, demo_target: Path) -> Path:
    """Return a split model whose original file was deleted."""
    source = Path(shutil.copy(demo_target, tmp_path / "demo.gguf"))
    folder = prepare_layerskip(source, 4).folder
    source.unlink()
    return folder


def contents(path: Path) -> tuple[dict[str, object], dict[str, tuple[object, bytes]]]:
    """Return the metadata of a GGUF file with the types and bytes of its tensors."""
    model = GgufParts([path])
    said = {key: field.contents() for key, field in model._fields.items() if not key.startswith("GGUF.")}
    return said, {
        name: (tensor.tensor_type, np.asarray(tensor.data).tobytes())
        for name, tensor in model.tensors.items()
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "exit_layer"),
    [(partial(write_llama, layers=5), 2), (partial(write_llama, layers=4), 2), (write_gemma3, 6)],
)
def test_the_merged_file_equals_the_original(
    tmp_path: Path, write: Callable[[Path], Path], exit_layer: int
) -> None:
    source = write(tmp_path / "model.gguf")
    split_model = prepare_layerskip(source, exit_layer)
    path = tmp_path / "whole.gguf"
    with merged_file(split_model.folder, path):
        assert contents(path) == contents(source)
    with merged_file(split_model.folder, path, header_only=True):
        assert contents(path)[0] == contents(source)[0]
        assert path.stat().st_size >= source.stat().st_size
    assert not path.exists()


@pytest.mark.long
def test_the_copy_equals_that_of_the_original(source: Path, split_model: PreparedModel) -> None:
    expected = prepare_lowbit(source, "Q2_K")
    bytes_of_it = contents(lowbit_file(expected))
    shutil.rmtree(expected.folder)
    source.unlink()
    made = prepare_lowbit(split_model.folder, "Q2_K")
    assert contents(lowbit_file(made)) == bytes_of_it
    assert (made.facts, made.settings) == (expected.facts, expected.settings)
    assert made.source == split_model.folder
    assert [path.name for path in made.folder.iterdir() if path.suffix == ".gguf"] == ["copy.gguf"]
    assert find_lowbit(split_model.folder) == find_lowbit(split_model.folder, "Q2_K") == made
    check_prepared(made, split_model.folder, full=True)
    assert prepare_lowbit(split_model.folder, "Q2_K") == made
    model = load_layerskip(str(split_model.folder), "split_model", LoadOptions(context_tokens=256))
    model.prefill(tokens_for(model, 20))
    view = model.self_draft(LowBit(str(lowbit_file(made))))
    assert np.isfinite(step(view, 3)).all()
    view.close()
    model.close()


@pytest.mark.long
def test_the_original_is_used_if_it_exists(source: Path, split_model: PreparedModel) -> None:
    made = prepare_lowbit(split_model.folder)
    assert made.source == source
    assert prepare_lowbit(source) == made
    source.unlink()
    assert find_lowbit(split_model.folder) == prepare_lowbit(split_model.folder) == made
    check_lowbit(made, split_model.folder)
    # A damaged copy is made again.
    os.truncate(lowbit_file(made), 1000)
    with raises(ModelFileError, "is damaged", code="prepared_outdated"):
        check_lowbit(made, split_model.folder)
    again = prepare_lowbit(split_model.folder)
    assert again.source == split_model.folder
    assert find_lowbit(split_model.folder) == again


@pytest.mark.long
def test_a_copy_of_a_changed_original_is_not_used(source: Path, split_model: PreparedModel) -> None:
    data = source.read_bytes()
    source.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    prepare_lowbit(source)
    assert find_lowbit(split_model.folder) is None
    made = prepare_lowbit(split_model.folder)
    assert made.source == split_model.folder
    assert find_lowbit(split_model.folder) == made


@pytest.mark.long
def test_another_split_model_in_the_same_folder(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "split_model"
    prepare_layerskip(source, 1, to=folder)
    source.unlink()
    made = prepare_lowbit(folder)
    shutil.rmtree(folder)
    prepare_layerskip(write_llama(source, layers=4), 1, to=folder)
    source.unlink()
    with raises(ModelFileError, "since", code="prepared_outdated"):
        check_lowbit(made, folder)
    check_lowbit(prepare_lowbit(folder), folder)


@pytest.mark.long
def test_a_damaged_split_model_is_an_error(source: Path, split_model: PreparedModel) -> None:
    source.unlink()
    os.truncate(split_model.path("upper.gguf"), 1000)
    with raises(ModelFileError, "upper.gguf", code="prepared_outdated"):
        prepare_lowbit(split_model.folder)


# `test_lowbit.py` tests the same errors with a whole model in each run.
@pytest.mark.long
def test_unsuitable_types_are_errors(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_builder, "BuildFolder", None)
    with raises(OptionError, "Q8_0", "11.7 MiB"):
        prepare_lowbit(demo, "Q8_0")
    with raises(CapabilityError, "importance"):
        prepare_lowbit(demo, "IQ2_XXS")


@pytest.mark.long
def test_too_little_free_space(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is needed for the merged file and for the copy."""
    free = shutil.disk_usage(demo)._replace(free=15 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with raises(ModelFileError, "15.0 MiB", code="disk_full"):
        prepare_lowbit(demo)


@pytest.mark.parametrize("at", first(["making a Q4_0", "writing whole"]))
def test_made_again_after_cancellation(source: Path, split_model: PreparedModel, at: str) -> None:
    source.unlink()
    there: list[list[str]] = []

    def stop(what: str, fraction: float) -> bool:
        if not what.startswith(at) or fraction < 0.5:
            return True
        there.append([path.name for path in store_folder().rglob("whole.gguf")])
        return False

    with raises(CancelledError, at):
        prepare_lowbit(split_model.folder, progress=stop)
    assert there == [["whole.gguf"]]
    assert list((store_folder() / "lowbit").rglob("*.gguf")) == []
    assert find_lowbit(split_model.folder) is None
    check_lowbit(prepare_lowbit(split_model.folder), split_model.folder)
