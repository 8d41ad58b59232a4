"""MLX folders whose index, file names, headers or text files are not what mlx-lm expects."""

from __future__ import annotations

import codecs
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import ModelFileError
from edgespec.model.heads.tensor_files import read_tensors
from tests.raising import raises

pytest.importorskip("mlx_lm")
from safetensors.numpy import load_file, save_file

import edgespec
from edgespec.errors import EdgespecError
from edgespec.model.formats.mlx_files import WEIGHTS_INDEX, missing_files, readable_folder, weight_files
from edgespec.model.formats.mlx_metadata import read_mlx_info
from edgespec.options.load_options import LoadArguments
from edgespec.store.catalogue import models_folder
from edgespec.store.installed import find_installed
from edgespec.store.reference import resolve

DEMO = models_folder() / "demo-mlx-draft"
OLD = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def shard(folder: Path, *names: str) -> dict[str, str]:
    """Divide the weights into several files, and return the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {tensor: names[i * len(names) // len(tensors)] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if index[tensor] == name}, folder / name)
    return index


def stale_index(folder: Path) -> None:
    tensors = sorted(load_file(folder / "model.safetensors"))
    write_index(folder, {tensor: OLD[i % 2] for i, tensor in enumerate(tensors)})


def index_of_the_original(folder: Path) -> None:
    """The index is from the original model, which was not quantised and had its layers in other files."""
    tensors = [name for name in sorted(load_file(folder / "model.safetensors")) if name.endswith(".weight")]
    write_index(folder, {f"language_model.{tensor}": OLD[i % 2] for i, tensor in enumerate(tensors)})


def copies_of_a_browser(folder: Path) -> None:
    write_index(folder, shard(folder, *OLD))
    (folder / OLD[0]).rename(folder / "model-00001-of-00002 (1).safetensors")


def renamed_part(folder: Path) -> None:
    write_index(folder, shard(folder, *OLD))
    (folder / OLD[1]).rename(folder / "second.safetensors")


def renamed_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def linked_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(folder.parent / "blob")
    stale_index(folder)


def marked(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            path = folder / name
            assert path.is_file()
            path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())

    return change


def marked_index(folder: Path) -> None:
    stale_index(folder)
    marked(WEIGHTS_INDEX)(folder)


TEXTS = [file.name for file in sorted(DEMO.iterdir()) if file.suffix in (".json", ".jinja", ".txt")]
CHANGES: dict[str, Callable[[Path], Any]] = {
    "stale index": stale_index,
    "index of the original": index_of_the_original,
    "copies of a browser": copies_of_a_browser,
    "renamed part": renamed_part,
    "renamed weights": renamed_weights,
    "linked weights": linked_weights,
    "marked index": marked_index,
    "all texts marked": marked(*TEXTS),
}


@pytest.fixture(scope="module")
def reply() -> tuple[int, ...]:
    return tokens_of(DEMO)


def tokens_of(folder: Path) -> tuple[int, ...]:
    options: LoadArguments = {
        "context": 256,
        "method": "none",
        "measure_costs": False,
        "exactness": "off",
        "prefix_cache": "none",
    }
    with edgespec.load(str(folder), None, **options) as runtime:
        return tuple(runtime.reply([{"role": "user", "content": "Hi"}], max_tokens=6, seed=1).tokens)


@pytest.mark.parametrize("name", CHANGES)
def test_complete_models_are_loaded(name: str, reply: tuple[int, ...], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    CHANGES[name](folder)
    assert missing_files(folder) == []
    assert resolve(str(folder)).format == "mlx"
    assert read_mlx_info(folder).parameters == read_mlx_info(DEMO).parameters
    assert tokens_of(folder) == reply


def test_ordinary_folders_are_used_as_they_are() -> None:
    with readable_folder(DEMO) as readable:
        assert readable == DEMO
    assert weight_files(DEMO) == [DEMO / "model.safetensors"]


def missing_part(folder: Path) -> str:
    write_index(folder, shard(folder, *OLD))
    (folder / OLD[1]).unlink()
    return OLD[1]


def missing_part_without_index(folder: Path) -> str:
    shard(folder, *OLD)
    (folder / OLD[1]).unlink()
    return OLD[1]


def missing_layers(folder: Path) -> str:
    stale_index(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: one for name, one in tensors.items() if ".layers.0." not in name}, folder / "model.safetensors"
    )
    return OLD[0]


def weights_of_an_adapter(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    save_file(
        {"lora_a": load_file(DEMO / "model.safetensors")["model.norm.weight"]},
        folder / "adapters.safetensors",
    )
    return "model.safetensors"


def damaged_weights(folder: Path) -> str:
    stale_index(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    return OLD[0]


@pytest.mark.parametrize(
    "change",
    [missing_part, missing_part_without_index, missing_layers, weights_of_an_adapter, damaged_weights],
)
def test_incomplete_models_lack_a_file(change: Callable[[Path], str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    missing = change(folder)
    assert missing in missing_files(folder)
    with raises(EdgespecError, missing, code="model_file_incomplete"):
        resolve(str(folder))


def test_stores_list_a_model_with_a_stale_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".lmstudio" / "models" / "maker" / "Small-MLX"
    shutil.copytree(DEMO, folder)
    stale_index(folder)
    assert "maker/Small-MLX" in [model.reference for model in find_installed().models]


def test_a_damaged_file_is_not_used_as_weights(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    renamed_weights(folder)
    (folder / "other.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelFileError):
        weight_files(folder)


@pytest.mark.parametrize("size", [float("inf"), float("nan"), "x", None, [1], {}])
def test_a_dimension_that_is_no_integer_is_rejected(size: object, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F16", "shape": [size], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with raises(ModelFileError, "damaged"):
        read_tensors(path)
