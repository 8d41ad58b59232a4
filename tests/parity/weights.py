"""Modify the weights of tiny models, to get similar draft models, and targets that can skip layers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

mx = pytest.importorskip("mlx.core")
tiny_checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")

__all__ = ["keep_to_letters", "quieten", "write_near", "write_renamed"]

Array = NDArray[np.float32]
# In both forms these ids are single bytes of text.
_BYTES = range(3, 180)
_LAYER = re.compile(r"(?:layers|blk)\.(\d+)\.")
# What a layer adds to what it was given.
_SAYS = re.compile(r"attn_output|ffn_down|o_proj|down_proj|post_(attention|ffw|feedforward).*norm")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _change(path: Path, change: Callable[[str, Array], Array]) -> None:
    """Replace every array of a GGUF file or an MLX folder with the result of `change`."""
    if path.is_file():
        for tensor in gguf.GGUFReader(path, "r+").tensors:
            tensor.data[...] = change(tensor.name, np.array(tensor.data))
        return
    file = str(path / "model.safetensors")
    weights = {name: mx.array(change(name, np.array(array))) for name, array in mx.load(file).items()}
    mx.save_safetensors(file, weights, {"format": "mlx"})


def _copy(path: Path, copy: Path) -> Path:
    return Path(shutil.copy(path, copy) if path.is_file() else shutil.copytree(path, copy))


def _names(path: Path) -> list[str]:
    if path.is_file():
        return [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    return list(mx.load(str(path / "model.safetensors")))


def _change_head(path: Path, change: Callable[[Array], Array]) -> None:
    """Apply a change to the rows of the output head only, which can be the embedding."""
    heads = [name for name in _names(path) if name in ("output.weight", "lm_head.weight")]
    if not heads:
        heads = [name for name in _names(path) if "embd" in name or "embed" in name]
    _change(path, lambda name, array: change(array) if name in heads and array.ndim == 2 else array)


def write_near(path: Path, copy: Path) -> Path:
    """A GGUF file or MLX folder whose head is a little off."""
    random = np.random.default_rng(1)
    _change_head(
        _copy(path, copy),
        lambda head: head * (1 + 0.3 * random.normal(size=head.shape).astype(np.float32)),
    )
    return copy


def keep_to_letters(path: Path) -> None:
    """Make a model write only letters, as long as it chooses the most likely token."""
    letters = [3 + ord(letter) for letter in _LETTERS]
    if path.is_dir():
        words = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        letters = [words[letter] for letter in _LETTERS]

    def change(head: Array) -> Array:
        changed = np.zeros_like(head)
        changed[letters] = head[letters]
        return changed

    _change_head(path, change)


def write_renamed(path: Path, copy: Path) -> Path:
    """Write the same model with the ids of its single bytes in reverse order."""
    _copy(path, copy)
    ids = dict(zip(_BYTES, reversed(_BYTES), strict=True))
    rename = _rename_gguf if copy.is_file() else _rename_mlx
    rows = rename(copy, ids)

    def change(name: str, array: Array) -> Array:
        if array.ndim < 2 or array.shape[0] != rows:
            return array
        changed = array.copy()
        changed[list(ids.values())] = array[list(ids)]
        return changed

    _change(copy, change)
    return copy


def _rename_gguf(path: Path, ids: dict[int, int]) -> int:
    """Rename byte tokens in place, because the names have equal lengths. Return the token count."""
    field: Any = gguf.GGUFReader(path, "r+").fields["tokenizer.ggml.tokens"]
    names = [bytes(field.parts[place]) for place in field.data]
    for old, new in ids.items():
        field.parts[field.data[new]][:] = np.frombuffer(names[old], np.uint8)
    return len(names)


def _rename_mlx(path: Path, ids: dict[int, int]) -> int:
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["vocab"] = {word: ids.get(token, token) for word, token in model["vocab"].items()}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    rows: int = tiny_checkpoints.ROWS
    return rows


def quieten(path: Path) -> None:
    """Make the layers between the first and the last contribute about a tenth of what they did."""
    names = _names(path)
    count = 1 + max(int(found[1]) for name in names if (found := _LAYER.search(name)))
    # In other models, a norm with this name comes before the layer's output is added.
    after = path.is_file() or any("post_feedforward" in name for name in names)

    def change(name: str, array: Array) -> Array:
        layer = _LAYER.search(name)
        if not layer or not 0 < int(layer[1]) < count - 1 or not _SAYS.search(name):
            return array
        if "norm" not in name:
            return array * 0.1
        # MLX adds 1 to these.
        return array if not after else array * 0.1 if path.is_file() else (array + 1) * 0.1 - 1

    _change(path, change)
