"""Files with MTP layers: which are rejected, how memory is planned, and that damage changes no reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings

import edgespec
from edgespec.backends.llamacpp.mtp_files import read_mtp_layers
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError, OptionError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import LanguageModel
from edgespec.model.formats.gguf_header import read_header
from tests.backends.damaged_heads import BYTE_CHANGES, check_changed_bytes, check_same_replies
from tests.backends.head_histories import first_logits
from tests.backends.mtp.targets import Files, head_of
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_mtp_models import SHAPES, write_mtp_model, write_mtp_sidecar
from tests.cases import first
from tests.raising import raises

# The metadata before the vocabulary, and the tensor names and shapes, are within this many bytes.
_HEADER_BYTES = 12_000
# Models with experts, with windows and with a recurrent state. `-m long` also tests the others.
KINDS = first(("glm4moe", "mimo2", "qwen35", *sorted(SHAPES.keys() - {"glm4moe", "mimo2", "qwen35"})), 3)


def test_a_target_loaded_without_its_layers_does_not_draft_with_them(glm: Files) -> None:
    """llama.cpp would end the process."""
    target = glm.load(mtp=False)
    with raises(CapabilityError, code="mtp_missing"):
        head_of(target)
    target.close()


def without(path: Path, model: Path, *names: str) -> Path:
    """Return a copy of a GGUF file without the tensors whose names have these suffixes."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        if not tensor.name.endswith(names):
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.long
@pytest.mark.parametrize("files", KINDS, indirect=True)
def test_metadata_that_claim_missing_layers_are_not_believed(tmp_path: Path, files: Files) -> None:
    """Many converters remove the layers but keep their number in the metadata."""
    layer = tuple(name for name in tensor_names(files.target) if name.startswith("blk.2."))
    path = without(tmp_path / "target.gguf", files.target, *layer)
    with raises(CapabilityError, code="mtp_missing"):
        read_mtp_layers(path)
    shape = SHAPES[read_header(path).architecture]
    if shape.delta or shape.mamba or shape.hyper:  # llama.cpp does not load such files at all.
        return
    with raises(OptionError, "no draft head", code="method_unavailable", option="method"):
        edgespec.load(str(path), "none", method="mtp", context=256)
    with edgespec.load(str(path), "none", method="auto", context=256) as runtime:
        assert "mtp" not in runtime.method.effective


def tensor_names(path: Path) -> list[str]:
    return [tensor.name for tensor in gguf.GGUFReader(path).tensors]


@pytest.mark.parametrize(
    "name", ["nextn.enorm.weight", "blk.2.ffn_gate_inp.weight", "blk.2.attn_norm.weight"]
)
def test_incomplete_layers_are_refused(target: LanguageModel, glm: Files, tmp_path: Path, name: str) -> None:
    """llama.cpp would end the process for some of them."""
    path = without(tmp_path / "mtp.gguf", glm.sidecar, name)
    with raises(ModelFileError, name.removeprefix("blk.2.")):
        head_of(target, path)


def test_layers_of_a_kind_that_llama_cpp_cannot_run_are_refused(tmp_path: Path) -> None:
    """llama.cpp would end the process."""
    model = write_mtp_model(tmp_path / "mimo2.gguf", "mimo2")
    with raises(ModelFileError, "lacks attn_qkv.weight"):
        read_mtp_layers(without(tmp_path / "separate.gguf", model, "attn_qkv.weight"))
    model = write_mtp_model(tmp_path / "deepseek2.gguf", "deepseek2")
    path = write_mtp_sidecar(tmp_path / "sidecar.gguf", model, q_lora_rank=0)
    with raises(CapabilityError, "attention", code="head_not_supported"):
        read_mtp_layers(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_ratios": [4, 128, 4]},
        {"hash_layer_count": 3},
        {"embedding_length_out": 32},
        {"key_length": 16},
    ],
)
def test_layers_that_read_other_streams_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """llama.cpp would end the process."""
    model = write_mtp_model(tmp_path / "deepseek4.gguf", "deepseek4")
    with raises(CapabilityError, "hidden size", code="head_not_supported"):
        read_mtp_layers(write_mtp_sidecar(tmp_path / "sidecar.gguf", model, **changes))


def test_the_size_of_the_streams_may_be_missing(tmp_path: Path) -> None:
    files = Files(tmp_path, "deepseek4")
    target = files.load(mtp=False)
    head = head_of(target, write_mtp_sidecar(tmp_path / "old.gguf", files.target, embedding_length_out=0))
    target.prefill([1, 2, 3])
    assert np.isfinite(first_logits(head, HeadCache(head), [1, 2, 3, 4])).all()
    head.close()
    target.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_count_kv": 1}, "head_count_kv is 1, but 2 in target"),
        ({"embedding_length": 64}, "embedding_length"),
        ({"dimension_count": 18}, "dimension_count"),
        ({"expert_used_count": 0}, "expert_used_count"),
        ({"leading_dense_block_count": 9}, "leading_dense_block_count"),
    ],
)
def test_layers_of_another_model_are_refused(
    target: LanguageModel, glm: Files, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    path = write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target, **changes)
    with raises(CapabilityError, code="head_mismatch") as caught:
        head_of(target, path)
    assert message in caught.value.what


@pytest.mark.long
@pytest.mark.parametrize("key", ["block_count", "nextn_predict_layers", "context_length", "vocab_size"])
@pytest.mark.parametrize("value", [0, 1, 2, 4, 500, (1 << 31) - 1])
def test_other_numbers_of_layers_and_tokens_are_refused_or_harmless(
    target: LanguageModel, glm: Files, tmp_path: Path, key: str, value: int
) -> None:
    path = write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target, **{key: value})
    try:
        head = head_of(target, path)
    except EdgespecError:
        assert key != "context_length"
        return
    target.prefill([1, 2, 3])
    assert np.isfinite(first_logits(head, HeadCache(head), [1, 2, 3, 4])).all()
    head.close()


def test_a_model_without_such_layers_is_no_head(target: LanguageModel, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "llama.gguf")
    with raises(CapabilityError, code="mtp_missing"):
        head_of(target, path)


def test_a_truncated_file_is_refused(target: LanguageModel, glm: Files, tmp_path: Path) -> None:
    path = tmp_path / "mtp.gguf"
    path.write_bytes(glm.sidecar.read_bytes()[:-100])
    with raises(ModelFileError, "truncated"):
        head_of(target, path)


def damaged(path: Path, value: float) -> Path:
    """Set all weights of the matrix that combines embeddings and hidden states to this value."""
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if "eh_proj" in tensor.name).data[:] = value
    reader.data.flush()
    return path


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_layers_whose_logits_are_not_finite_are_refused(
    target: LanguageModel, glm: Files, tmp_path: Path, value: float
) -> None:
    with raises(ModelFileError, "not finite"):
        head_of(target, damaged(write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target), value))


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_useless_layers_change_no_reply(glm: Files, tmp_path: Path, temperature: float) -> None:
    head = damaged(write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target), 1e30)
    check_same_replies(glm.target, "mtp", head, [temperature])


@pytest.mark.long
@settings(max_examples=4, deadline=None)
@given(BYTE_CHANGES)
def test_random_bytes_in_a_file_give_an_error_or_the_same_reply(
    glm: Files, changes: list[tuple[int, int]]
) -> None:
    check_changed_bytes(glm.target, "mtp", glm.sidecar, changes, _HEADER_BYTES)


def test_more_layers_than_llama_cpp_can_run_are_refused(tmp_path: Path) -> None:
    path = write_mtp_model(tmp_path / "target.gguf", "glm4moe", mtp_layers=2)
    with raises(CapabilityError, "2 MTP", code="head_not_supported"):
        read_mtp_layers(path)


def test_another_kind_of_layers_is_one_clear_error(glm: Files, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "glm5-next")
    writer.add_block_count(3)
    writer.add_embedding_length(32)
    writer.add_nextn_predict_layers(1)
    writer.add_tensor("blk.2.nextn.eh_proj.weight", np.ones((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with raises(CapabilityError, "1 MTP", "'glm5-next'", code="head_not_supported"):
        edgespec.load(str(glm.target), "none", head=str(tmp_path / "head.gguf"), context=256)


@pytest.mark.long
@pytest.mark.parametrize("files", KINDS, indirect=True)
def test_the_plan_counts_the_layers_once(files: Files) -> None:
    def planned(method: str, **options: Any) -> dict[str, int]:
        plan = edgespec.plan(str(files.target), "none", method=method, context=256, **options).plan
        return {item.name: item.bytes for item in plan.items}

    plain, own, sidecar = planned("none"), planned("mtp"), planned("mtp", head=files.sidecar)
    assert own["target weights"] == sidecar["target weights"] == plain["target weights"]
    assert not any(name.startswith("head ") for name in plain)
    for planned_bytes in (own, sidecar):
        assert {name for name in planned_bytes if name.startswith("head ")} == {
            f"head {part}" for part in ("weights", "cache", "compute buffers", "logits")
        }
    sizes = []
    for loads in (False, True):
        target = files.load(mtp=loads)
        sizes.append(target.facts.weight_bytes)
        target.close()
    assert own["head weights"] == pytest.approx(sizes[1] - sizes[0], rel=0.02)
    assert sidecar["head weights"] == files.sidecar.stat().st_size
