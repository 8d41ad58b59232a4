"""Invalid headers raise ModelFileError instead of letting llama.cpp abort the process."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import pytest

import edgespec
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.header_validation import check_headers
from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator
from edgespec.errors import EdgespecError, ModelFileError
from edgespec.model.base import LoadOptions
from tests.backends.split_gguf import write_parts
from tests.backends.tiny_models import write_jamba, write_llama, write_mamba, write_moe
from tests.backends.tiny_mtp_models import write_deepseek4
from tests.raising import raises

_UNSUPPORTED = "model_file_not_supported"


def altered(folder: Path, key: str, value: int, write: Callable[[Path], Path] = write_llama) -> Path:
    """Return a tiny model with one changed value in its header."""
    path = write(folder / "model.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    return path


def with_value(path: Path, key: str, value: int | str, off: int = 0) -> Path:
    """Add a value to the header of a file, and shift its weights by `off` bytes from their alignment."""
    encoded = struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<I", 8) + text(value)
    added = text(key) + encoded
    # A padding value keeps the weights aligned.
    more = -(len(added) + len(text("x")) + 4 + 8) % 32 + off
    added += text("x") + struct.pack("<I", 8) + text("." * more)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack("<Q", struct.unpack("<Q", data[16:24])[0] + 2)
    data[24:24] = added
    path.write_bytes(data)
    return path


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def of_type(path: Path, tensor: str, dimensions: int, kind: int) -> Path:
    """Change the type of a tensor in the header of a file."""
    data = bytearray(path.read_bytes())
    at = data.index(tensor.encode()) + len(tensor) + 4 + 8 * dimensions
    data[at : at + 4] = struct.pack("<I", kind)
    path.write_bytes(data)
    return path


def refuse(path: Path, *quoted: str, code: str = "") -> None:
    with raises(ModelFileError, *quoted, code=code):
        llamacpp.load(str(path), "model", LoadOptions(context_tokens=256))
    with raises(ModelFileError, *quoted, code=code):
        GgufMemoryEstimator(str(path), "model")
    with raises(ModelFileError, *quoted, code=code):
        edgespec.plan(str(path), None)


@pytest.mark.parametrize("layers", [0, 513, 2**32 - 1])
def test_invalid_layer_counts_are_refused(layers: int, tmp_path: Path) -> None:
    refuse(altered(tmp_path, "block_count", layers), f"{layers:,}")


def test_a_hybrid_without_an_embedding_length_is_refused(tmp_path: Path) -> None:
    path = write_jamba(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"jamba.embedding_length", b"jamba.embedding_lengtX"))
    refuse(path, "embedding_length", code=_UNSUPPORTED)


def test_huge_sizes_are_refused(tmp_path: Path) -> None:
    refuse(altered(tmp_path, "embedding_length", 2**31), "embedding_length")


@pytest.mark.long
def test_checking_a_large_vocabulary_needs_little_memory(tmp_path: Path) -> None:
    """Memory that Python allocates here stays with the process, but memory plans do not include it."""
    path = tmp_path / "wide.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"word{i:06}" for i in range(200_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tracemalloc.start()
    try:
        check_headers([path])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * path.stat().st_size


@pytest.mark.parametrize("other", [b"<0x41>", b"<0x41"])
def test_duplicate_tokens_are_refused(other: bytes, tmp_path: Path) -> None:
    """llama.cpp reads a token up to its first zero byte."""
    path = write_llama(tmp_path / "model.gguf")
    data = path.read_bytes()
    for token in (b"<0x41>", b"<0x42>"):
        assert data.count(token) == 1
        data = data.replace(token, other.ljust(len(token), b"\0"))
    path.write_bytes(data)
    refuse(path, "duplicate")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("llama.expert_count", 4, "0 of 4"),
        ("llama.expert_count", 1025, "1,025"),
        ("llama.expert_used_count", 3, "3 of 0"),
        ("llama.expert_group_count", 2, "2 groups"),
        ("llama.rope.scaling.type", "spiral", "'spiral'"),
    ],
)
def test_invalid_optional_values_are_refused(key: str, value: int | str, match: str, tmp_path: Path) -> None:
    refuse(with_value(write_llama(tmp_path / "model.gguf"), key, value), match)


def test_a_chat_template_with_a_null_character_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", template="{{ messages }}\0{{ more }}")
    refuse(path, "chat template", "position 15")


def test_a_chat_template_that_ends_with_null_characters_is_accepted(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", template="{{ messages }}\0\0")
    assert edgespec.plan(str(path), None).plan.fits


def test_a_valid_optional_value_is_accepted(tmp_path: Path) -> None:
    path = with_value(write_llama(tmp_path / "model.gguf"), "llama.rope.scaling.type", "linear")
    assert edgespec.plan(str(path), None).plan.fits


def test_experts_without_a_count_are_refused(tmp_path: Path) -> None:
    path = altered(tmp_path, "expert_used_count", 0, write=write_moe)
    at = (data := bytearray(path.read_bytes())).index(b"llama.expert_count") + 22
    data[at : at + 4] = bytes(4)
    path.write_bytes(data)
    refuse(path, "expert_count")


@pytest.mark.parametrize("bits", [0xBF800000, 0x7FC00000, 0x7F800000])
def test_invalid_epsilons_are_refused(bits: int, tmp_path: Path) -> None:
    refuse(altered(tmp_path, "layer_norm_rms_epsilon", bits), "layer_norm_rms_epsilon")


def test_a_missing_byte_token_is_refused(tmp_path: Path) -> None:
    """Tokenizing such a byte would abort the process long after loading."""
    path = write_llama(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"<0x41>", b"<what>"))
    refuse(path, "256 bytes")


@pytest.mark.parametrize(
    ("tensor", "dimensions", "kind", "match"),
    [
        ("blk.0.ffn_down.weight", 2, 24, "type I8"),
        ("output_norm.weight", 1, 26, "type I32"),
        ("blk.0.attn_norm.weight", 1, 1, "type F32"),
    ],
)
def test_invalid_tensor_types_are_refused(
    tensor: str, dimensions: int, kind: int, match: str, tmp_path: Path
) -> None:
    refuse(of_type(write_llama(tmp_path / "model.gguf"), tensor, dimensions, kind), match)


def test_invalid_types_of_recurrent_tensors_are_refused(tmp_path: Path) -> None:
    refuse(of_type(write_mamba(tmp_path / "model.gguf"), "blk.0.ssm_a", 2, 1), "ssm_a")


def test_later_parts_are_checked_too(tmp_path: Path) -> None:
    first, *others = write_parts(tmp_path)
    later = next(part for part in others if b"attn_norm" in part.read_bytes())
    of_type(later, "blk.0.attn_norm.weight", 1, 1)
    refuse(first, later.name, "blk.0.attn_norm.weight")


def test_a_file_named_as_part_0_of_0_is_checked(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model-00000-of-00000.gguf")
    refuse(of_type(path, "blk.0.attn_norm.weight", 1, 1), "type F32")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("output_group_count", 0, "0 groups"),
        ("output_group_count", 3, "3 groups"),
        ("head_count_kv", 2, "2 key"),
        ("attention.key_length", 32, "size 32"),
    ],
)
def test_sizes_of_compressed_attention_are_checked(key: str, value: int, match: str, tmp_path: Path) -> None:
    refuse(altered(tmp_path, key, value, write_deepseek4), match)


@pytest.mark.parametrize(
    ("key", "value", "tensor", "shape"),
    [
        ("hyper_connection.count", 3, "output_hc_fn.weight", "96, 3"),
        ("hyper_connection.count", 2**31, "output_hc_fn.weight", "68719476736, 2147483648"),
        ("indexer.key_length", 32, "blk.0.indexer.attn_q_b.weight", "24, 64"),
    ],
)
def test_llama_cpp_compares_other_sizes_with_the_shapes_of_tensors(
    key: str, value: int, tensor: str, shape: str, tmp_path: Path
) -> None:
    refuse(
        altered(tmp_path, key, value, write_deepseek4),
        f"'{tensor}'",
        shape,
        code=_UNSUPPORTED,
    )


def test_misaligned_weights_are_refused(tmp_path: Path) -> None:
    path = with_value(write_llama(tmp_path / "model.gguf"), "general.alignment", 8, off=8)
    refuse(path, "multiple")


def test_recurrent_layers_of_another_width_are_refused(tmp_path: Path) -> None:
    refuse(altered(tmp_path, "embedding_length", 31, write=write_jamba), "ssm.inner_size")


@pytest.mark.long
def test_random_damage_raises_an_error_or_does_no_harm(tmp_path: Path) -> None:
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
