"""The GPU memory that offloaded layers take, calculated without a GPU."""

from __future__ import annotations

import pytest

from edgespec.backends.llamacpp import head_loading
from edgespec.backends.llamacpp.devices import cards, device_split
from edgespec.backends.llamacpp.eagle import estimate_head
from edgespec.model.base import Head
from edgespec.model.formats.gguf_header import read_header
from edgespec.store.catalogue import models_folder
from edgespec.store.reference import resolve

_LAYERS = 12


def _path() -> str:
    return str(resolve("demo").path)


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


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_head_counts_towards_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    monkeypatch.setattr(head_loading, "has_own_memory", lambda: has_gpu)
    head = Head("eagle", models_folder() / "demo-head-q8_0.gguf")
    estimate = estimate_head(head, resolve("demo").path, 512)
    on_gpu = {part.kind for part in estimate.parts if part.pool == "gpu"}
    assert on_gpu == ({"weights", "cache", "compute"} if has_gpu else set())
    assert {part.pool for part in estimate.without_gpu().parts} == {"memory"}
    assert estimate.without_gpu().total_bytes == estimate.total_bytes
