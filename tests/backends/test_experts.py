"""The experts of mixture-of-experts models stay in main memory while the other weights are on the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.llamacpp.devices import device_split, expert_bytes, expert_shares, experts_per_part
from edgespec.backends.llamacpp.loading import load_skeleton
from edgespec.backends.llamacpp.model import load
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.model.base import LoadOptions
from edgespec.model.formats.gguf_header import read_header
from tests.backends.contract import step_all, tokens_for
from tests.backends.tiny_models import write_llama, write_moe
from tests.backends.tiny_mtp_models import write_mtp_model

_LAYERS = 4


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe") / "moe.gguf", layers=_LAYERS)


def _overridden(lines: list[str]) -> list[tuple[int, str]]:
    """Return the layer and the name of each tensor that llama.cpp moved to main memory."""
    found = (re.search(r"tensor blk\.(\d+)\.(\S+) .*overridden to CPU", line) for line in lines)
    # A model is opened twice if llama.cpp could repack its weights.
    return sorted({(int(match[1]), match[2]) for match in found if match})


def test_the_sizes_of_experts_are_read_from_the_header(moe: Path) -> None:
    tensors = read_header(moe).tensors
    assert list(expert_bytes(str(moe))) == list(range(_LAYERS))
    values = sum(np.prod(t.shape) for t in tensors if "_exps" in t.name and t.name.startswith("blk.0."))
    assert set(expert_bytes(str(moe)).values()) == {4 * values}


def test_shared_experts_are_not_experts_but_fused_ones_are(tmp_path: Path) -> None:
    paths = [
        write_mtp_model(tmp_path / f"{fused}.gguf", "cohere2moe", mtp_layers=0, fuse_experts=fused)
        for fused in (False, True)
    ]
    assert any("_shexp" in tensor.name for tensor in read_header(paths[0]).tensors)
    assert any("_gate_up_exps" in tensor.name for tensor in read_header(paths[1]).tensors)
    # The first layer has no experts.
    assert [list(expert_bytes(str(path))) for path in paths] == [[1], [1]]
    assert expert_bytes(str(paths[0])) == expert_bytes(str(paths[1]))


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    assert expert_bytes(str(write_llama(tmp_path / "dense.gguf"))) == {}


@pytest.mark.parametrize("count", range(_LAYERS + 2))
def test_llama_cpp_keeps_the_experts_of_the_first_layers_in_main_memory(moe: Path, count: int) -> None:
    expected = [
        (layer, f"ffn_{name}_exps.weight")
        for layer in range(min(count, _LAYERS))
        for name in ("down", "gate", "up")
    ]
    with captured_log() as lines:
        model = load(str(moe), "moe", LoadOptions(context_tokens=256, experts=count))
        model.close()
    assert _overridden(lines) == expected
    # The memory estimate must be made with the same placement.
    with captured_log() as lines:
        library().llama_model_free(load_skeleton(str(moe), None, count))
    assert _overridden(lines) == expected


def test_layers_without_experts_do_not_count(tmp_path: Path) -> None:
    path = write_mtp_model(tmp_path / "m.gguf", "cohere2moe", mtp_layers=0, fuse_experts=True)
    with captured_log() as lines:
        library().llama_model_free(load_skeleton(str(path), None, 1))
    assert _overridden(lines) == [(1, "ffn_down_exps.weight"), (1, "ffn_gate_up_exps.weight")]


@pytest.mark.parametrize("count", [0, 1, _LAYERS])
def test_logits_do_not_depend_on_the_number_of_layers(moe: Path, count: int) -> None:
    rows = []
    for experts in (None, count):
        model = load(str(moe), "moe", LoadOptions(context_tokens=256, experts=experts))
        rows.append(step_all(model, tokens_for(model, 30)))
        model.close()
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("gpu_layers", [None, _LAYERS - 1, 1])
def test_experts_in_main_memory_take_no_memory_on_the_gpu(moe: Path, gpu_layers: int | None) -> None:
    """Layers whose weights are not on the GPU cannot save any GPU memory."""
    size_bytes = expert_bytes(str(moe))[0]
    whole, fraction, tied_bytes = device_split(str(moe), _LAYERS, gpu_layers)
    kept = _LAYERS - round(fraction * _LAYERS)
    for count in range(_LAYERS + 2):
        moved = max(0, min(count, _LAYERS) - kept)
        assert device_split(str(moe), _LAYERS, gpu_layers, count) == (
            whole - moved * size_bytes,
            fraction,
            tied_bytes,
        )
        shares = expert_shares(str(moe), _LAYERS, gpu_layers, count)
        assert shares.layers == _LAYERS
        assert shares.layers_in_memory == kept + moved
        assert shares.memory_bytes == (kept + moved) * size_bytes
        assert shares.memory_bytes + shares.gpu_bytes == _LAYERS * size_bytes


def test_the_layers_of_a_split_model_are_counted_from_its_first_part(moe: Path) -> None:
    parts = [str(moe), [str(moe)]]
    counts = {count: experts_per_part(parts, count) for count in (None, 0, 3, 6, 99)}
    assert counts == {None: [0, 0], 0: [0, 0], 3: [3, 0], 6: [4, 2], 99: [4, 4]}
