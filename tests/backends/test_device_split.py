"""The GPU memory used by offloaded layers, calculated without a GPU."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends.llamacpp import devices, head_loading, memory_estimate
from edgespec.backends.llamacpp.devices import (
    Gpu,
    cards,
    device_split,
    expert_shares,
    offloaded_bytes,
    unusable_bytes,
)
from edgespec.backends.llamacpp.eagle import estimate_head
from edgespec.backends.llamacpp.loading import load_skeleton
from edgespec.backends.llamacpp.native import DeviceProperties, ggml, library
from edgespec.backends.llamacpp.weight_layouts import AMX
from edgespec.model.base import Head, LoadOptions
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import tensor_bytes
from edgespec.store.catalogue import models_folder
from edgespec.store.reference import resolve
from tests.backends.tiny_models import write_llama
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


def test_a_model_on_the_cpu_is_planned_without_the_buffers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without those of a GPU that shares main memory, as when a model runs from disk."""
    monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: True)
    opened: list[int | None] = []

    def record(paths: Any, gpu_layers: int | None, experts: int = 0) -> Any:
        opened.append(gpu_layers)
        return load_skeleton(paths, gpu_layers, experts)

    monkeypatch.setattr(memory_estimate, "load_skeleton", record)
    estimator = memory_estimate.GgufMemoryEstimator(_path(), "demo")
    for gpu_layers in (None, 0, 0, None):
        estimator.estimate(LoadOptions(context_tokens=512, gpu_layers=gpu_layers))
    estimator.close()
    assert opened == [None, 0, None]


@pytest.mark.parametrize("gpu_layers", [None, 0, 4])
def test_the_plan_counts_the_bytes_that_the_layout_of_amx_adds(
    monkeypatch: pytest.MonkeyPatch, gpu_layers: int | None
) -> None:
    """This test makes the plan believe that llama.cpp has chosen the layout, which needs a CPU with AMX."""
    monkeypatch.setattr(memory_estimate, "has_own_memory", lambda: gpu_layers is not None)
    options = LoadOptions(context_tokens=512, gpu_layers=gpu_layers)

    def weights(**changed: Any) -> int:
        estimator = memory_estimate.GgufMemoryEstimator(_path(), "demo")
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
