"""MTP heads follow the target through any history, and no head changes a reply."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.llamacpp import context_planning, mtp, state_taps
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.mtp_files import MTP_GRAPHS, read_mtp_layers
from edgespec.backends.replay import ReplayModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import Head
from edgespec.model.hidden_states import POST_NORM
from tests.backends.head_histories import ROUNDS, Round, check_history, first_logits
from tests.backends.mtp.targets import Files, head_of
from tests.backends.tiny_mtp_models import SHAPES
from tests.raising import raises


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
