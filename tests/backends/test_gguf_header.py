"""Parse GGUF headers with the same result as the gguf package, and report truncated and damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ModelFileError
from edgespec.model.formats.gguf_header import (
    StringArray,
    TruncatedHeader,
    parse_header,
    read_general,
    read_header,
)
from edgespec.store.catalogue import models_folder
from tests.backends.tiny_models import write_llama
from tests.raising import raises

DEMO = models_folder() / "demo-draft-q8_0.gguf"


@pytest.mark.long
def test_equals_the_gguf_package() -> None:
    header, reader = read_header(DEMO), gguf.GGUFReader(DEMO)
    assert header.size_bytes == reader.data_offset
    assert header.architecture == "llama"
    assert header.architecture_value("context_length") == 1024
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(header.metadata) == set(fields)
    for key, wanted in fields.items():
        found = header.metadata[key]
        if isinstance(found, StringArray):
            assert [text.decode() for text in found] == wanted
        elif isinstance(found, np.ndarray):
            assert found.tolist() == wanted
        else:
            assert found == wanted
    for tensor, known in zip(header.tensors, reader.tensors, strict=True):
        assert tensor.name == known.name
        assert tensor.shape == tuple(known.shape)
        assert tensor.kind == known.tensor_type
        assert header.size_bytes + tensor.offset_bytes == known.data_offset


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    words = tuple(f"word{i:06}-{'x' * 60}" for i in range(30_000))
    path = tmp_path / "wide.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(words)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert path.stat().st_size > 2 << 20
    assert read_header(path).metadata["tokenizer.ggml.tokens"][-1] == words[-1].encode()


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_every_truncated_header_raises(data: st.DataObject) -> None:
    whole = DEMO.read_bytes()[: read_header(DEMO).size_bytes]
    with pytest.raises(TruncatedHeader):
        parse_header(whole[: data.draw(st.integers(0, len(whole) - 64))])


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 2000))
def test_damaged_headers_raise_only_expected_errors(tail: bytes, kept: int) -> None:
    with pytest.raises(ValueError, match="."):
        parse_header(DEMO.read_bytes()[:kept] + tail)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04", b"GGUF\x01\0\0\0" + bytes(16), bytes(64)])
def test_other_files_raise_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with raises(ModelFileError, "model.gguf"):
        read_header(path)
    with raises(ModelFileError, code="model_file_unreadable"):
        read_header(tmp_path)


def test_a_tiny_model(tmp_path: Path) -> None:
    header = read_header(write_llama(tmp_path / "tiny.gguf"))
    assert header.architecture_value("block_count") == 1
    assert sum(tensor.elements for tensor in header.tensors) > 10_000


def test_the_name_is_read_without_the_rest(tmp_path: Path) -> None:
    assert read_general(DEMO)["general.name"] == read_header(DEMO).metadata["general.name"]
    start, no_name, other = (tmp_path / name for name in ("start.gguf", "no-name.gguf", "other.gguf"))
    start.write_bytes(DEMO.read_bytes()[:1000])
    assert read_general(start) == read_general(DEMO)
    no_name.write_bytes(DEMO.read_bytes()[:24])
    other.write_bytes(b"GIF89a")
    assert [read_general(path) for path in (no_name, other, tmp_path, tmp_path / "missing")] == [{}] * 4
