"""A worker acts as a GPU: experts stay on this machine, and the layers' other weights are on the worker."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec.backends.llamacpp.devices import device_split, expert_bytes
from edgespec.backends.llamacpp.loading import load_files
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.backends.llamacpp.rpc import add_devices
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import LLAMA_CPP, Library, parse_machines
from edgespec.model.base import LoadOptions
from tests.backends.contract import step, step_all, tokens_for
from tests.backends.tiny_models import write_moe
from tests.backends.tiny_mtp_models import write_mtp_model
from tests.cluster.conftest import Worker
from tests.gpu.test_placement import sizes

_LAYERS = 16
_MIB = 2**20


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe") / "moe.gguf", layers=_LAYERS)


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    """The device of a worker, which llama.cpp treats like a GPU."""
    worker = Worker()
    machines = parse_machines("workers", worker.address)
    workers = ConnectedWorkers(machines, Library(LLAMA_CPP, library().__version__))
    yield workers.call(lambda: add_devices(workers))[0][0]
    workers.close()
    worker.close()


def _run(moe: Path, device: Any, experts: int) -> tuple[list[NDArray[np.float64]], dict[str, float]]:
    """Return the logits of a prompt and three steps, and the size of each device's weights in MiB."""
    devices = (ctypes.c_void_p * 2)(device, None)

    def place(params: Any) -> None:
        params.devices = ctypes.cast(devices, ctypes.c_void_p)

    options = LoadOptions(context_tokens=256, experts=experts)
    with captured_log() as lines:
        weights = load_files(str(moe), "moe", options, None, repack=False, place=place)
    model = LlamaCppModel(weights, str(moe), "moe", options)
    tokens = tokens_for(model, 40)
    rows = [step_all(model, tokens[:37]), *(step(model, token) for token in tokens[37:])]
    model.close()
    return rows, sizes(lines, "model")


def _assigned(lines: list[str]) -> list[int]:
    """Return the layers that llama.cpp assigned to a worker when it last opened a model."""
    last = max(i for i, line in enumerate(lines) if "loaded meta data" in line)
    found = (re.search(r"layer +(\d+) assigned to device RPC", line) for line in lines[last:])
    return [int(match[1]) for match in found if match]


@pytest.mark.parametrize("gpu_layers", range(1, 5))
def test_layers_that_only_draft_are_offloaded_before_the_others(
    tmp_path: Path, device: Any, gpu_layers: int
) -> None:
    path = str(write_mtp_model(tmp_path / "mtp.gguf", "glm4moe"))
    devices = (ctypes.c_void_p * 2)(device, None)

    def place(params: Any) -> None:
        params.devices = ctypes.cast(devices, ctypes.c_void_p)

    options = LoadOptions(context_tokens=256, gpu_layers=gpu_layers)
    with captured_log() as lines:
        weights = load_files(path, "mtp", options, None, repack=False, place=place)
    library().llama_model_free(weights)
    # Layer 2 drafts, and llama.cpp counts the output layer as layer 3.
    on_device = [layer for layer in _assigned(lines) if layer < 2]
    assert device_split(path, 2, gpu_layers)[1] == len(on_device) / 2


def test_layers_that_only_draft_move_no_other_layer_to_a_worker(
    tmp_path: Path, workers: tuple[Worker, Worker]
) -> None:
    path = str(write_mtp_model(tmp_path / "mtp.gguf", "glm4moe"))
    spread = f"{workers[0].address}=100MiB,local=100MiB"
    with (
        captured_log() as lines,
        edgespec.load(path, None, workers=spread, context=512, method="none") as runtime,
    ):
        assert runtime.plan is not None
        here, there = runtime.plan.machines
    assert here.layers == there.layers == 1
    assert [layer for layer in _assigned(lines) if layer < 2] == [1]


@pytest.mark.parametrize("count", [1, 7, _LAYERS])
def test_the_chosen_experts_stay_and_replies_are_the_same(moe: Path, device: Any, count: int) -> None:
    rows, whole = _run(moe, device, 0)
    found, placed = _run(moe, device, count)
    assert np.array_equal(found, rows)
    (name,) = (each for each in whole if each.startswith("RPC"))
    moved = sum(list(expert_bytes(str(moe)).values())[:count]) / _MIB
    assert placed[name] == pytest.approx(whole[name] - moved, abs=0.02)
    assert placed["CPU_Mapped"] > moved
