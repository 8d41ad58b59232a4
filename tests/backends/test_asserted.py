"""Files that say odd things of themselves are errors of ours: llama.cpp would end the process."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest

import edgespec
from edgespec.backends import llamacpp
from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.blueprint import GgufBlueprint
from edgespec.errors import EdgespecError, ModelFileError
from tests.backends.tiny_models import write_llama


def altered(folder: Path, key: str, value: int) -> Path:
    """A tiny model whose header says something else."""
    path = write_llama(folder / "model.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    return path


def refuse(path: Path, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        llamacpp.load(str(path), "model", LoadOptions(context_tokens=256))
    with pytest.raises(ModelFileError, match=match):
        GgufBlueprint(str(path), "model")
    with pytest.raises(ModelFileError, match=match):
        edgespec.plan(str(path), None)


@pytest.mark.parametrize("layers", [0, 513, 2**32 - 1])
def test_layers_that_cannot_be(layers: int, tmp_path: Path) -> None:
    refuse(altered(tmp_path, "block_count", layers), f"it says it has {layers:,} layers")


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    refuse(altered(tmp_path, "embedding_length", 2**31), "its embedding_length is 2,147,483,648")


@pytest.mark.parametrize("other", [b"<0x41>", b"<0x41"])
def test_tokens_that_are_there_twice(other: bytes, tmp_path: Path) -> None:
    """A text ends at its first zero."""
    path = write_llama(tmp_path / "model.gguf")
    data = path.read_bytes()
    for token in (b"<0x41>", b"<0x42>"):
        assert data.count(token) == 1
        data = data.replace(token, other.ljust(len(token), b"\0"))
    path.write_bytes(data)
    refuse(path, "1 tokens of its vocabulary are there twice")


def test_any_damage_to_a_header_is_an_error_or_none(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    data = path.read_bytes()
    draws = random.Random(5)
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(draws.randrange(1, 4)):
            damaged[draws.randrange(1500)] = draws.randrange(256)
        path.write_bytes(damaged)
        with suppress(EdgespecError):
            assert edgespec.plan(str(path), None, memory="1GiB").plan.context_tokens > 0
