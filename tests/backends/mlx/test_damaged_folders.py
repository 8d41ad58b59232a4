"""Damaged folders of MLX models give errors of one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from edgespec.backends.mlx.weight_loading import load_model
from edgespec.errors import ModelFileError
from edgespec.model.base import LoadOptions
from tests.backends.mlx.tiny_checkpoints import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "broken", "llama")


def _a_file(folder: Path) -> Path:
    return folder / "config.json"


def _no_folder(folder: Path) -> Path:
    return folder / "nowhere"


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def _weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(change(weights.read_bytes()))

    return rewrite


def _renamed(name: str) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        (folder / "model.safetensors.index.json").unlink()
        (folder / "model.safetensors").rename(folder / name)

    return rename


def _without_a_tensor(folder: Path) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    kept = {name: array for name, array in weights.items() if name != "model.norm.weight"}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)


_HEADER = json.dumps({"a": {"dtype": "F16", "shape": [1], "data_offsets": "x"}}).encode()


TROUBLES: dict[str, tuple[Callable[[Path], Path | None], str]] = {
    "file": (_a_file, "config.json cannot be read: Not a directory; check the path"),
    "missing": (_no_folder, "nowhere cannot be read: No such file or directory; check the path"),
    "no config": (_remove("config.json"), "has no config.json; download"),
    "config cut": (_write("config.json", b'{"model_type": '), "config.json is not valid JSON"),
    "config nested": (_write("config.json", b"[" * 100_000), "config.json is not valid JSON"),
    "config bytes": (_write("config.json", b"\xff\xfe\x00"), "config.json is not valid JSON"),
    "config list": (_write("config.json", b"[]"), "config.json does not contain a JSON object"),
    "config folder": (_write("generation_config.json", b"{"), "generation_config.json is not valid JSON"),
    "no model_type": (_config(model_type=None), "has no model_type"),
    "code": (_config(model_file="evil.py"), "requires its own Python file 'evil.py'"),
    "unknown": (
        _config(model_type="gpt99"),
        r"'gpt99', which mlx-lm 0\.\d+\.\d+ does not support; update mlx-lm",
    ),
    "no model": (_config(model_type="cache"), "'cache', which mlx-lm .* does not support"),
    "library": (_config(model_type="olmo"), "'olmo', which mlx-lm .* does not support"),
    "outside": (_config(model_type="..convert"), "'..convert', which mlx-lm .* does not support"),
    "no sizes": (_config(hidden_size=None), "could not be loaded: "),
    "other sizes": (_config(hidden_size=32), "could not be loaded: "),
    "fewer tensors": (_without_a_tensor, "could not be loaded: Missing 1 parameters: .*model.norm.weight"),
    "no weights": (_remove("model.safetensors"), "has no model.safetensors; download the model again"),
    "torch": (_renamed("pytorch_model.bin"), "has no model.safetensors; download the model again"),
    "nothing": (_renamed("weights"), "has no model.safetensors"),
    "index": (
        _write("model.safetensors.index.json", b"nonsense"),
        "is not a valid index of weight files",
    ),
    "cut": (
        _weights(lambda data: data[:-1]),
        r"truncated: it has [\d,]+ of [\d,]+ bytes; download it again",
    ),
    "cut header": (_weights(lambda data: data[:100]), "is truncated or not a safetensors file"),
    "empty": (_weights(lambda data: b""), r"is truncated or not a safetensors file \(0 bytes\)"),
    "noise": (_weights(lambda data: b"\x01" * 5000), "is truncated or not a safetensors file"),
    "header": (_weights(lambda data: data[:8] + b"x" + data[9:]), "the header of .* is damaged"),
    "offsets": (
        _weights(lambda data: len(_HEADER).to_bytes(8, "little") + _HEADER),
        "the header of .* is damaged",
    ),
    "no tensors": (_weights(lambda data: (2).to_bytes(8, "little") + b"{}"), "contains no tensors"),
    "pointer": (_weights(lambda data: b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "no tokenizer": (_remove("tokenizer.json"), "has no tokenizer.json"),
    "bad tokenizer": (_write("tokenizer.json", b"{"), "could not be loaded: "),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_folder_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ModelFileError, match=r"generation_config\.json is a pipe or a device"):
        load_model(str(folder), "tiny", LoadOptions(), None)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_damaged_folders_give_errors_of_one_line(trouble: str, folder: Path) -> None:
    breaking, message = TROUBLES[trouble]
    path = breaking(folder) or folder
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model(str(path), "tiny", LoadOptions(), None)
    assert "\n" not in str(caught.value)
    assert caught.value.next_step


def test_missing_shards_are_named(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-00002.safetensors", "c": "model-00003.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelFileError, match="has no model-00002.safetensors, model-00003.safetensors"):
        load_model(str(folder), "tiny", LoadOptions(), None)


def test_a_tokenizer_with_its_own_code_is_rejected(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    with pytest.raises(ModelFileError, match="could not be loaded"):
        load_model(str(folder), "tiny", LoadOptions(), None)
    assert not ran.exists()
