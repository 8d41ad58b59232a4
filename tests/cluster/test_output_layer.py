"""The output layer is on the machine that computes it faster, with the same logits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.backends.llamacpp.remote_model import load_on_workers
from edgespec.cluster import connected
from edgespec.cluster.connected import ConnectedWorkers, LinkSpeed, measure_link
from edgespec.cluster.machines import LLAMA_CPP, Library, WorkerAddress, parse_machines
from edgespec.engine.tree import TokenTree
from edgespec.loading.workers import _saves_time
from edgespec.methods.costs import machine_speed
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.machine_speed import MachineSpeed, TypeSpeed
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import OutputLayer
from edgespec.model.registry import format_of
from edgespec.options.load_options import LoadArguments
from tests.cases import first
from tests.cluster.conftest import Worker
from tests.cluster.test_spread_targets import PROMPT, run, write_f16

_GIGABIT = 1e9 / 8
_MEBIBYTE = 2**20
_WIDTHS = (1, 2, 5, 9)


def speed_of(seconds_per_byte: float) -> MachineSpeed:
    return MachineSpeed({"Q8_0": TypeSpeed(CostCurve((1,), (seconds_per_byte,)), seconds_per_byte)}, 1e-5)


SLOW, FAST = speed_of(1e-7), speed_of(1e-10)


def set_speed(patch: pytest.MonkeyPatch, folder: Path, speed: MachineSpeed) -> None:
    """Save this machine's speed in another cache folder, as `edgespec recommend` does."""
    patch.setenv("EDGESPEC_CACHE_DIR", str(folder))
    machine_speed.save_machine_speed(format_of("gguf"), speed)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start two workers on machines that were measured as fast, and return the value of `--workers`."""
    with pytest.MonkeyPatch.context() as patch:
        set_speed(patch, tmp_path_factory.mktemp("fast"), FAST)
        pair = Worker(), Worker()
    yield ",".join(f"{worker.address}=200MiB" for worker in pair)
    for each in pair:
        each.close()


@pytest.fixture(scope="module")
def untied(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("untied") / "untied.gguf"
    write_untied(demo_target, file)
    return file


def write_untied(source: Path, file: Path, more_tokens: int = 0) -> None:
    """Write a model with its token embedding stored a second time, as the output layer.

    `more_tokens` unused tokens are added to the vocabulary.
    """
    reader = gguf.GGUFReader(source)
    more: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"<unused{i}>" for i in range(more_tokens)],
        "tokenizer.ggml.token_type": [gguf.TokenType.UNUSED] * more_tokens,
        "tokenizer.ggml.scores": [0.0] * more_tokens,
    }
    writer = gguf.GGUFWriter(file, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            value = field.contents()
            if key in more:
                value += more[key]
            elif key == "llama.vocab_size":
                value += more_tokens
            writer.add_key_value(key, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if tensor.name != "token_embd.weight":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        data = np.concatenate((tensor.data, np.zeros((more_tokens, tensor.data.shape[1]), np.uint8)))
        for name in (tensor.name, "output.weight"):
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("here", "there", "gigabits", "expected"),
    [
        # A weak laptop takes 20 ms for 0.9 GB, and a fast graphics card 1 ms.
        (20e-3, 1e-3, 10, True),
        (20e-3, 1e-3, 1, False),
        (60e-3, 1e-3, 1, True),
        (1e-3, 20e-3, 100, False),
        (5e-3, 5e-3, 100, False),
    ],
)
def test_the_faster_machine_is_chosen(here: float, there: float, gigabits: float, expected: bool) -> None:
    output = OutputLayer("Q8_0", 900_000_000, 8192, 128256)
    speed_here, speed_there = (speed_of(seconds / output.size_bytes) for seconds in (here, there))
    assert _saves_time(output, speed_here, speed_there, gigabits * _GIGABIT) is expected


@pytest.mark.long
def test_replies_are_the_same_on_both_machines(
    fast: str, untied: Path, demo_draft: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[bool, list[tuple[int, ...]]] = {}
    for speed in (SLOW, FAST):
        set_speed(monkeypatch, tmp_path / str(speed is SLOW), speed)
        with edgespec.load(str(untied), str(demo_draft), workers=fast, context=1024) as runtime:
            assert runtime.plan is not None
            assert [share.has_output for share in runtime.plan.machines] == (
                [False, False, True] if speed is SLOW else [True, False, False]
            )
            replies = {
                (method, heat): runtime.generate(
                    PROMPT, method=method, temperature=heat, seed=3, max_tokens=24
                )
                for method in ("none", "model", "auto")
                for heat in (0.0, 0.8)
            }
        assert all(reply.tokens == replies["none", heat].tokens for (_, heat), reply in replies.items())
        assert all(replies["model", heat].stats.accepted_tokens for heat in (0.0, 0.8))
        found[speed is SLOW] = [tuple(replies["none", heat].tokens) for heat in (0.0, 0.8)]
    assert found[True] == found[False]


def buffers(lines: list[str], kind: str) -> dict[str, float]:
    """Return the latest size in bytes of each machine's buffer of a kind, from llama.cpp's log."""
    sizes = {}
    for line in lines:
        if match := re.search(rf"(CPU\S*|:0*(\d+)\]) +{kind} buffer size = +([\d.]+) MiB", line):
            sizes[match[2] or "this machine"] = float(match[3]) * _MEBIBYTE
    return sizes


@pytest.mark.long
@pytest.mark.parametrize("speed", [SLOW, FAST], ids=["on the worker", "here"])
def test_each_machine_uses_the_planned_memory(
    speed: MachineSpeed, fast: str, demo_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The logits of a large vocabulary need more memory than the rest of the compute buffer.
    write_untied(demo_target, file := tmp_path / "untied.gguf", more_tokens=30_000)
    set_speed(monkeypatch, tmp_path, speed)
    # llama.cpp's log would also count unused parts of a mapped file.
    options: LoadArguments = {"workers": f"{fast},local=100MiB", "context": 1024, "mmap": False}
    planned = edgespec.plan(str(file), None, **options).plan.machines
    with captured_log() as lines, edgespec.load(str(file), None, **options) as runtime:
        assert runtime.plan is not None
        assert runtime.plan.machines == planned
    weights, cache, compute = (buffers(lines, kind) for kind in ("model", "KV", "compute"))
    for share in planned:
        machine = share.name.rpartition(":")[2]
        # llama.cpp logs sizes in units of 0.01 MiB.
        assert weights[machine] == pytest.approx(share.weight_bytes, abs=0.01 * _MEBIBYTE)
        assert cache[machine] == pytest.approx(share.cache_bytes, abs=0.01 * _MEBIBYTE)
        assert 0 <= share.compute_bytes - compute[machine] < 3 * _MEBIBYTE
    # Only the machine that computes the logits needs memory for them.
    assert [share.compute_bytes > 25 * _MEBIBYTE for share in planned] == [
        share.has_output for share in planned
    ]
    whole = edgespec.plan(str(file), None, context=1024).plan
    total = sum(item.bytes for item in whole.items if item.kind == "weights")
    assert sum(share.weight_bytes for share in planned) == total


def has_output(target: Path | str, workers: str, **options: Any) -> list[bool]:
    preview = edgespec.plan(str(target), None, workers=workers, context=1024, **options)
    return [share.has_output for share in preview.plan.machines]


@pytest.mark.long
def test_without_room_on_the_worker_it_stays_here(
    fast: str, untied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_speed(monkeypatch, tmp_path, SLOW)
    only = fast.partition("=")[0]
    (_, share) = edgespec.plan(str(untied), None, workers=f"{only}=200MiB", context=1024).plan.machines
    assert share.has_output
    enough = share.total_bytes // 1024 + 1
    assert has_output(untied, f"{only}={enough}KiB") == [False, True]
    assert has_output(untied, f"{only}={enough - 1024}KiB") == [True, False]


@pytest.mark.long
def test_shared_weights_heads_and_unmeasured_machines_keep_it_here(
    fast: str,
    untied: Path,
    workers: tuple[Worker, Worker],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "unmeasured"))
    assert has_output(untied, fast)[0]
    set_speed(monkeypatch, tmp_path, SLOW)
    assert not has_output(untied, fast)[0]
    assert has_output(untied, workers[0].address)[0]
    # The demo model computes logits with its token embedding.
    assert has_output("demo", fast)[0]
    assert has_output(untied, fast, head="demo-head", method="eagle")[0]


def test_the_plan_shows_and_times_the_output_layer(
    fast: str, untied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_speed(monkeypatch, tmp_path, SLOW)
    options = ("--target", str(untied), "--draft", "none", "--workers", fast, "--context", "1024")
    assert re.search(r"^127\.0\.0\.1:\d+ +\d+ \+ output ", run("plan", *options).stdout, re.MULTILINE)
    report = json.loads(run("plan", *options, "--json").stdout)
    assert [machine["output_layer"] for machine in report["machines"]] == [False, False, True]
    # On this machine, the output layer alone would take 0.2 s per token.
    assert report["workers"]["tokens_per_second"] > 50
    last = report["machines"][2]["name"]
    others = [speed for name, speed in report["workers"]["alone_tokens_per_second"].items() if name != last]
    assert report["workers"]["alone_tokens_per_second"][last] > 50 > 10 > max(others)


def test_each_connection_is_measured_once(
    fast: str, untied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_speed(monkeypatch, tmp_path, SLOW)
    measured: list[str] = []

    def measure(address: WorkerAddress) -> LinkSpeed:
        measured.append(str(address))
        return measure_link(address)

    monkeypatch.setattr(connected, "measure_link", measure)
    preview = edgespec.plan(str(untied), None, workers=fast, context=1024)
    assert sorted(measured) == sorted(share.name for share in preview.plan.machines[1:])


def logits(file: Path, workers: str, *, on_worker: bool) -> list[NDArray[np.float64]]:
    """Return the logits of passes of several widths."""
    reserved = ConnectedWorkers(parse_machines("workers", workers), Library(LLAMA_CPP, library().__version__))
    options = LoadOptions(context_tokens=512, workers=reserved, output_on_worker=on_worker)
    model = load_on_workers(str(file), "untied", options, reserved, None)
    try:
        model.prefill(list(range(300, 340)))
        found: list[NDArray[np.float64]] = []
        for width in _WIDTHS:
            rows = model.verify(TokenTree.chain(400, range(401, 400 + width)))
            found += [rows.at(row, np.arange(model.vocabulary.size)) for row in range(width)]
        return found
    finally:
        model.close()


@pytest.mark.parametrize("kind", first(["Q8_0", "F16"]))
def test_logits_are_bit_identical(kind: str, fast: str, untied: Path, tmp_path: Path) -> None:
    file = untied
    if kind == "F16":
        file = tmp_path / "f16.gguf"
        write_f16(untied, file)
    here = logits(file, fast, on_worker=False)
    there = logits(file, fast, on_worker=True)
    assert len(here) == sum(_WIDTHS)
    assert all(map(np.array_equal, here, there))
