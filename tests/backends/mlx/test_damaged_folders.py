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
from tests.raising import raises


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


TROUBLES: dict[str, tuple[Callable[[Path], Path | None], str, str]] = {
    "file": (_a_file, "model_file_unreadable", "config.json"),
    "missing": (_no_folder, "model_file_unreadable", "nowhere"),
    "no config": (_remove("config.json"), "model_file_incomplete", "config.json"),
    "config cut": (_write("config.json", b'{"model_type": '), "", "valid JSON"),
    "config nested": (_write("config.json", b"[" * 100_000), "", "valid JSON"),
    "config bytes": (_write("config.json", b"\xff\xfe\x00"), "", "valid JSON"),
    "config list": (_write("config.json", b"[]"), "", "JSON object"),
    "config folder": (_write("generation_config.json", b"{"), "", "generation_config.json"),
    "no model_type": (_config(model_type=None), "wrong_file", "model_type"),
    "code": (_config(model_file="evil.py"), "model_file_not_supported", "'evil.py'"),
    "unknown": (
        _config(model_type="gpt99"),
        "model_file_not_supported",
        "'gpt99'",
    ),
    "no model": (_config(model_type="cache"), "model_file_not_supported", "'cache'"),
    "library": (_config(model_type="olmo"), "model_file_not_supported", "'olmo'"),
    "outside": (_config(model_type="..convert"), "model_file_not_supported", "'..convert'"),
    "no sizes": (_config(hidden_size=None), "", "be loaded"),
    "other sizes": (_config(hidden_size=32), "", "be loaded"),
    "fewer tensors": (_without_a_tensor, "", "model.norm.weight"),
    "no weights": (_remove("model.safetensors"), "model_file_incomplete", "model.safetensors"),
    "torch": (_renamed("pytorch_model.bin"), "model_file_incomplete", "model.safetensors"),
    "nothing": (_renamed("weights"), "model_file_incomplete", "model.safetensors"),
    "index": (
        _write("model.safetensors.index.json", b"nonsense"),
        "",
        "model.safetensors.index.json",
    ),
    "cut": (
        _weights(lambda data: data[:-1]),
        "",
        "truncated",
    ),
    "cut header": (_weights(lambda data: data[:100]), "", "truncated"),
    "empty": (_weights(lambda data: b""), "", "(0 bytes)"),
    "noise": (_weights(lambda data: b"\x01" * 5000), "", "truncated"),
    "header": (_weights(lambda data: data[:8] + b"x" + data[9:]), "", "the header"),
    "offsets": (
        _weights(lambda data: len(_HEADER).to_bytes(8, "little") + _HEADER),
        "",
        "the header",
    ),
    "no tensors": (_weights(lambda data: (2).to_bytes(8, "little") + b"{}"), "", "no tensors"),
    "pointer": (
        _weights(lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
        "model_file_incomplete",
        "Git LFS",
    ),
    "no tokenizer": (_remove("tokenizer.json"), "model_file_incomplete", "tokenizer.json"),
    "bad tokenizer": (_write("tokenizer.json", b"{"), "", "be loaded"),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_folder_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "generation_config.json")
    with raises(ModelFileError, "generation_config.json"):
        load_model(str(folder), "tiny", LoadOptions(), None)


@pytest.mark.long
@pytest.mark.parametrize("trouble", TROUBLES)
def test_damaged_folders_give_errors_of_one_line(trouble: str, folder: Path) -> None:
    breaking, code, quoted = TROUBLES[trouble]
    path = breaking(folder) or folder
    with raises(ModelFileError, quoted, code=code) as caught:
        load_model(str(path), "tiny", LoadOptions(), None)
    assert "\n" not in str(caught.value)
    assert caught.value.next_step


def test_missing_shards_are_named(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-00002.safetensors", "c": "model-00003.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with raises(
        ModelFileError, "model-00002.safetensors, model-00003.safetensors", code="model_file_incomplete"
    ):
        load_model(str(folder), "tiny", LoadOptions(), None)


def test_a_tokenizer_with_its_own_code_is_rejected(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    with raises(ModelFileError, "be loaded"):
        load_model(str(folder), "tiny", LoadOptions(), None)
    assert not ran.exists()
