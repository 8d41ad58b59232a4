"""An MLX target whose layers are split across real workers gives the same tokens as on this machine."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import edgespec
from edgespec.backends.mlx import remote_layers
from edgespec.backends.mlx.tensor_shards import check_addresses, check_neighbour
from edgespec.cluster import connected
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    EdgespecError,
    MemoryBudgetError,
    OptionError,
    WorkerError,
    WorkerLostError,
)
from edgespec.options.load_options import LoadArguments
from tests.backends.mlx.tiny_checkpoints import TOKENS, write_checkpoint
from tests.cluster.conftest import Worker
from tests.cluster.mlx_targets import PROMPT, load_tiny, lose, replies_of, tokens
from tests.raising import raises


def both(workers: tuple[Worker, Worker]) -> str:
    return f"{workers[0].address}=200MiB,{workers[1].address}=200MiB"


@pytest.fixture(scope="module")
def local_tokens() -> list[list[int]]:
    return tokens(None, "none")[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings", "kv_type"),
    [
        ("qwen3", {}, "auto"),
        pytest.param("llama_sliding", {"config": {"head_dim": 32}}, "q8_0", marks=pytest.mark.long),
        pytest.param("llama", {"quantisation": ("affine", 4, 32)}, "auto", marks=pytest.mark.long),
        pytest.param("qwen2", {"dtype": "float16"}, "auto", marks=pytest.mark.long),
        pytest.param("qwen3_moe", {}, "auto", marks=pytest.mark.long),
        pytest.param("gpt_oss", {}, "auto", marks=pytest.mark.long),
        pytest.param("deepseek_v2", {}, "auto", marks=pytest.mark.long),
        pytest.param("deepseek_v3", {}, "auto", marks=pytest.mark.long),
    ],
)
def test_rollbacks_give_nearly_the_same_logits(
    kind: str, settings: dict[str, Any], kv_type: str, workers: tuple[Worker, Worker], tmp_path: Path
) -> None:
    """The workers add up partial sums, so rounding errors differ from those on one machine."""
    folder = write_checkpoint(tmp_path / kind, kind, **settings)
    local = load_tiny(folder, None, kv_type)
    remote = load_tiny(folder, both(workers), kv_type, split_tensors=True)
    every, draw = np.arange(TOKENS), random.Random(1)
    try:
        for _ in range(30):
            if draw.random() < 0.2:
                more = [draw.randrange(TOKENS) for _ in range(draw.randrange(1, 90))]
                local.prefill(more)
                remote.prefill(more)
            elif draw.random() < 0.3:
                length = max(0, local.length - draw.randrange(60))
                local.truncate(length)
                remote.truncate(length)
            chain = TokenTree.chain(1, [draw.randrange(TOKENS) for _ in range(draw.randrange(6))])
            rows = [model.verify(chain) for model in (local, remote)]
            for index in range(chain.width):
                # A quantised cache rounds keys and values in steps larger than the rounding errors.
                np.testing.assert_allclose(
                    rows[0].at(index, every),
                    rows[1].at(index, every),
                    atol=2e-4 if kv_type == "auto" else 0.05,
                )
            kept = tuple(range(1, 1 + draw.randrange(chain.width)))
            local.commit(kept)
            remote.commit(kept)
        assert local.length == remote.length > 200
    finally:
        local.close()
        remote.close()


@pytest.mark.long
def test_four_workers_give_the_same_tokens_with_and_without_drafts(
    start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    config = {"num_key_value_heads": 4, "num_hidden_layers": 3}
    folder = write_checkpoint(tmp_path / "llama", "llama", config=config)
    spread = ",".join(start_worker().address for _ in range(4))
    with edgespec.load(str(folder), None, workers=spread, split_mode="tensor") as runtime:
        replies = [
            runtime.generate(PROMPT, max_tokens=30, seed=3, temperature=0.7, method=method).tokens
            for method in ("none", "ngram")
        ]
    assert replies[0] == replies[1]


def test_two_workers_give_the_same_tokens_and_the_plan_is_that_of_the_loaded_model(
    workers: tuple[Worker, Worker], local_tokens: list[list[int]]
) -> None:
    options: LoadArguments = {
        "workers": both(workers),
        "split_mode": "tensor",
        "context": 1024,
        "method": "model",
    }
    planned = edgespec.plan("demo-mlx", **options)
    with edgespec.load("demo-mlx", **options) as runtime:
        assert replies_of(runtime, "none", "model", "auto") == [local_tokens] * 3
        assert runtime.plan is not None
        assert runtime.plan.machines == planned.plan.machines
        assert runtime.target.weight_bytes == runtime.plan.machines[0].weight_bytes
    assert [share.layers_text for share in planned.plan.machines] == ["0", "1/2 of 12", "1/2 of 12"]
    whole = edgespec.plan("demo-mlx", None, workers=workers[0].address, context=1024).plan.machines[1]
    for share in planned.plan.machines[1:]:
        # Norms are on both workers.
        assert whole.weight_bytes / 2 < share.weight_bytes < whole.weight_bytes * 0.51
        assert share.cache_bytes == whole.cache_bytes // 2


@pytest.mark.long
@pytest.mark.parametrize(
    "losses",
    [
        [("killed process", 1), ("frozen process", 0)],
        pytest.param([("killed process", 0), ("frozen process", 1)], marks=pytest.mark.long),
        pytest.param([("killed worker", 0)], marks=pytest.mark.long),
        pytest.param([("killed worker", 1)], marks=pytest.mark.long),
        pytest.param([("frozen worker", 0)], marks=pytest.mark.long),
        pytest.param([("frozen worker", 1)], marks=pytest.mark.long),
    ],
)
def test_a_lost_worker_is_an_error_that_keeps_the_text(
    losses: list[tuple[str, int]],
    start_worker: Callable[..., Worker],
    local_tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connected, "SILENCE_SECONDS", 3.0)
    pair = start_worker(), start_worker()
    for how, lost in losses:
        lose_one(pair, how, lost, local_tokens[0])


def lose_one(pair: tuple[Worker, Worker], how: str, lost: int, greedy: list[int]) -> None:
    with edgespec.load(
        "demo-mlx", "none", workers=both(pair), split_mode="tensor", method="none", context=1024
    ) as runtime:
        # By the second time, both workers have noticed the first loss, and serve this model.
        assert list(runtime.generate(PROMPT, temperature=0.0, max_tokens=24).tokens) == greedy
        stream = runtime.stream(PROMPT, temperature=0.0, max_tokens=900)
        text = "".join(next(stream).text for _ in range(3))
        began = time.monotonic()
        lose(pair[lost], how)
        with raises(WorkerLostError, pair[lost].address):
            while time.monotonic() - began < 10:
                text += "".join(chunk.text for chunk in stream) + runtime.generate(PROMPT).text
        assert text
        with pytest.raises(WorkerLostError):
            runtime.generate(PROMPT)


@pytest.mark.parametrize(
    ("target", "workers", "code", "message"),
    [
        ("demo", "127.0.0.1:1,127.0.0.1:2", "option_not_supported", "works"),
        ("demo-mlx", "127.0.0.1:1", "option_not_supported", "least two"),
        ("demo-mlx", "127.0.0.1:1,127.0.0.1:2,local=1GiB", "option_not_supported", "local=SIZE"),
        ("demo-mlx", "127.0.0.1:1,ssh://you@mac", "option_not_supported", "ssh://you@mac"),
        ("demo-mlx", None, "option_without_effect", "effect without"),
    ],
)
def test_what_tensor_split_does_not_support_is_refused(
    target: str, workers: str | None, code: str, message: str
) -> None:
    options: LoadArguments = {"workers": workers, "split_mode": "tensor"}
    with raises(OptionError, message, code=code):
        edgespec.load(target, **options)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("gemma2", {}, "mlx-lm cannot divide models of its architecture"),
        ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}, "it has 3 attention heads"),
        ("qwen3", {"num_key_value_heads": 1}, "it has 1 key-value head"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    kind: str, config: dict[str, int], message: str, workers: tuple[Worker, Worker], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / kind, kind, config=config)
    with raises(CapabilityError, message, code="workers_not_supported"):
        edgespec.load(str(folder), None, workers=both(workers), split_mode="tensor")


@pytest.mark.long
def test_the_target_holds_only_a_few_weights_while_it_sends_them(
    workers: tuple[Worker, Worker], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    folder = write_checkpoint(tmp_path / "llama", "llama", config=sizes)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    load_tiny(folder, both(workers), split_tensors=True).close()
    layers_bytes = 12 * 3 * 256 * 1024 * 4
    assert mx.get_peak_memory() - before < layers_bytes / 4


def test_a_part_that_does_not_fit_is_an_error(workers: tuple[Worker, Worker]) -> None:
    spread = f"{workers[0].address}=200MiB,{workers[1].address}=2MiB"
    with raises(MemoryBudgetError, workers[1].address):
        edgespec.load("demo-mlx", None, workers=spread, split_mode="tensor")


def test_workers_that_cannot_reach_each_other_are_an_error(
    workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second worker's address is one at which nothing listens."""
    folder = write_checkpoint(tmp_path / "llama", "llama")
    ask = remote_layers.RemoteShards.ask

    def replace_address(shards: Any, messages: Any, *args: Any) -> Any:
        for header, _ in messages:
            if "worker" in header:
                header["worker"][1] = "127.0.0.1:1"
        return ask(shards, messages, *args)

    monkeypatch.setattr(remote_layers.RemoteShards, "ask", replace_address)
    with raises(BackendError, "127.0.0.1:1", code="worker_unavailable"):
        load_tiny(folder, both(workers), split_tensors=True)


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["127.0.0.1:5", "127.0.0.1:5"], "127.0.0.1:5"),
        (["127.0.0.1:5", "192.0.2.77:5"], "192.0.2.77:5"),
        (["192.0.2.77:5", "192.0.2.78:5"], ""),
        (["127.0.0.1:5", "127.0.0.1:6"], ""),
    ],
)
def test_workers_that_would_find_themselves_are_an_error(addresses: list[str], message: str) -> None:
    expected = raises(WorkerError, message) if message else nullcontext()
    with expected:
        check_addresses(addresses)


def test_garbage_in_the_ring_is_an_error(
    workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that connects before the other worker cannot change the results."""
    folder = write_checkpoint(tmp_path / "llama", "llama")
    ask = remote_layers.RemoteShards.ask

    def intrude(shards: Any, messages: Any, *args: Any) -> Any:
        for header, _ in messages:
            if "ring" in header:
                host, _, port = header["ring"][1].rpartition(":")
                code = (
                    "import socket,time\n"
                    "while True:\n"
                    f" try: c = socket.create_connection(({host!r}, {port}), 1)\n"
                    " except OSError: time.sleep(0.01); continue\n"
                    " c.sendall(bytes(100000)); time.sleep(20)\n"
                )
                intruders.append(subprocess.Popen([sys.executable, "-c", code]))
                break
        return ask(shards, messages, *args)

    intruders: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(remote_layers, "JOIN_SECONDS", 5.0)
    monkeypatch.setattr(remote_layers.RemoteShards, "ask", intrude)
    try:
        with suppress(EdgespecError):
            model = load_tiny(folder, both(workers), split_tensors=True)
            local = load_tiny(folder, None)
            rows = [each.verify(TokenTree.chain(1)).at(0, np.arange(TOKENS)) for each in (local, model)]
            model.close()
            local.close()
            np.testing.assert_allclose(rows[0], rows[1], atol=2e-4)
    finally:
        for each in intruders:
            each.kill()
            each.wait()
    # The workers serve the next target.
    monkeypatch.undo()
    load_tiny(folder, both(workers), split_tensors=True).close()


def test_a_process_that_waits_for_its_neighbour_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        neighbour = f"127.0.0.1:{server.getsockname()[1]}"
        code = (
            "from edgespec.backends.mlx import tensor_shards\n"
            "tensor_shards.JOIN_SECONDS = 2\n"
            f"tensor_shards.join_ring(['127.0.0.1:0', {neighbour!r}], 0, 1)\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode
    assert ended == -signal.SIGALRM


def test_a_process_that_cannot_reach_its_neighbour_ends() -> None:
    code = (
        "import threading\n"
        "from edgespec.backends.mlx.tensor_shards import watch_neighbour\n"
        "works = threading.Event()\n"
        "works.set()\n"
        "watch_neighbour(['127.0.0.1:1', '127.0.0.1:1'], 0, works)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_neighbour(["127.0.0.1:1", f"127.0.0.1:{server.getsockname()[1]}"], 0)
    with raises(WorkerError, "127.0.0.1:2", "127.0.0.1:1"):
        check_neighbour(["127.0.0.1:1", "127.0.0.1:2"], 1)


@pytest.mark.long
def test_a_worker_that_hangs_in_the_ring_can_be_interrupted_and_leaves_no_folders(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(connected, "SILENCE_SECONDS", 4.0)
    pair = start_worker(), start_worker()
    frozen = threading.Event()
    ask = remote_layers.RemoteShards.ask

    def freeze(shards: Any, messages: Any, *args: Any) -> Any:
        if "ring" in messages[0][0]:
            lose(pair[1], "frozen process")
            frozen.set()
        return ask(shards, messages, *args)

    monkeypatch.setattr(remote_layers.RemoteShards, "ask", freeze)
    names = f"{pair[0].address} and {pair[1].address}"
    with raises(WorkerLostError, names):
        edgespec.load("demo-mlx", None, workers=both(pair), split_mode="tensor")
    began: list[float] = []

    def cancel(_what: str, _fraction: float) -> bool:
        if frozen.is_set():
            began.append(time.monotonic())
        return not frozen.is_set()

    frozen.clear()
    with pytest.raises(CancelledError):
        edgespec.load("demo-mlx", None, workers=both(pair), split_mode="tensor", progress=cancel)
    assert time.monotonic() - began[0] < 2
    # The next model waits until the workers have stopped the previous model's processes.
    monkeypatch.undo()
    assert edgespec.plan("demo-mlx", None, workers=both(pair), split_mode="tensor").plan.machines
    assert not list(tmp_path.glob("edgespec-*"))
