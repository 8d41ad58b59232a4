"""MTP heads follow the target through any history, and no head changes a reply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.assembly.loading import always_draft
from edgespec.backends.base import LanguageModel
from edgespec.backends.gguf_header import read_header
from edgespec.backends.hidden_state_log import POST_NORM
from edgespec.backends.llamacpp import context_planning, mtp, probe, state_taps
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.mtp_files import MTP_GRAPHS, read_mtp_layers
from edgespec.backends.replay import ReplayModel
from edgespec.backends.self_draft_methods import Head
from edgespec.drafters.head_cache import HeadCache
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError, OptionError
from tests.backends.head_histories import ROUNDS, Round, check_history, first_logits
from tests.backends.mtp_targets import Files, head_of
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_mtp_models import SHAPES, write_mtp_model, write_mtp_sidecar
from tests.cases import first

# The metadata before the vocabulary, and the names and shapes of the tensors, lie within this many bytes.
_HEADER_BYTES = 12_000


@pytest.fixture(scope="module", params=SHAPES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("mtp"), request.param)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("glm"), "glm4moe")


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    files: Files, rounds: list[Round], seed: int
) -> None:
    check_history(files.load, head_of, rounds, seed, depth=3)


def test_a_file_with_the_layers_alone_drafts_the_same(files: Files) -> None:
    tokens = list(range(10, 40))
    found = []
    for path in (None, files.sidecar):
        target = files.load(mtp=path is None)
        head = head_of(target, path)
        target.prefill(tokens[:-1])
        found.append(first_logits(head, HeadCache(head), tokens))
        head.close()
        target.close()
    assert np.array_equal(found[0], found[1])
    assert np.isfinite(found[0]).all()


def logged(files: Files, *states: int) -> NDArray[np.float32]:
    """Hidden states of 100 tokens."""
    tokens = list(range(10, 110))
    target = files.load()
    inner = target._inner if isinstance(target, ReplayModel) else target
    assert isinstance(inner, LlamaCppModel)
    log = inner.log_hidden_states(states)
    target.prefill(tokens[:-4])
    target.verify(TokenTree.chain(tokens[-4], tokens[-3:]))
    target.commit((1, 2, 3))
    target.close()
    return log.rows(0, len(tokens))


def rms_normed(states: NDArray[np.float32]) -> NDArray[np.float32]:
    normed: NDArray[np.float32] = states / np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-5)
    return normed


def mixed(path: Path, streams: NDArray[np.float32]) -> NDArray[np.float32]:
    """The hidden state that a model with hyper-connections mixes from its residual streams."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    matrix, base, scale = (tensors[f"output_hc_{part}.weight"] for part in ("fn", "base", "scale"))
    weights = 1 / (1 + np.exp(-(rms_normed(streams) @ matrix.T * scale + base)))
    parts = streams.reshape(len(streams), len(base), -1)
    result: NDArray[np.float32] = (weights[:, :, None] * parts).sum(axis=1)
    return result


def test_heads_read_the_states_that_llama_cpp_defines(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal the named tensor of a pass after the final norm, or do after the norm is applied."""
    graph = read_mtp_layers(files.target).graph
    read = logged(files, *graph.states_read(2))
    monkeypatch.setattr(state_taps, "nextn_api", lambda: None)
    normed = logged(files, POST_NORM)
    assert np.abs(normed).min(axis=1).all()
    if graph.streams > 1:
        read = mixed(files.target, read)
    if not graph.reads_normed:
        assert np.abs(read - normed).max() > 0.1
        read = rms_normed(read)
    np.testing.assert_allclose(read, normed, rtol=0, atol=1e-4)


def test_a_rejected_draft_does_not_keep_the_head_from_drafting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets with a large recurrent state return to a checkpoint, but the accepted states stay known."""
    monkeypatch.setattr(context_planning, "_SMALL_STATES_BYTES", 0)
    files = Files(tmp_path, "qwen35")
    target = files.load()
    assert "in place" not in target.facts.rollback
    head = head_of(target)
    cache = HeadCache(head)
    tokens = list(range(10, 40))
    target.prefill(tokens[:-1])
    for kept in (1, 0, 2, 0):
        first_logits(head, cache, tokens)
        target.verify(TokenTree.chain(tokens[-1], [50, 51, 52]))
        target.commit(tuple(range(1, kept + 1)))
        tokens += [*[50, 51, 52][:kept], 60 + kept]
        assert head.last_position == len(tokens) - 1 == target.length
    drafted = first_logits(head, cache, tokens)
    head.close()
    fresh = head_of(target)
    target.truncate(0)
    target.prefill(tokens[:-1])
    expected = first_logits(fresh, HeadCache(fresh), tokens)
    assert np.abs(drafted - expected).max() < 5e-3
    fresh.close()
    target.close()


@settings(max_examples=6, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_any_history_with_checkpoints_alone(checkpointed: Files, rounds: list[Round], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_planning, "_SMALL_STATES_BYTES", 0)
        check_history(checkpointed.load, head_of, rounds, seed, depth=3)


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("checkpointed"), "qwen35")


@pytest.fixture
def target(glm: Files) -> Iterator[LanguageModel]:
    model = glm.load()
    yield model
    model.close()


def test_a_target_loaded_without_its_layers_does_not_draft_with_them(glm: Files) -> None:
    """llama.cpp would end the process."""
    target = glm.load(mtp=False)
    with pytest.raises(CapabilityError, match="was loaded without its MTP layers"):
        head_of(target)
    target.close()


def without(path: Path, model: Path, *names: str) -> Path:
    """A copy of a GGUF file without the tensors whose names end like this."""
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


def test_metadata_that_claim_missing_layers_are_not_believed(tmp_path: Path, files: Files) -> None:
    """Many converters remove the layers, but leave their number in the metadata."""
    layer = tuple(name for name in tensor_names(files.target) if name.startswith("blk.2."))
    path = without(tmp_path / "target.gguf", files.target, *layer)
    with pytest.raises(CapabilityError, match="contains no layers for multi-token prediction"):
        read_mtp_layers(path)
    shape = SHAPES[read_header(path).architecture]
    if shape.delta or shape.mamba or shape.hyper:  # llama.cpp does not load such files at all.
        return
    with pytest.raises(OptionError, match="no head was found"):
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
    with pytest.raises(ModelFileError, match=f"lacks {name.removeprefix('blk.2.')}"):
        head_of(target, path)


def test_layers_of_a_kind_that_llama_cpp_cannot_run_are_refused(tmp_path: Path) -> None:
    """llama.cpp would end the process."""
    model = write_mtp_model(tmp_path / "mimo2.gguf", "mimo2")
    with pytest.raises(ModelFileError, match=r"lacks attn_qkv\.weight"):
        read_mtp_layers(without(tmp_path / "separate.gguf", model, "attn_qkv.weight"))
    model = write_mtp_model(tmp_path / "deepseek2.gguf", "deepseek2")
    path = write_mtp_sidecar(tmp_path / "sidecar.gguf", model, q_lora_rank=0)
    with pytest.raises(CapabilityError, match="because it does not support their attention layers"):
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
    with pytest.raises(CapabilityError, match="or because they read hidden states of another size"):
        read_mtp_layers(write_mtp_sidecar(tmp_path / "sidecar.gguf", model, **changes))


def test_the_size_of_the_streams_may_be_missing(tmp_path: Path) -> None:
    files = Files(tmp_path, "deepseek4")
    target = files.load(mtp=False)
    head = head_of(target, write_mtp_sidecar(tmp_path / "old.gguf", files.target, embedding_length_out=0))
    target.prefill([1, 2, 3])
    assert np.isfinite(first_logits(head, HeadCache(head), [1, 2, 3, 4])).all()
    head.close()
    target.close()


def test_every_architecture_is_tested() -> None:
    assert set(SHAPES) == set(MTP_GRAPHS)


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
    with pytest.raises(CapabilityError, match="made for another target") as caught:
        head_of(target, path)
    assert message in caught.value.what


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
    with pytest.raises(CapabilityError, match="contains no layers for multi-token prediction"):
        head_of(target, path)


def test_a_truncated_file_is_refused(target: LanguageModel, glm: Files, tmp_path: Path) -> None:
    path = tmp_path / "mtp.gguf"
    path.write_bytes(glm.sidecar.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="damaged|incomplete|truncated"):
        head_of(target, path)


def damaged(path: Path, value: float) -> Path:
    """Write this value to all weights of the matrix that joins embeddings and hidden states."""
    reader = gguf.GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if "eh_proj" in tensor.name).data[:] = value
    reader.data.flush()
    return path


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_layers_whose_logits_are_not_finite_are_refused(
    target: LanguageModel, glm: Files, tmp_path: Path, value: float
) -> None:
    with pytest.raises(ModelFileError, match="not finite"):
        head_of(target, damaged(write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target), value))


@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_useless_layers_change_no_reply(glm: Files, tmp_path: Path, temperature: float) -> None:
    head = damaged(write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target), 1e30)
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
    with (
        always_draft(),
        edgespec.load(str(glm.target), "none", method="none", context=256) as plain,
        edgespec.load(str(glm.target), "none", method="mtp", head=head, context=256) as drafting,
    ):
        assert drafting.generate("the file", **asked).tokens == plain.generate("the file", **asked).tokens


@settings(max_examples=4, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
def test_random_bytes_in_a_file_give_an_error_or_the_same_reply(
    glm: Files, changes: list[tuple[int, int]]
) -> None:
    """Damaged layers may crash llama.cpp, but only in the process that tries them first."""
    data = bytearray(glm.sidecar.read_bytes())
    for position, value in changes:
        data[position % _HEADER_BYTES] = value
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "head.gguf"
        path.write_bytes(data)
        options: dict[str, Any] = {"methods": ["none", "mtp"], "head": path, "context": 256}
        try:
            with always_draft(), edgespec.load(str(glm.target), "none", **options) as runtime:
                reply = runtime.generate("the file", method="mtp", **asked)
                assert reply.tokens == runtime.generate("the file", method="none", **asked).tokens
        except EdgespecError:
            pass


def test_more_layers_than_llama_cpp_can_run_are_refused(tmp_path: Path) -> None:
    path = write_mtp_model(tmp_path / "target.gguf", "glm4moe", mtp_layers=2)
    with pytest.raises(CapabilityError, match="cannot draft with the 2 MTP layers"):
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
    with pytest.raises(CapabilityError, match="cannot draft with the 1 MTP layer .* 'glm5-next'"):
        edgespec.load(str(glm.target), "none", head=str(tmp_path / "head.gguf"), context=256)


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


def test_llama_cpp_without_these_functions_does_not_draft(
    glm: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (mtp, probe):
        monkeypatch.setattr(module, "nextn_api", lambda: None)
    target = glm.load()
    assert "dflash" in target.facts.capabilities.self_draft_methods
    with pytest.raises(CapabilityError, match="this version of llama.cpp"):
        head_of(target)
    with pytest.raises(CapabilityError, match="this version of llama.cpp cannot run MTP layers"):
        mtp.load_mtp_head(cast(LlamaCppModel, target), Head("mtp"))
    target.close()
