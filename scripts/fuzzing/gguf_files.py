"""Make small GGUF files with random changes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np

from edgespec.model.formats.gguf_header import StringArray, read_header
from edgespec.store.catalogue import models_folder
from scripts.fuzzing.mutations import NASTY_INTEGERS, damage, nasty_text, several

# The files are small because they keep only this many tokens and this layer of the embedded draft model.
_TOKENS, _LAYER = 600, "blk.0."
_ALIGNMENT = 32
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_FORMATS = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6}
_ARCHITECTURES = (
    "phimoe",
    "olmo2",
    "smallthinker",
    "paddleocr",
    "jamba",
    "mamba",
    "gemma3",
    "qwen2moe",
    "bert",
    "t5",
    "x",
)


@dataclass(slots=True)
class _File:
    """The parts of a GGUF file: values as (key, type, bytes), and tensors as (name, shape, type, offset)."""

    values: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, tuple[int, ...], int, int]]
    data: bytes
    version: int = 3
    extra_values: int = 0
    extra_tensors: int = 0

    def encoded(self) -> bytes:
        counts = (len(self.tensors) + self.extra_tensors, len(self.values) + self.extra_values)
        parts = [struct.pack("<4sIQQ", b"GGUF", self.version % 2**32, *(count % 2**64 for count in counts))]
        parts += [_text(key) + struct.pack("<I", kind) + data for key, kind, data in self.values]
        for name, shape, kind, offset in self.tensors:
            numbers = (*(size % 2**64 for size in shape),)
            parts.append(_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *numbers))
            parts.append(struct.pack("<IQ", kind % 2**32, offset % 2**64))
        header = b"".join(parts)
        return header + bytes(-len(header) % _ALIGNMENT) + self.data


def make_gguf(rng: Random) -> bytes:
    """Return a small model with random changes to its header or data."""
    whole = _small_model()
    file = _File(list(whole.values), list(whole.tensors), whole.data)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 4))):
        rng.choice((_change_value, _change_value, _change_tensor, _change_counts, _change_data))(rng, file)
    encoded = file.encoded()
    if rng.random() < 0.2:
        encoded = several(rng, encoded, lambda rng, data: damage(rng, data, (0, min(len(data), 20_000))))
    return encoded


def _change_value(rng: Random, file: _File) -> None:
    at = rng.randrange(len(file.values))
    key, kind, data = file.values[at]
    change = rng.randrange(8)
    if change == 0:
        del file.values[at]
        return
    if change == 1:
        file.values.append(file.values[at])
        return
    if change == 2:
        key = rng.choice((nasty_text(rng).encode("utf-8", "surrogatepass"), rng.choice(file.values)[0]))
    elif change == 3:
        kind = rng.choice((*range(13), 13, 255))
    elif change == 4:
        data = damage(rng, data)
    elif change == 5:
        depth = rng.choice((2, 20, 2000))
        kind, data = _ARRAY, struct.pack("<IQ", _ARRAY, 1) * depth + struct.pack("<IQ", 0, 0)
    elif kind == _STRING:
        texts = (
            (nasty_text(rng), rng.choice(_ARCHITECTURES)) if b"architecture" in key else (nasty_text(rng),)
        )
        data = _text(rng.choice(texts).encode("utf-8", "surrogatepass"))
    elif kind == _FLOAT32:
        data = struct.pack("<f", rng.choice((0.0, -1.0, 1e-38, 3e38, float("nan"), float("inf"))))
    elif kind == _ARRAY:
        data = data[:4] + struct.pack("<Q", rng.choice(NASTY_INTEGERS) % 2**64) + data[12:]
    else:
        data = struct.pack("<Q", rng.choice(NASTY_INTEGERS) % 2**64)[: len(data)]
    file.values[at] = (key, kind, data)


def _change_tensor(rng: Random, file: _File) -> None:
    at = rng.randrange(len(file.tensors))
    name, shape, kind, offset = file.tensors[at]
    change = rng.randrange(7)
    if change == 0:
        del file.tensors[at]
        return
    if change == 1:
        file.tensors.append(file.tensors[at])
        return
    if change == 2:
        name = rng.choice((nasty_text(rng).encode("utf-8", "surrogatepass"), rng.choice(file.tensors)[0]))
    elif change == 3 and shape:
        sizes = list(shape)
        sizes[rng.randrange(len(sizes))] = rng.choice((*NASTY_INTEGERS, shape[0] + 1, shape[0] // 2))
        shape = tuple(sizes)
    elif change == 4:
        shape = rng.choice(((), shape * 2, shape[::-1], shape * 5, (*shape, 1), (*shape, 0)))
    elif change == 5:
        kind = rng.choice((*range(45), 255, 2**31))
    else:
        offset = rng.choice((*NASTY_INTEGERS, offset + 1, offset + _ALIGNMENT, len(file.data)))
    file.tensors[at] = (name, shape, kind, offset)


def _change_counts(rng: Random, file: _File) -> None:
    change = rng.randrange(4)
    if change == 0:
        file.version = rng.choice((1, 2, *NASTY_INTEGERS))
    elif change == 1:
        file.extra_values = rng.choice((-1, *NASTY_INTEGERS))
    elif change == 2:
        file.extra_tensors = rng.choice((-1, *NASTY_INTEGERS))
    else:
        file.values.append(
            (b"general.alignment", _UINT32, struct.pack("<I", rng.choice(NASTY_INTEGERS) % 2**32))
        )


def _change_data(rng: Random, file: _File) -> None:
    data = file.data
    at = rng.randrange(len(data))
    change = rng.randrange(4)
    if change == 0:
        file.data = data[:at]
    elif change == 1:
        file.data = data[:at] + b"\xff" * min(4096, len(data) - at) + data[at + 4096 :]  # 0xFF bytes are NaN.
    elif change == 2:
        file.data = data[:at] + rng.randbytes(min(4096, len(data) - at)) + data[at + 4096 :]
    else:
        file.data = data + bytes(rng.choice((1, 31, 4096)))


@cache
def _small_model() -> _File:
    """Return the embedded draft model, reduced to its first tokens and first layer."""
    path = models_folder() / "demo-draft-q8_0.gguf"
    header = read_header(path)
    content = path.read_bytes()[header.size_bytes :]
    ends = [*sorted(tensor.offset_bytes for tensor in header.tensors), len(content)]
    tensors, data = [], b""
    for tensor in header.tensors:
        if tensor.name.startswith("blk.") and not tensor.name.startswith(_LAYER):
            continue
        start = tensor.offset_bytes
        part, shape = content[start : ends[ends.index(start) + 1]], tensor.shape
        if len(shape) == 2 and shape[1] == header.metadata["llama.vocab_size"]:
            part, shape = part[: len(part) // shape[1] * _TOKENS], (shape[0], _TOKENS)
        tensors.append((tensor.name.encode(), shape, tensor.kind, len(data)))
        data += part + bytes(-len(part) % _ALIGNMENT)
    return _File(list(_small_values(header.metadata)), tensors, data)


def _small_values(metadata: Any) -> Any:
    tokens = set(list(metadata["tokenizer.ggml.tokens"])[:_TOKENS])
    changed = {"llama.block_count": 1, "llama.vocab_size": _TOKENS}
    for key, value in (dict(metadata) | changed).items():
        name = key.encode()
        if isinstance(value, str):
            yield name, _STRING, _text(value.encode())
        elif isinstance(value, bool):
            yield name, _BOOL, struct.pack("<?", value)
        elif isinstance(value, int):
            yield name, _UINT32, struct.pack("<I", value)
        elif isinstance(value, float):
            yield name, _FLOAT32, struct.pack("<f", value)
        elif isinstance(value, StringArray):
            texts = list(value)
            if key.endswith(".tokens"):
                texts = texts[:_TOKENS]
            elif key.endswith(".merges"):
                texts = [text for text in texts if text.replace(b" ", b"") in tokens]
            parts = b"".join(map(_text, texts))
            yield name, _ARRAY, struct.pack("<IQ", _STRING, len(texts)) + parts
        else:
            numbers = np.asarray(value)[:_TOKENS]
            kind = _FORMATS[numbers.dtype.name]
            yield name, _ARRAY, struct.pack("<IQ", kind, len(numbers)) + numbers.tobytes()


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text
