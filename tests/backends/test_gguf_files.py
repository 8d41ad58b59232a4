"""The headers of GGUF files: they give the same as the gguf package, and identify the parts of a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.errors import EdgespecError, ModelFileError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import (
    StringArray,
    TruncatedHeader,
    parse_header,
    read_general,
    read_header,
)
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.store.catalogue import models_folder
from edgespec.store.reference import resolve
from tests.backends.split_gguf import COUNT, write_parts
from tests.backends.tiny_models import write_llama
from tests.raising import raises


def copied(first: Path) -> Path:
    return Path(shutil.copyfile(first, first.with_name("mine.gguf")))


def downloaded_twice(first: Path) -> Path:
    return first.rename(first.with_name(f"{first.stem} (1).gguf"))


def all_downloaded_twice(first: Path) -> Path:
    parts = sorted(first.parent.iterdir())
    renamed = [part.rename(part.with_name(f"{part.stem}(1).gguf")) for part in parts]
    return renamed[0]


def linked(first: Path) -> Path:
    link = first.parents[1] / "link.gguf"
    link.symlink_to(first)
    return link


def linked_within_the_folder(first: Path) -> Path:
    link = first.with_name("link.gguf")
    link.symlink_to(first.name)
    return link


def blobs(first: Path) -> Path:
    """Name the parts by their hash, as the Hugging Face cache does."""
    parts = sorted(first.parent.iterdir())
    renamed = [part.rename(part.with_name(f"{i}9f86d081884c7")) for i, part in enumerate(parts)]
    return renamed[0]


def second_part(first: Path) -> Path:
    return first.with_name(first.name.replace("00001-of", "00002-of"))


def renamed_second_part(first: Path) -> Path:
    return second_part(first).rename(first.with_name("zwei.gguf"))


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        lambda first: first,
        copied,
        downloaded_twice,
        all_downloaded_twice,
        linked,
        linked_within_the_folder,
        blobs,
        second_part,
        renamed_second_part,
    ],
)
def test_the_parts_are_found_whatever_they_are_called(change: Callable[[Path], Path], tmp_path: Path) -> None:
    first = write_parts(tmp_path / "folder")[0]
    parameters = read_gguf_info(first).parameters
    path = change(first)
    files = gguf_files(path)
    assert len(files) == COUNT
    assert read_gguf_info(path).parameters == parameters
    assert resolve(str(path)).path == files[0]
    with edgespec.load(str(path), None, context=256, measure_costs=False, trust=True) as runtime:
        assert runtime.target.parameters == parameters


def test_two_models_in_one_folder_keep_their_own_parts(tmp_path: Path) -> None:
    first, other = write_parts(tmp_path, "one"), write_parts(tmp_path, "two", seed=1)
    assert gguf_files(first[1]) == first
    assert gguf_files(other[2]) == other
    moved = first[0].rename(tmp_path / "mine.gguf")
    with raises(
        ModelFileError, "one-00002-of-00003.gguf and two-00002-of-00003.gguf", code="model_file_incomplete"
    ):
        gguf_files(moved)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second, third = write_parts(tmp_path)
    third.unlink()
    with raises(
        ModelFileError, "part 1 of 3", "d-00003-of-00003.gguf is missing", code="model_file_incomplete"
    ):
        gguf_files(first)
    second.unlink()
    with raises(ModelFileError, "part 1 of 3", "2 parts", code="model_file_incomplete"):
        gguf_files(first.rename(tmp_path / "mine.gguf"))


def test_a_part_in_place_of_another_is_named(tmp_path: Path) -> None:
    first, second, _ = write_parts(tmp_path)
    shutil.copyfile(first, second)
    with raises(ModelFileError, "d-00002-of-00003.gguf", "2 of", "of 3", code="model_file_incomplete"):
        gguf_files(first)


@pytest.mark.parametrize("name", ["whole-00001-of-00002.gguf", "whole-00002-of-00002.gguf"])
def test_a_whole_file_named_like_a_part_is_a_model(name: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / name)
    assert gguf_files(path) == [path]
    with edgespec.load(str(path), None, context=256, measure_costs=False, trust=True) as runtime:
        assert runtime.target.parameters


@pytest.mark.parametrize("name", ["d-00001-of-00003.gguf", "joined.gguf"])
def test_parts_joined_with_cat_are_refused_with_the_right_tool(name: str, tmp_path: Path) -> None:
    data = b"".join(part.read_bytes() for part in write_parts(tmp_path / "parts"))
    path = tmp_path / name
    path.write_bytes(data)
    for use in (gguf_files, read_gguf_info, lambda path: edgespec.load(str(path), None, trust=True)):
        with raises(EdgespecError, "--merge", code="model_file_incomplete"):
            use(path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with raises(ModelFileError, "pointer", code="model_file_incomplete"):
        gguf_files(path)


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
