"""MTP layers: no head changes a reply, whatever the history, and files that do not fit are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp import context_planning, mtp, state_taps
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.mtp_files import MTP_GRAPHS, read_mtp_layers
from edgespec.backends.replay import ReplayModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, EdgespecError, ModelFileError, OptionError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.hidden_states import POST_NORM, HeadModel
from tests.backends.head_histories import (
    BYTE_CHANGES,
    ROUNDS,
    Round,
    check_changed_bytes,
    check_history,
    check_same_replies,
    first_logits,
    overwritten,
)
from tests.backends.tiny_models import write_llama
from tests.backends.tiny_mtp_models import SHAPES, write_mtp_model, write_mtp_sidecar
from tests.cases import first
from tests.raising import raises

CONTEXT = 512


class Files:
    """A target with MTP layers, and another file that contains only these layers."""

    def __init__(self, folder: Path, architecture: str, mtp_layers: int = 1) -> None:
        self.target = write_mtp_model(folder / "target.gguf", architecture, mtp_layers=mtp_layers)
        # It would be found automatically if it were next to the target and named `mtp-target.gguf`.
        self.sidecar = write_mtp_sidecar(folder / "layers.gguf", self.target)

    def load(self, mtp: bool = True, context: int = CONTEXT) -> LanguageModel:
        return llamacpp.load(str(self.target), "target", LoadOptions(context_tokens=context, own_head=mtp))


def head_of(target: LanguageModel, path: Path | None = None) -> HeadModel:
    return cast(HeadModel, target.self_draft(Head("mtp", path)))


@pytest.fixture(scope="module", params=SHAPES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("mtp"), request.param)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("glm"), "glm4moe")


@pytest.fixture
def target(glm: Files) -> Iterator[LanguageModel]:
    model = glm.load()
    yield model
    model.close()


@pytest.mark.long
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    files: Files, rounds: list[Round], seed: int
) -> None:
    check_history(files.load, head_of, rounds, seed, depth=3)


@pytest.mark.long
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
    """Return the hidden state that a model with hyper-connections mixes from its residual streams."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    matrix, base, scale = (tensors[f"output_hc_{part}.weight"] for part in ("fn", "base", "scale"))
    weights = 1 / (1 + np.exp(-(rms_normed(streams) @ matrix.T * scale + base)))
    parts = streams.reshape(len(streams), len(base), -1)
    result: NDArray[np.float32] = (weights[:, :, None] * parts).sum(axis=1)
    return result


@pytest.mark.long
def test_heads_read_the_states_that_llama_cpp_defines(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal the final-norm tensor of a pass, either directly or after the norm is applied."""
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


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_any_history_with_checkpoints_alone(checkpointed: Files, rounds: list[Round], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_planning, "_SMALL_STATES_BYTES", 0)
        check_history(checkpointed.load, head_of, rounds, seed, depth=3)


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("checkpointed"), "qwen35")


def test_every_architecture_is_tested() -> None:
    assert set(SHAPES) == set(MTP_GRAPHS)


def test_llama_cpp_without_these_functions_does_not_draft(
    glm: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (mtp, state_taps):
        monkeypatch.setattr(module, "nextn_api", lambda: None)
    target = glm.load()
    assert "dflash" in target.facts.capabilities.self_draft_methods
    with raises(CapabilityError, code="head_not_supported"):
        head_of(target)
    with raises(CapabilityError, code="head_not_supported"):
        mtp.load_head(cast(LlamaCppModel, target), Head("mtp"))
    target.close()


CHAINS = {"hy_v3": 3, "step35": 2, "mimo2": 4}


@pytest.fixture(scope="module", params=CHAINS)
def chained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A target with several MTP layers."""
    return Files(tmp_path_factory.mktemp("chained"), request.param, CHAINS[request.param])


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_several_layers_draft_after_any_history_like_fresh_ones(
    chained: Files, rounds: list[Round], seed: int
) -> None:
    check_history(chained.load, head_of, rounds, seed, depth=5)


def test_each_layer_drafts_one_token_further(chained: Files) -> None:
    """The first token comes from the first layer alone, and later ones from others."""
    tokens = list(range(10, 40))
    found = []
    for count in (read_mtp_layers(chained.target).count, 1):
        target = chained.load()
        head = head_of(target)
        assert isinstance(head, PairHead)
        head._layers = count
        target.prefill(tokens[:-1])
        found.append(first_logits(head, HeadCache(head), tokens, depth=2).reshape(2, -1))
        head.close()
        target.close()
    assert np.array_equal(found[0][0], found[1][0])
    assert np.abs(found[0][1] - found[1][1]).max() > 0.1


@pytest.mark.parametrize("branches", [(), (2, 2)])
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_several_layers_change_no_reply(
    chained: Files, branches: tuple[int, ...], temperature: float
) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    options: dict[str, Any] = {"methods": ["none", "mtp"], "draft_branches": branches, "context": 256}
    with always_draft(), edgespec.load(str(chained.target), "none", **options) as runtime:
        reply = runtime.generate("the file", method="mtp", **asked)
        assert reply.tokens == runtime.generate("the file", method="none", **asked).tokens
        assert 0 < reply.stats.accepted_tokens < reply.stats.drafted_tokens


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


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_layers_whose_logits_are_not_finite_are_refused(
    target: LanguageModel, glm: Files, tmp_path: Path, value: float
) -> None:
    with raises(ModelFileError, "not finite"):
        head_of(target, overwritten(write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target), "eh_proj", value))


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_useless_layers_change_no_reply(glm: Files, tmp_path: Path, temperature: float) -> None:
    head = overwritten(write_mtp_sidecar(tmp_path / "mtp.gguf", glm.target), "eh_proj", 1e30)
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
