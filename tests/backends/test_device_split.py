"""The weights on GPUs and the experts in main memory, calculated without a GPU."""

from __future__ import annotations

import re
import shutil
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends.llamacpp import devices, head_loading, memory_estimate
from edgespec.backends.llamacpp.devices import (
    Gpu,
    cards,
    device_split,
    expert_bytes,
    expert_shares,
    experts_per_part,
    offloaded_bytes,
    unusable_bytes,
)
from edgespec.backends.llamacpp.eagle import estimate_head
from edgespec.backends.llamacpp.loading import load_skeleton
from edgespec.backends.llamacpp.model import load
from edgespec.backends.llamacpp.native import DeviceProperties, captured_log, ggml, library
from edgespec.backends.llamacpp.weight_layouts import AMX
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import tensor_bytes
from edgespec.store.catalogue import models_folder
from edgespec.store.reference import resolve
from tests.backends.contract import step_all, tokens_for
from tests.backends.tiny_models import write_llama, write_moe
from tests.backends.tiny_mtp_models import write_mtp_model

_LAYERS = 12


def _path() -> str:
    return str(resolve("demo").path)


def test_devices_are_described_as_llama_cpp_describes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU acts as the GPU here, because there may be no other device."""
    monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(devices, "_GPU", 0)
    (found,) = (gpu for gpu in devices.gpus() if gpu.name == "CPU")
    properties = DeviceProperties()
    ggml().ggml_backend_dev_get_props(ggml().ggml_backend_dev_by_type(0), properties)
    assert properties.name == b"CPU"
    assert properties.description == found.description.encode()
    assert properties.memory_total == found.total_bytes
    assert found.pci_address == ""


def test_offloading_all_layers_leaves_the_embedding() -> None:
    device_bytes, share, tied_bytes = device_split(_path(), _LAYERS, None)
    assert share == 1.0
    assert 0 < device_bytes < resolve("demo").path.stat().st_size
    names = {tensor.name for tensor in read_header(resolve("demo").path).tensors}
    assert "token_embd.weight" in names
    assert (tied_bytes > 0) == ("output.weight" not in names)


@pytest.mark.parametrize("layers", range(_LAYERS + 1))
def test_output_and_last_layers_are_offloaded_first(layers: int) -> None:
    device_bytes, share, _ = device_split(_path(), _LAYERS, layers)
    more, larger, _ = device_split(_path(), _LAYERS, layers + 1)
    assert device_bytes < more
    assert share == max(0, layers - 1) / _LAYERS
    assert larger == layers / _LAYERS


def test_nothing_is_offloaded_without_gpu_layers() -> None:
    assert device_split(_path(), 0, None) == (0, 0.0, 0)
    assert device_split(_path(), _LAYERS, 0) == (0, 0.0, 0)
    assert all(card.free_bytes <= card.total_bytes for card in cards())


def test_a_gpu_that_shares_main_memory_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp does not use it either if there is a GPU with dedicated memory."""
    shared = Gpu("Vulkan0", "in the processor", 10, 10, has_own_memory=False)
    own = Gpu("Vulkan1", "card", 20, 20, has_own_memory=True)
    monkeypatch.setattr(devices, "gpus", lambda: (shared, own))
    assert cards() == (own,)
    assert unusable_bytes([5, 5], {"Vulkan1": 3}) == 0


@pytest.mark.parametrize("gpu_layers", [None, 1, 5])
@pytest.mark.parametrize("path", [_path(), [_path()]])
def test_the_sizes_of_offloaded_layers_add_up(path: str | list[str], gpu_layers: int | None) -> None:
    sizes = offloaded_bytes(path, _LAYERS, gpu_layers)
    assert len(sizes) == (gpu_layers or _LAYERS + 1)
    assert min(sizes) > 0
    assert sum(sizes) == device_split(path, _LAYERS, gpu_layers)[0]


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=4),
    st.lists(st.integers(0, 1_000), min_size=1, max_size=40),
    st.integers(0, 500),
)
def test_layers_that_fit_on_several_gpus_together_fit_on_each_of_them(
    free: list[int], layers: list[int], buffer_bytes: int
) -> None:
    found = tuple(Gpu(f"GPU{i}", "card", size, size, has_own_memory=True) for i, size in enumerate(free))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "cards", lambda: found)
        compute = {card.name: buffer_bytes for card in found if card.free_bytes} | {"CPU": 1}
        unusable = unusable_bytes(layers, compute)
    used = [compute.get(card.name, 0) for card in found]
    ends = list(accumulate(free))
    for number, size in enumerate(layers):  # as llama.cpp divides them
        used[min(bisect_right(ends, number * sum(free) / len(layers)), len(free) - 1)] += size
    assert unusable >= 0
    if len(found) == 1:
        assert unusable == 0
    if sum(free) and sum(used) + unusable <= sum(free):
        assert all(size <= room for size, room in zip(used, free, strict=True) if room)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_head_counts_towards_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    monkeypatch.setattr(head_loading, "has_own_memory", lambda: has_gpu)
    head = Head("eagle", models_folder() / "demo-head-q8_0.gguf")
    estimate = estimate_head(head, resolve("demo").path, 512)
    on_gpu = {part.kind for part in estimate.parts if part.pool == "gpu"}
    assert on_gpu == ({"weights", "cache", "compute"} if has_gpu else set())
    assert {part.pool for part in estimate.without_gpu().parts} == {"memory"}
    assert estimate.without_gpu().total_bytes == estimate.total_bytes


def test_layers_that_only_draft_are_not_counted_as_layers_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_estimate, "has_own_memory", lambda: True)
    path = write_mtp_model(tmp_path / "mtp.gguf", "glm4moe")
    sizes = dict(tensor_bytes(path, read_header(path)))
    drafting_bytes = sum(size for name, size in sizes.items() if name.startswith("blk.2."))
    estimator = memory_estimate.GgufMemoryEstimator(str(path), "mtp")
    estimate = estimator.estimate(LoadOptions(context_tokens=512))
    estimator.close()
    weights = {part.pool: part.bytes for part in estimate.parts if part.kind == "weights"}
    # `tensor_bytes` includes the padding after each tensor.
    assert 0 <= sizes["token_embd.weight"] - weights["memory"] < 1024
    assert 0 <= sum(sizes.values()) - drafting_bytes - sum(weights.values()) < 1024
    assert estimate.experts is not None
    assert estimate.experts.layers == 1


def test_llama_cpp_offloads_layers_that_only_draft_before_the_others(tmp_path: Path) -> None:
    path = str(write_mtp_model(tmp_path / "mtp.gguf", "glm4moe"))
    first, second, drafting, output = offloaded_bytes(path, 2, None)
    assert min(first, second, output) > drafting == 0
    for gpu_layers, sizes in enumerate(
        ([output], [drafting, output], [second, drafting, output], [first, second, drafting, output]), 1
    ):
        assert offloaded_bytes(path, 2, gpu_layers) == sizes
        on_gpu = max(0, gpu_layers - 2)
        assert device_split(path, 2, gpu_layers)[:2] == (sum(sizes), on_gpu / 2)
        # Only the second layer has experts.
        shares = expert_shares(path, 2, gpu_layers, 0)
        assert shares.layers - shares.layers_in_memory == min(1, on_gpu)


def test_a_plan_can_offload_all_layers_but_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "has_own_memory", lambda: True)
    path = write_mtp_model(tmp_path / "mtp.gguf", "glm4moe")
    estimator = memory_estimate.GgufMemoryEstimator(str(path), "mtp")
    whole, most = (
        estimator.estimate(LoadOptions(context_tokens=512, gpu_layers=count))
        for count in (estimator.layers + 1, estimator.layers)
    )
    estimator.close()
    assert whole.bytes_of("weights") == most.bytes_of("weights")
    first, *_ = offloaded_bytes(str(path), 2, None)
    on_gpu = [
        sum(part.bytes for part in each.parts if (part.kind, part.pool) == ("weights", "gpu"))
        for each in (whole, most)
    ]
    assert on_gpu[0] - on_gpu[1] == first


@pytest.fixture
def copied_model(tmp_path: Path) -> str:
    """A copy of the model, whose estimates are not shared with other tests."""
    return shutil.copy(_path(), str(tmp_path))


def test_a_model_on_the_cpu_is_planned_without_the_buffers_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, copied_model: str
) -> None:
    """Also without those of a GPU that shares main memory, as when a model runs from disk."""
    monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: True)
    opened: list[int | None] = []

    def record(paths: Any, gpu_layers: int | None, experts: int = 0) -> Any:
        opened.append(gpu_layers)
        return load_skeleton(paths, gpu_layers, experts)

    monkeypatch.setattr(memory_estimate, "load_skeleton", record)
    estimator = memory_estimate.GgufMemoryEstimator(copied_model, "demo")
    for gpu_layers in (None, 0, 0, None):
        estimator.estimate(LoadOptions(context_tokens=512, gpu_layers=gpu_layers))
    estimator.close()
    assert opened == [None, 0, None]


@pytest.mark.parametrize("gpu_layers", [None, 0, 4])
def test_the_plan_counts_the_bytes_that_the_layout_of_amx_adds(
    monkeypatch: pytest.MonkeyPatch, copied_model: str, gpu_layers: int | None
) -> None:
    """This test makes the plan believe that llama.cpp has chosen the layout, which needs a CPU with AMX."""
    monkeypatch.setattr(memory_estimate, "has_own_memory", lambda: gpu_layers is not None)
    options = LoadOptions(context_tokens=512, gpu_layers=gpu_layers)

    def weights(**changed: Any) -> int:
        estimator = memory_estimate.GgufMemoryEstimator(copied_model, "demo")
        estimate = estimator.estimate(replace(options, **changed))
        estimator.close()
        return estimate.bytes_of("weights")

    monkeypatch.setattr(memory_estimate, "named_layouts", lambda _lines: frozenset())
    before = weights()
    monkeypatch.setattr(memory_estimate, "named_layouts", lambda _lines: frozenset({AMX}))
    tensors = read_header(Path(_path())).tensors
    # The output layer is a copy of the token embedding, because AMX's layout cannot look up rows.
    assert not any(tensor.name == "output.weight" for tensor in tensors)
    (embedding,) = (tensor.elements for tensor in tensors if tensor.name == "token_embd.weight")
    added = 0 if gpu_layers else embedding // 32 * (34 + 4)
    for tensor in tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        here = not gpu_layers or (layer is not None and int(layer[1]) < _LAYERS + 1 - gpu_layers)
        if here and tensor.kind == GGMLQuantizationType.Q8_0 and tensor.name != "token_embd.weight":
            added += tensor.elements // 32 * 4
    assert added > 0
    assert weights() == before + added
    assert weights(repack=False) == before


def test_layers_that_only_draft_are_not_placed_on_workers(tmp_path: Path) -> None:
    path = write_mtp_model(tmp_path / "mtp.gguf", "glm4moe")
    weights = load_skeleton(str(path), 0)
    assert len(devices._layer_bytes(str(path))) == library().llama_model_n_layer(weights)
    library().llama_model_free(weights)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, layers=2)
    before = devices._layer_bytes(str(path))
    path.unlink()
    write_llama(path, layers=3)
    assert devices._layer_bytes(str(path)) == [*before, before[0]]


_MOE_LAYERS = 4


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe") / "moe.gguf", layers=_MOE_LAYERS)


def _overridden(lines: list[str]) -> list[tuple[int, str]]:
    """Return the layer and the name of each tensor that llama.cpp moved to main memory."""
    found = (re.search(r"tensor blk\.(\d+)\.(\S+) .*overridden to CPU", line) for line in lines)
    # A model is opened twice if llama.cpp could repack its weights.
    return sorted({(int(match[1]), match[2]) for match in found if match})


def test_the_sizes_of_experts_are_read_from_the_header(moe: Path) -> None:
    tensors = read_header(moe).tensors
    assert list(expert_bytes(str(moe))) == list(range(_MOE_LAYERS))
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


@pytest.mark.parametrize("count", range(_MOE_LAYERS + 2))
def test_llama_cpp_keeps_the_experts_of_the_first_layers_in_main_memory(moe: Path, count: int) -> None:
    expected = [
        (layer, f"ffn_{name}_exps.weight")
        for layer in range(min(count, _MOE_LAYERS))
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


@pytest.mark.parametrize("count", [0, 1, _MOE_LAYERS])
def test_logits_do_not_depend_on_the_number_of_layers(moe: Path, count: int) -> None:
    rows = []
    for experts in (None, count):
        model = load(str(moe), "moe", LoadOptions(context_tokens=256, experts=experts))
        rows.append(step_all(model, tokens_for(model, 30)))
        model.close()
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("gpu_layers", [None, _MOE_LAYERS - 1, 1])
def test_experts_in_main_memory_take_no_memory_on_the_gpu(moe: Path, gpu_layers: int | None) -> None:
    """Layers whose weights are not on the GPU cannot save any GPU memory."""
    size_bytes = expert_bytes(str(moe))[0]
    whole, fraction, tied_bytes = device_split(str(moe), _MOE_LAYERS, gpu_layers)
    kept = _MOE_LAYERS - round(fraction * _MOE_LAYERS)
    for count in range(_MOE_LAYERS + 2):
        moved = max(0, min(count, _MOE_LAYERS) - kept)
        assert device_split(str(moe), _MOE_LAYERS, gpu_layers, count) == (
            whole - moved * size_bytes,
            fraction,
            tied_bytes,
        )
        shares = expert_shares(str(moe), _MOE_LAYERS, gpu_layers, count)
        assert shares.layers == _MOE_LAYERS
        assert shares.layers_in_memory == kept + moved
        assert shares.memory_bytes == (kept + moved) * size_bytes
        assert shares.memory_bytes + shares.gpu_bytes == _MOE_LAYERS * size_bytes


def test_the_layers_of_a_split_model_are_counted_from_its_first_part(moe: Path) -> None:
    parts = [str(moe), [str(moe)]]
    counts = {count: experts_per_part(parts, count) for count in (None, 0, 3, 6, 99)}
    assert counts == {None: [0, 0], 0: [0, 0], 3: [3, 0], 6: [4, 2], 99: [4, 4]}
