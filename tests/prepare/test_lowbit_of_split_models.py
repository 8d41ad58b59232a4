"""A model that was prepared for early exit gets a copy with fewer bits too, with its own file and without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.base import LoadOptions, LowBit
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.errors import CancelledError, CapabilityError, ModelFileError, OptionError
from edgespec.prepare import builder
from edgespec.prepare.gguf_parts import GgufModel, merged_file
from edgespec.prepare.layerskip import prepare_layerskip
from edgespec.prepare.lowbit import check_lowbit, find_lowbit, lowbit_file, prepare_lowbit
from edgespec.prepare.store import PreparedModel, check_prepared, store_folder
from tests.backends.contract import step, tokens_for
from tests.backends.tiny_models import write_gemma3, write_llama


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf", layers=3)


@pytest.fixture
def halves(source: Path) -> PreparedModel:
    return prepare_layerskip(source, 1)


@pytest.fixture
def demo(tmp_path: Path, demo_target: Path) -> Path:
    """The halves of the demo target, which is not there any more."""
    source = Path(shutil.copy(demo_target, tmp_path / "demo.gguf"))
    folder = prepare_layerskip(source, 4).folder
    source.unlink()
    return folder


def contents(path: Path) -> tuple[dict[str, object], dict[str, tuple[object, bytes]]]:
    """What a GGUF file says, and its tensors' types and bytes."""
    model = GgufModel([path])
    said = {key: field.contents() for key, field in model._fields.items() if not key.startswith("GGUF.")}
    return said, {
        tensor.name: (tensor.source.tensor_type, np.asarray(tensor.source.data).tobytes())
        for tensor in model.tensors
    }


@pytest.mark.parametrize(
    ("write", "exit_layer"),
    [(partial(write_llama, layers=5), 2), (partial(write_llama, layers=4), 2), (write_gemma3, 6)],
)
def test_halves_together_are_the_file_they_were(
    tmp_path: Path, write: Callable[[Path], Path], exit_layer: int
) -> None:
    source = write(tmp_path / "model.gguf")
    halves = prepare_layerskip(source, exit_layer)
    path = tmp_path / "whole.gguf"
    with merged_file(halves.folder, path):
        assert contents(path) == contents(source)
    with merged_file(halves.folder, path, header_only=True):
        assert contents(path)[0] == contents(source)[0]
        assert path.stat().st_size >= source.stat().st_size
    assert not path.exists()


def test_the_copy_is_the_one_of_the_file(source: Path, halves: PreparedModel) -> None:
    expected = prepare_lowbit(source, "Q2_K")
    bytes_of_it = contents(lowbit_file(expected))
    shutil.rmtree(expected.folder)
    source.unlink()
    made = prepare_lowbit(halves.folder, "Q2_K")
    assert contents(lowbit_file(made)) == bytes_of_it
    assert (made.facts, made.settings) == (expected.facts, expected.settings)
    assert made.source == halves.folder
    assert [path.name for path in made.folder.iterdir() if path.suffix == ".gguf"] == ["copy.gguf"]
    assert find_lowbit(halves.folder) == find_lowbit(halves.folder, "q2_k") == made
    check_prepared(made, halves.folder, full=True)
    assert prepare_lowbit(halves.folder, "Q2_K") == made
    model = load_layerskip(str(halves.folder), "halves", LoadOptions(context_tokens=256))
    model.prefill(tokens_for(model, 20))
    view = model.self_draft(LowBit(str(lowbit_file(made))))
    assert np.isfinite(step(view, 3)).all()
    view.close()
    model.close()


def test_it_is_made_from_the_file_while_that_is_there(source: Path, halves: PreparedModel) -> None:
    made = prepare_lowbit(halves.folder)
    assert made.source == source
    assert prepare_lowbit(source) == made
    source.unlink()
    assert find_lowbit(halves.folder) == prepare_lowbit(halves.folder) == made
    check_lowbit(made, halves.folder)
    # As it was, and no longer is.
    os.truncate(lowbit_file(made), 1000)
    with pytest.raises(ModelFileError, match="is damaged"):
        check_lowbit(made, halves.folder)
    again = prepare_lowbit(halves.folder)
    assert again.source == halves.folder
    assert find_lowbit(halves.folder) == again


def test_a_copy_of_what_the_file_became_is_another_model_s(source: Path, halves: PreparedModel) -> None:
    data = source.read_bytes()
    source.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    prepare_lowbit(source)
    assert find_lowbit(halves.folder) is None
    made = prepare_lowbit(halves.folder)
    assert made.source == halves.folder
    assert find_lowbit(halves.folder) == made


def test_other_halves_in_the_same_folder(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "halves"
    prepare_layerskip(source, 1, to=folder)
    source.unlink()
    made = prepare_lowbit(folder)
    shutil.rmtree(folder)
    prepare_layerskip(write_llama(source, layers=4), 1, to=folder)
    source.unlink()
    with pytest.raises(ModelFileError, match="has changed since"):
        check_lowbit(made, folder)
    check_lowbit(prepare_lowbit(folder), folder)


def test_damaged_halves(source: Path, halves: PreparedModel) -> None:
    source.unlink()
    os.truncate(halves.path("upper.gguf"), 1000)
    with pytest.raises(ModelFileError, match=r"upper\.gguf is damaged"):
        prepare_lowbit(halves.folder)


def test_types_that_will_not_do(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_build", None)
    with pytest.raises(OptionError, match=r"a Q8_0 copy would take 12,278,824 bytes"):
        prepare_lowbit(demo, "Q8_0")
    with pytest.raises(CapabilityError, match="needs an importance matrix"):
        prepare_lowbit(demo, "IQ2_XXS")


def test_a_disk_that_is_too_small_for_both(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the halves put together, and for the copy."""
    free = shutil.disk_usage(demo)._replace(free=15 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(
        ModelFileError, match=r"needs \d\d\.\d MiB of free space and has 15\.0 MiB; free disk"
    ):
        prepare_lowbit(demo)


@pytest.mark.parametrize("at", ["writing whole", "making a Q4_0"])
def test_cancelled_and_made_again(source: Path, halves: PreparedModel, at: str) -> None:
    source.unlink()
    there: list[list[str]] = []

    def stop(what: str, fraction: float) -> bool:
        if not what.startswith(at) or fraction < 0.5:
            return True
        there.append([path.name for path in store_folder().rglob("whole.gguf")])
        return False

    with pytest.raises(CancelledError, match=f"{at}.* was cancelled"):
        prepare_lowbit(halves.folder, progress=stop)
    assert there == [["whole.gguf"]]
    assert list((store_folder() / "lowbit").rglob("*.gguf")) == []
    assert find_lowbit(halves.folder) is None
    check_lowbit(prepare_lowbit(halves.folder), halves.folder)
