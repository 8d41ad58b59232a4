"""MTP layers of MLX models follow the target through any history, and change no reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import head_view, mlx
from edgespec.backends.mlx.eagle import EagleHead
from edgespec.backends.mlx.mtp import estimate_head
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.mlx_metadata import read_mlx_info
from edgespec.model.heads.mtp_files import read_mtp
from tests.backends.head_histories import ROUNDS, Round, check_history
from tests.backends.mlx.mtp_layers import NUMBERED, write_mtp_layer, write_numbered_mtp_layer
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.raising import raises

CONTEXT = 512


def write_mtp(folder: Path, **options: Any) -> Path:
    """A Qwen3-Next model with an MTP layer."""
    return write_mtp_layer(write_checkpoint(folder, "qwen3_next"), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp(tmp_path_factory.mktemp("mtp") / "model")


def load(folder: Path) -> Any:
    return mlx.load(str(folder), "target", LoadOptions(context_tokens=CONTEXT))


def head_of(target: Any) -> EagleHead:
    head = target.self_draft(Head("mtp"))
    assert isinstance(head, EagleHead)
    return head


@pytest.mark.long
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=8), seed=st.integers(0, 1 << 16))
def test_a_draft_after_any_history_equals_that_of_a_fresh_head(
    folder: Path, rounds: list[Round], seed: int
) -> None:
    check_history(lambda: load(folder), head_of, rounds, seed)


def test_an_mtp_layer_changes_no_reply(folder: Path) -> None:
    check_replies(folder)


def check_replies(folder: Path) -> None:
    with (
        always_draft(),
        edgespec.load(str(folder), "none", method="none", context=256) as plain,
        edgespec.load(str(folder), "none", method="mtp", context=256) as drafting,
    ):
        for temperature in (0.0, 0.8):
            asked: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": 3}
            reply = drafting.generate("the file", **asked)
            assert reply.tokens == plain.generate("the file", **asked).tokens
            assert reply.stats.drafted_tokens


@pytest.mark.long
def test_fused_experts_give_the_same_layer(folder: Path, tmp_path: Path) -> None:
    def parameters(path: Path) -> dict[str, mx.array]:
        from mlx.utils import tree_flatten

        target = load(path)
        head = head_of(target)
        found: Any = tree_flatten(head.networks[0].parameters())  # type: ignore[attr-defined]
        return dict(found)

    single, fused = parameters(folder), parameters(write_mtp(tmp_path / "fused", fused=True))
    assert single.keys() == fused.keys()
    experts = "layers.0.mlp.switch_mlp.up_proj.weight"
    np.testing.assert_array_equal(np.array(single[experts]), np.array(fused[experts]))


def test_the_layer_is_listed_and_its_memory_planned(folder: Path) -> None:
    assert read_mlx_info(folder).heads == ("MTP",)
    check_plan(folder)


def check_plan(folder: Path) -> None:
    estimate = estimate_head(Head("mtp"), folder, CONTEXT)
    target = load(folder)
    head = head_of(target)
    assert estimate.bytes_of("weights") == head.facts.weight_bytes
    assert estimate.bytes_of("cache") == head.facts.kv_bytes
    target.close()


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"fc.weight": None}, "model_file_not_supported", "fc.weight"),
        ({"fc.weight": np.zeros((64, 64))}, "model_file_damaged", "do not"),
        ({"layers.0.mlp.gate.weight": None}, "model_file_damaged", "do not"),
        ({"norm.weight": np.full(64, np.nan)}, "model_file_damaged", "not finite"),
    ],
)
def test_a_damaged_layer_is_refused(tmp_path: Path, changes: dict[str, Any], code: str, message: str) -> None:
    target = load(write_mtp(tmp_path / "model", **changes))
    with raises(ModelFileError, message, code=code):
        head_of(target)
    target.close()


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    target = load(write_checkpoint(tmp_path / "llama", "llama"))
    with raises(CapabilityError, "its architecture"):
        head_of(target)
    target.close()
    with raises(ModelFileError, "an MTP", code="model_file_not_supported"):
        read_mtp(write_checkpoint(tmp_path / "next", "qwen3_next"))


@pytest.fixture(scope="module", params=NUMBERED)
def numbered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_mtp_layer(tmp_path_factory.mktemp("numbered") / "model", request.param)


@pytest.mark.long
def test_a_layer_of_another_family_is_loaded_as_the_target_loads_its_layers(numbered: Path) -> None:
    from mlx.utils import tree_flatten

    target = load(numbered)
    network: Any = head_of(target).networks[0]
    last: Any = dict(tree_flatten(target._net.layers[-1].parameters()))
    found: Any = dict(tree_flatten(network.layers[0].parameters()))
    assert found.keys() == last.keys()
    for name, weight in last.items():
        np.testing.assert_array_equal(np.array(found[name]), np.array(weight), name)
    stored = load_file(numbered / "mtp.safetensors")
    matrix = next(
        weight for name, weight in stored.items() if "_proj.weight" in name and weight.shape == (64, 128)
    )
    first, second = np.split(np.array(network.fc.weight), 2, axis=1)
    if "mimo" in read_mlx_info(numbered).architecture:
        first, second = second, first
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), matrix)
    target.close()


@pytest.mark.long
@pytest.mark.parametrize("hidden_first", [False, True])
def test_the_order_of_the_inputs_is_found_by_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden_first: bool
) -> None:
    # The layers of this target add nothing, so its next token depends only on the last token. The MTP layer
    # predicts it only if the embedding is multiplied by the half of the matrix that is not zero.
    folder = write_numbered_mtp_layer(tmp_path / "model", "mimo")
    for file in (folder / "model.safetensors", folder / "mtp.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = np.zeros_like(tensor)
            elif name.endswith("input_proj.weight"):
                halves = [np.zeros((64, 64), np.float32), np.eye(64, dtype=np.float32)]
                # MiMo files store the half for the hidden state first.
                tensors[name] = np.concatenate(halves[::-1] if hidden_first else halves, axis=1)
        save_file(tensors, file)
    target, tried = load(folder), []
    agreement = head_view._agreement

    def count_tries(head: Any, *arguments: Any) -> int:
        tried.append(head)
        return agreement(head, *arguments)

    monkeypatch.setattr(head_view, "_agreement", count_tries)
    network: Any = head_of(target).networks[0]
    assert network._hidden_first is hidden_first
    # Two of the four heads predict nothing and are tried once. The other two are equally accurate.
    assert sorted(tried.count(head) for head in {*tried}) == [1, 1, 8, 8]
    target.close()


@pytest.mark.long
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=6), seed=st.integers(0, 1 << 16))
def test_a_layer_of_another_family_follows_its_target(numbered: Path, rounds: list[Round], seed: int) -> None:
    check_history(lambda: load(numbered), head_of, rounds, seed)


@pytest.mark.long
def test_a_layer_of_another_family_changes_no_reply(numbered: Path) -> None:
    check_replies(numbered)


@pytest.mark.long
def test_the_memory_of_a_layer_of_another_family_is_planned(numbered: Path) -> None:
    check_plan(numbered)
