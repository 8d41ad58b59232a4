"""A reply can be cancelled while a worker does not answer."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

import edgespec
from edgespec.backends import mlx
from edgespec.cluster import connected
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import MLX, Library, installed_mlx, parse_machines
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, WorkerLostError
from edgespec.model.base import LoadOptions
from tests.backends.mlx.tiny_checkpoints import TOKENS, write_checkpoint
from tests.cases import first
from tests.cluster.conftest import Worker
from tests.raising import raises

PROMPT = "How do I list files by size, and how do I count the lines of each?"
MAX_SECONDS = 1.0


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Start a worker for most tests in this file, so that each of them also shows that it has recovered."""
    worker = Worker()
    yield worker
    worker.close()


@contextmanager
def cancelled_soon(cancel: Callable[[], None]) -> Iterator[None]:
    """Call `cancel` during the block, and check that the block ends soon afterwards."""
    times: list[float] = []

    def run() -> None:
        times.append(time.monotonic())
        cancel()

    timer = threading.Timer(0.3, run)
    timer.start()
    yield
    timer.join()
    assert time.monotonic() - times[0] < MAX_SECONDS


def frozen_layers(worker: Worker) -> psutil.Process:
    """Suspend the process that runs the layers, which is the most recently started one."""
    children = psutil.Process(worker.process.pid).children()
    layers = max(children, key=lambda process: process.create_time())
    layers.suspend()
    return layers


@pytest.mark.parametrize("target", ["demo", "demo-mlx"])
def test_a_cancelled_reply_keeps_its_text_and_the_model(target: str, worker: Worker) -> None:
    with edgespec.load(target, "none", workers=worker.address, method="none", context=1024) as runtime:
        whole = runtime.generate(PROMPT, max_tokens=20, temperature=0.0)
        stream = runtime.stream(PROMPT, max_tokens=20, temperature=0.0)
        text = "".join(next(stream).text for _ in range(3))
        layers = frozen_layers(worker)
        with cancelled_soon(stream.cancel):
            text += "".join(chunk.text for chunk in stream)
        assert stream.reply.finish_reason == "cancelled"
        assert 0 < len(text) < len(whole.text)
        assert whole.text.startswith(text)
        # The next reply waits for the worker, and can also be cancelled.
        waiting = runtime.stream("Hello", max_tokens=20)
        with cancelled_soon(waiting.cancel):
            assert not waiting.wait().tokens
        layers.resume()
        again = runtime.generate(PROMPT, max_tokens=20, temperature=0.0)
        assert again.tokens == whole.tokens


# `plan` connects as `generate` does.
@pytest.mark.parametrize("arguments", first([("generate", "hello"), ("doctor",), ("plan",)], 2))
def test_ctrl_c_while_connecting_to_a_silent_machine(arguments: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "edgespec", *arguments, "--workers", address]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            client, _ = server.accept()
            with client, cancelled_soon(lambda: process.send_signal(signal.SIGINT)):
                _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"connecting to {address} was cancelled" in errors.decode()


def test_a_worker_that_was_connected_too_late_is_free(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGSTOP)
    calls = 0

    def progress(what: str, _: float) -> bool:
        nonlocal calls
        calls += what == f"connecting to {worker.address}"
        return calls < 3

    with raises(CancelledError, "connecting"):
        edgespec.load("demo", None, workers=worker.address, progress=progress)
    worker.process.send_signal(signal.SIGCONT)
    edgespec.load("demo", None, workers=worker.address, context=1024, method="none").close()


def test_the_measurement_of_the_speed_can_be_cancelled(workers: tuple[Worker, Worker]) -> None:
    """A pass of a large model can take seconds."""
    measured = 0

    def progress(what: str, _: float) -> bool:
        nonlocal measured
        measured += "measuring" in what
        return measured < 3

    with raises(CancelledError, "measurement"):
        edgespec.load("demo", workers=workers[0].address, context=1024, progress=progress)
    assert measured == 3
    # The worker is free again.
    edgespec.load("demo", None, workers=workers[0].address, context=1024, method="none").close()


def test_a_worker_that_stays_frozen_is_lost(
    start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected, "SILENCE_SECONDS", 3.0)
    worker = start_worker()
    with edgespec.load("demo-mlx", "none", workers=worker.address, method="none", context=1024) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=20)
        next(stream)
        frozen_layers(worker)
        with cancelled_soon(stream.cancel):
            assert stream.wait().finish_reason == "cancelled"
        with raises(WorkerLostError, "has not responded"):
            runtime.generate(PROMPT)


@pytest.mark.parametrize("target", ["demo", "demo-mlx"])
def test_a_model_is_closed_while_a_worker_is_frozen(target: str, worker: Worker) -> None:
    with edgespec.load(target, "none", workers=worker.address, method="none", context=1024) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=20)
        next(stream)
        frozen_layers(worker)
        with cancelled_soon(stream.cancel):
            stream.wait()
        began = time.monotonic()
    # The worker ends the process when it is released.
    assert time.monotonic() - began < 4.0


def test_an_abandoned_pass_is_rolled_back(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    """The model has a sliding window, whose caches drop rows in each pass."""
    folder = write_checkpoint(tmp_path / "gemma3", "gemma3", dtype="bfloat16")
    addresses = ",".join(f"{worker.address}=64MiB" for worker in workers)
    connected = ConnectedWorkers(parse_machines("workers", addresses), Library(MLX, installed_mlx()))
    local, remote = (
        mlx.load(str(folder), folder.name, LoadOptions(context_tokens=1024, workers=each))
        for each in (None, connected)
    )
    try:
        for model in (local, remote):
            model.prefill([5] * 300)
        for worker in workers:
            layers = frozen_layers(worker)
            with cancelled_soon(lambda: remote.interrupt(True)), pytest.raises(CancelledError):
                remote.prefill(range(TOKENS))
            layers.resume()
            remote.interrupt(False)
            assert remote.length == local.length
            chain = TokenTree.chain(1, [2, 3, 4])
            every = np.arange(TOKENS)
            rows = [model.verify(chain) for model in (local, remote)]
            for index in range(chain.width):
                np.testing.assert_array_equal(rows[0].at(index, every), rows[1].at(index, every))
            for model in (local, remote):
                model.commit((1,))
    finally:
        local.close()
        remote.close()
