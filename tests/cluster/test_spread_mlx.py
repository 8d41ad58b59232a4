"""An MLX target on real workers gives the same logits and tokens as on this machine."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.backends.mlx import probe, remote_layers
from edgespec.backends.mlx.remote_layers import RemoteBlock
from edgespec.cluster import connected
from edgespec.cluster.connected import Link, open_layers, probe_worker
from edgespec.cluster.layer_child import Buffer, MessageConnection
from edgespec.cluster.machines import (
    LAYERS,
    LLAMA_CPP,
    Device,
    Library,
    WorkerAddress,
    WorkerStatus,
    installed_mlx,
)
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CapabilityError,
    MemoryBudgetError,
    OptionError,
    WorkerError,
    WorkerLostError,
)
from edgespec.options.load_options import LoadArguments
from tests.backends.mlx.tiny_checkpoints import TOKENS, write_checkpoint
from tests.cases import first
from tests.cluster.conftest import Worker
from tests.cluster.mlx_targets import PROMPT, load_tiny, lose, replies_of, tokens
from tests.raising import raises


@pytest.fixture(scope="module")
def local_tokens() -> list[list[int]]:
    return tokens(None, "none")[0]


def test_one_worker_gives_the_same_tokens(
    workers: tuple[Worker, Worker], local_tokens: list[list[int]]
) -> None:
    """Drafts lead to passes of several widths. The test with several machines also covers plain decoding."""
    assert tokens(workers[0].address, "model") == [local_tokens]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings", "kv_type"),
    [
        ("gemma3", {"dtype": "bfloat16"}, "auto"),
        pytest.param("llama_sliding", {"config": {"head_dim": 32}}, "q8_0", marks=pytest.mark.long),
        pytest.param("gpt_oss", {"quantisation": ("affine", 4, 32)}, "auto", marks=pytest.mark.long),
        pytest.param("deepseek_v3", {"dtype": "float16"}, "auto", marks=pytest.mark.long),
    ],
)
def test_rollbacks_give_the_same_logits(
    kind: str, settings: dict[str, Any], kv_type: str, workers: tuple[Worker, Worker], tmp_path: Path
) -> None:
    """Sliding windows drop rows, so all machines must drop the same ones."""
    folder = write_checkpoint(tmp_path / kind, kind, **settings)
    spread = f"{workers[0].address}=64MiB,{workers[1].address}=64MiB"
    local, remote = load_tiny(folder, None, kv_type), load_tiny(folder, spread, kv_type)
    try:
        draw = random.Random(1)
        for _ in range(40):
            change = draw.random()
            if change < 0.15:
                more = [draw.randrange(TOKENS) for _ in range(draw.randrange(1, 100))]
                if len(more) <= local.free_tokens:
                    local.prefill(more)
                    remote.prefill(more)
            elif change < 0.3:
                length = max(0, local.length - draw.randrange(60))
                local.truncate(length)
                remote.truncate(length)
            assert local.length == remote.length
            chain = TokenTree.chain(1, [draw.randrange(TOKENS) for _ in range(draw.randrange(6))])
            if chain.width > local.free_tokens:
                continue
            every = np.arange(local.facts.vocab_size)
            rows = [model.verify(chain) for model in (local, remote)]
            for index in range(chain.width):
                np.testing.assert_array_equal(rows[0].at(index, every), rows[1].at(index, every))
            kept = tuple(range(1, 1 + draw.randrange(chain.width)))
            local.commit(kept)
            remote.commit(kept)
        assert local.length > 300
    finally:
        local.close()
        remote.close()


@pytest.mark.parametrize("kind", ["mamba2", "llama4"])
def test_layers_that_cannot_be_separated_are_refused(
    kind: str, workers: tuple[Worker, Worker], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / kind, kind)
    with raises(CapabilityError, "run on", code="workers_not_supported"):
        edgespec.load(str(folder), None, workers=workers[0].address)


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        "killed process",
        pytest.param("frozen process", marks=pytest.mark.long),
        pytest.param("killed worker", marks=pytest.mark.long),
        pytest.param("frozen worker", marks=pytest.mark.long),
    ],
)
def test_a_lost_worker_is_an_error_that_keeps_the_text(
    how: str,
    start_worker: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
    local_tokens: list[list[int]],
) -> None:
    monkeypatch.setattr(connected, "SILENCE_SECONDS", 3.0)
    worker = start_worker()
    with edgespec.load("demo-mlx", "none", workers=worker.address, method="none", context=1024) as runtime:
        stream = runtime.stream(PROMPT, temperature=0.0, max_tokens=900)
        text = "".join(next(stream).text for _ in range(3))
        began = time.monotonic()
        lose(worker, how)
        # While a worker is frozen, its other process keeps running the layers until the silence is noticed.
        with raises(WorkerLostError, worker.address):
            while time.monotonic() - began < 10:
                text += "".join(chunk.text for chunk in stream) + runtime.generate(PROMPT).text
        assert text
        with pytest.raises(WorkerLostError):
            runtime.generate(PROMPT)
    if how == "killed worker":
        # The same process can use a new worker at the same address.
        start_worker(address=worker.address)
        assert tokens(worker.address, "none") == [local_tokens]


@pytest.fixture
def reserved(workers: tuple[Worker, Worker]) -> Iterator[WorkerAddress]:
    address = WorkerAddress("127.0.0.1", workers[1].port)
    leader = Link(address, Library(LLAMA_CPP, workers[1].facts["llama_cpp"]))
    yield address
    leader.close()


def test_a_worker_that_is_not_reserved_runs_no_layers(workers: tuple[Worker, Worker]) -> None:
    with socket.create_connection(("127.0.0.1", workers[1].port), timeout=10) as connection:
        connection.sendall(LAYERS)
        assert not connection.recv(1)


def test_a_worker_runs_the_layers_of_one_target(reserved: WorkerAddress) -> None:
    with open_layers(reserved) as first, open_layers(reserved) as second:
        # The process sends an empty message when it starts. One of the connections is rejected.
        assert sorted(len(each.recv(1)) for each in (first, second)) == [0, 1]


HEADER = {"protocol": 1, "json_files": {}, "weight_files": [], "layers": [0, 1], "kv_bits": None}


@pytest.mark.parametrize(
    "sent",
    first(
        [
            (70000).to_bytes(4, "little") + bytes(8) + b"[" * 70000,
            (2).to_bytes(4, "little") + (1 << 62).to_bytes(8, "little") + b"{}",
            (1 << 31).to_bytes(4, "little") + bytes(8),
            os.urandom(1000),
            b"",
        ],
        2,
    ),
    ids=list("abcde"),
)
def test_garbage_ends_only_the_process_that_runs_layers(sent: bytes, reserved: WorkerAddress) -> None:
    with open_layers(reserved) as connection:
        connection.settimeout(20)
        with suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert probe_worker(reserved).busy


@pytest.mark.parametrize(
    "header",
    first(
        [
            {**HEADER, "json_files": {"config.json": '{"model_type": "llama", "model_file": "x.py"}'}},
            {**HEADER, "weight_files": [[1 << 40, -1]]},
            {**HEADER, "protocol": 0},
            {},
        ],
        2,
    ),
    ids=list("abcd"),
)
def test_a_wrong_description_of_a_model_is_answered_with_an_error(
    header: dict[str, Any], reserved: WorkerAddress
) -> None:
    with open_layers(reserved) as connection:
        messages = MessageConnection(connection)
        messages.send(header)
        assert messages.receive(0)[0]["error"]


def test_several_machines_give_the_same_tokens_and_the_plan_is_that_of_the_loaded_model(
    workers: tuple[Worker, Worker], local_tokens: list[list[int]]
) -> None:
    spread = f"{workers[0].address}=200MiB,local=100MiB,{workers[1].address}=300MiB"
    options: LoadArguments = {"workers": spread, "context": 1024, "method": "model"}
    planned = edgespec.plan("demo-mlx", **options)
    with edgespec.load("demo-mlx", **options) as runtime:
        assert replies_of(runtime, "none", "model", "auto") == [local_tokens] * 3
        assert runtime.plan is not None
        here, *others = runtime.plan.machines
        assert (here, *others) == planned.plan.machines
        assert runtime.target.weight_bytes == here.weight_bytes
        assert not runtime.target.capabilities.tree
    assert [share.layers for share in (here, *others)] == [2, 4, 6]
    whole = edgespec.plan("demo-mlx", None, context=1024).plan
    for kind, sizes in (
        ("weights", [share.weight_bytes for share in (here, *others)]),
        ("cache", [share.cache_bytes for share in (here, *others)]),
    ):
        assert sum(sizes) == sum(item.bytes for item in whole.items if item.kind == kind)
    assert planned.spread is not None
    assert planned.spread.tokens_per_second is None
    assert len(planned.spread.links) == 2


def test_a_cached_weight_is_not_sent_again(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote_layers, "_CACHED_BYTES", 1 << 12)
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    folder = write_checkpoint(tmp_path / "llama", "llama")
    worker = start_worker("--cache", "1GiB")
    sent: list[int] = []
    ask = RemoteBlock.ask

    def count(
        block: RemoteBlock, header: dict[str, Any], data: Buffer = b"", *, is_pass: bool = False
    ) -> tuple[dict[str, Any], Buffer]:
        sent[-1] += len(data) * ("digest" in header)
        return ask(block, header, data, is_pass=is_pass)

    monkeypatch.setattr(RemoteBlock, "ask", count)
    rows = []
    for _ in range(3):
        sent.append(0)
        model = load_tiny(folder, worker.address)
        rows.append(model.verify(TokenTree.chain(1)).at(0, np.arange(TOKENS)))
        model.close()
        if len(sent) == 2:
            # A damaged file is sent again.
            damaged = min((tmp_path / "workers").iterdir())
            size = damaged.stat().st_size
            damaged.write_bytes(bytes(size))
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])
    assert sent[0] > 100_000
    assert sent[1:] == [0, size]


def test_too_little_memory_is_an_error(workers: tuple[Worker, Worker]) -> None:
    with raises(MemoryBudgetError, "2.0 MiB"):
        edgespec.load("demo-mlx", None, workers=f"{workers[0].address}=2MiB")


def test_a_worker_without_mlx_is_an_error() -> None:
    status = WorkerStatus("0.2.0", "0.3.36", "1.0.0", (Device("CPU", 1 << 30),), 1 << 30)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1000)
                client.sendall(status.to_line())

        threading.Thread(target=answer, daemon=True).start()
        with raises(WorkerError, "no mlx-lm", code="worker_version_mismatch"):
            edgespec.load("demo-mlx", None, workers=f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("header", "error"),
    [({}, WorkerLostError), ({"error": [1]}, BackendError), ({"has_cache": 3}, WorkerLostError)],
)
def test_a_wrong_answer_of_a_worker_is_an_error(
    header: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "llama", "llama")
    status = WorkerStatus(
        "0.2.0", "0.3.36", "1.0.0", (Device("CPU", 1 << 30),), 1 << 30, mlx_lm=installed_mlx()
    )
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            leader, _ = server.accept()
            leader.recv(1000)
            leader.sendall(status.to_line())
            layers, _ = server.accept()
            layers.recv(len(LAYERS))
            messages = MessageConnection(layers)
            messages.receive(1 << 20)
            messages.send(header)
            layers.close()
            leader.recv(1)
            leader.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(error, match="the worker 127.0.0.1:"):
            load_tiny(folder, f"127.0.0.1:{server.getsockname()[1]}=64MiB")


def test_a_worker_that_is_lost_while_the_model_is_tested_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lose_worker(*_: object) -> None:
        raise WorkerLostError("the worker ended")

    folder = write_checkpoint(tmp_path / "llama", "llama")
    monkeypatch.setattr(probe, "_step", lose_worker)
    with pytest.raises(WorkerLostError):
        load_tiny(folder, None)


@pytest.mark.parametrize(
    "options", [{"method": "lowbit"}, {"method": "mtp"}, {"parallel": 2}, {"adapter": ("x",)}]
)
def test_options_that_workers_do_not_support_are_refused(options: LoadArguments) -> None:
    options["workers"] = "127.0.0.1:1"
    with raises(OptionError, "--workers yet", code="option_not_supported"):
        edgespec.load("demo-mlx", **options)
