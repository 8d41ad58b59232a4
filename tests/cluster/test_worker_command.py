"""`edgespec worker`: its port, its shutdown, and unexpected or vanished connections."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import edgespec
from edgespec.backends.llamacpp.native import library
from edgespec.cli import worker as worker_command
from edgespec.cluster import connected, worker_server
from edgespec.cluster.connected import Link, probe_worker
from edgespec.cluster.machines import (
    LEAD,
    LLAMA_CPP,
    PROBE,
    Device,
    Library,
    Machines,
    SshAddress,
    WorkerAddress,
    WorkerStatus,
    parse_machines,
)
from edgespec.cluster.weight_cache import WeightCache
from edgespec.cluster.worker_server import HELLO, WorkerServer, probe_rpc_server
from edgespec.errors import OptionError, WorkerError
from tests.cases import first as first_only
from tests.cluster.conftest import Worker
from tests.cluster.test_spread_targets import run
from tests.raising import raises


@pytest.mark.long
def test_the_line_that_a_worker_prints(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--memory", "8MiB")
    assert worker.facts["memory_bytes"] == 8 * 2**20
    assert worker.facts["edgespec"] == edgespec.__version__
    assert worker.facts["devices"][0]["free_bytes"] > 0
    status = probe_worker(WorkerAddress("127.0.0.1", worker.port))
    assert status.protocol == worker.facts["protocol"]
    assert not status.busy


@pytest.mark.long
def test_a_worker_says_that_it_cannot_offer_all_memory() -> None:
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "edgespec", "worker", "--listen", "127.0.0.1:0", "--memory", "9TiB"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=its_end) as process,
        open(terminal, "rb") as shown,
    ):
        os.close(its_end)
        assert b"--memory 9.0 TiB is more than this machine has free" in shown.readline()
        assert process.stdin
        process.stdin.close()


@pytest.mark.long
def test_a_worker_ends_with_its_input_and_with_ctrl_c(start_worker: Callable[..., Worker]) -> None:
    first, second = start_worker(), start_worker()
    servers = first.rpc_server, second.rpc_server
    assert first.process.stdin
    first.process.stdin.close()
    assert first.process.wait(20) == 0
    second.process.send_signal(signal.SIGINT)
    assert second.process.wait(20) == 0
    for server in servers:
        server.wait(20)


def test_a_worker_ends_when_the_program_that_started_it_falls_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_command, "STDIN_SILENCE_SECONDS", 0.1)
    read, write = os.pipe()
    is_closed = threading.Event()
    with os.fdopen(read) as stdin, os.fdopen(write, "wb", buffering=0) as sink:
        monkeypatch.setattr(sys, "stdin", stdin)
        worker_command._close_with_stdin(is_closed.set)
        # Programs that never write are never too silent.
        assert not is_closed.wait(0.5)
        sink.write(b"\n")
        assert is_closed.wait(10)


def read_answer(connection: socket.socket, sent: bytes) -> None:
    """Send bytes, and read until the other side closes the connection, which can happen at any time."""
    with suppress(OSError):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def test_a_port_in_use_and_a_public_address_are_errors(workers: tuple[Worker, Worker]) -> None:
    done = run("worker", "--listen", workers[0].address)
    assert done.exit_code == 1
    assert f"{workers[0].address}: Address already in use;" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "address_unavailable"
    done = run("worker", "--listen", "0.0.0.0:0")
    assert done.exit_code == 2
    assert "--i-trust-this-network" in done.stderr


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n", bytes(1000), os.urandom(1000), bytes([HELLO]) + os.urandom(100),
        LEAD[:5], PROBE * 3, b"",
    ],
    ids=list("abcdefg"),
)  # fmt: skip
def test_a_worker_survives_garbage(sent: bytes, workers: tuple[Worker, Worker]) -> None:
    with socket.create_connection(("127.0.0.1", workers[0].port), timeout=10) as connection:
        read_answer(connection, sent)
    assert not probe_worker(WorkerAddress("127.0.0.1", workers[0].port)).busy


def test_garbage_for_the_rpc_server_loses_only_that_connection(workers: tuple[Worker, Worker]) -> None:
    """The RPC server accepts connections while the worker is reserved for a model, and may abort."""
    address = WorkerAddress("127.0.0.1", workers[1].port)
    reserved = Link(address, Library(LLAMA_CPP, workers[1].facts["llama_cpp"]))
    with socket.create_connection(("127.0.0.1", workers[1].port), timeout=10) as connection:
        hello = bytes([HELLO]) + (24).to_bytes(8, "little") + bytes(24)
        read_answer(connection, hello + os.urandom(4000))
    reserved.close()
    Link(address, Library(LLAMA_CPP, workers[1].facts["llama_cpp"])).close()


def test_silent_connections_do_not_keep_a_target_out(workers: tuple[Worker, Worker]) -> None:
    worker = workers[0]
    with ExitStack() as undo:
        silent = [
            undo.enter_context(socket.create_connection(("127.0.0.1", worker.port), timeout=10))
            for _ in range(40)
        ]
        edgespec.load("demo", None, workers=worker.address, context=256, method="none").close()
        # Only the oldest ones were ended.
        assert not silent[0].recv(1)
        silent[-1].sendall(PROBE)
        assert silent[-1].recv(1) == b"{"


def test_a_worker_can_be_reserved_again_at_once(workers: tuple[Worker, Worker]) -> None:
    """If the worker is suspended, it sees the end of one connection and the next request together."""
    worker = workers[1]
    address = WorkerAddress("127.0.0.1", worker.port)
    library = Library(LLAMA_CPP, worker.facts["llama_cpp"])
    for _ in range(2):
        reserved = Link(address, library)
        worker.process.send_signal(signal.SIGSTOP)
        reserved.close()
        resume = threading.Timer(0.2, worker.process.send_signal, [signal.SIGCONT])
        resume.start()
        Link(address, library).close()
        resume.join()


@pytest.fixture
def serve_bytes() -> Iterator[Callable[[bytes], int]]:
    """Start a server that answers the first bytes of each client with fixed bytes, and return its port."""
    servers: list[socket.socket] = []

    def start(answer: bytes) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            try:
                while True:
                    client, _ = server.accept()
                    with client:
                        client.recv(1000)
                        client.sendall(answer)
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for server in servers:
        server.close()


def load(port: int) -> None:
    edgespec.load("demo", None, workers=f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{}\n", b"[" * 70000, b"\xff\n"], ids=list("abcde")
)
def test_another_program_on_the_port_is_an_error(answer: bytes, serve_bytes: Callable[[bytes], int]) -> None:
    port = serve_bytes(answer)
    with raises(WorkerError, port):
        load(port)
    with pytest.raises((ValueError, OSError)):
        probe_rpc_server(port)


def test_another_version_is_an_error(serve_bytes: Callable[[bytes], int]) -> None:
    status = WorkerStatus("0.1.0", "0.2.90", "1.0.0", (Device("CPU", 1 << 30),), 1 << 30)
    with raises(WorkerError, "llama-cpp-python 0.2.90", code="worker_version_mismatch"):
        load(serve_bytes(status.to_line()))


@pytest.mark.parametrize("memory_bytes", first_only([10**4000, -1]))
def test_an_impossible_size_of_memory_is_an_error(
    memory_bytes: int, serve_bytes: Callable[[bytes], int]
) -> None:
    status = WorkerStatus("0.2.0", library().__version__, "7.0.0", (Device("CPU", 1),), memory_bytes)
    done = run("doctor", "--workers", f"127.0.0.1:{serve_bytes(status.to_line())}")
    assert "does not seem to be an edgespec worker" in done.stdout + done.stderr


def test_a_silent_and_an_unreachable_worker_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected, "SILENCE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with raises(WorkerError, "report"):
            load(port)
    with raises(WorkerError, port):
        load(port)


def test_a_list_of_machines() -> None:
    machines = parse_machines(
        "workers", "a.local:1=16GiB, 10.0.0.2:65535,local=2GiB,ssh://mac=1GiB,ssh://me.too@[fe80::1]:22"
    )
    expected = (
        WorkerAddress("a.local", 1, 16 << 30),
        WorkerAddress("10.0.0.2", 65535),
        SshAddress("ssh://mac", 1 << 30),
        SshAddress("ssh://me.too@[fe80::1]:22"),
    )
    assert machines == Machines(expected, 2 << 30)


@pytest.mark.parametrize(
    "text",
    [
        "", "a", "a:0", "a:65536", "a:b", ":1", "[::1]:1", "a:1=", "a:1=0GiB", "a:1,a:1", "local=1GiB",
        "local,a:1", "ssh://", "ssh://-oX", "ssh://-x@a", "ssh://a b", "ssh://a:0", "ssh://a:65536", "ssh://a,ssh://a",
        "ssh://a/b", "a:1,", "a b:1", ",".join(f"a:{i}" for i in range(1, 20)),
    ],
)  # fmt: skip
def test_a_wrong_list_of_machines_is_an_error(text: str) -> None:
    with pytest.raises(OptionError):
        parse_machines("workers", text)


def test_the_weight_cache_deletes_the_oldest_files(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "middle", "old"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    WeightCache(tmp_path, 250).prepare()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["middle", "new"]


_NAMESPACE, _HOST = f"edgespec{os.getpid()}", "10.213.97.1"
_TARGET = """
import socket, sys
from edgespec.cluster.machines import LEAD
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(LEAD)
    while data := connection.recv(4096):
        print(len(data), flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def in_namespace(*command: str) -> list[str]:
    return ["ip", "netns", "exec", _NAMESPACE, *command]


@pytest.fixture
def network() -> Iterator[None]:
    """Create a network of two machines: this one and the namespace `_NAMESPACE`."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs Linux, root and the command `ip`")
    try:
        ip("netns", "add", _NAMESPACE)
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces cannot be created here")
    try:
        ip("link", "add", "edgespec0", "type", "veth", "peer", "name", "edgespec1", "netns", _NAMESPACE)
        ip("addr", "add", f"{_HOST}/30", "dev", "edgespec0")
        ip("link", "set", "edgespec0", "up")
        ip("-n", _NAMESPACE, "addr", "add", "10.213.97.2/30", "dev", "edgespec1")
        ip("-n", _NAMESPACE, "link", "set", "edgespec1", "up")
        yield
    finally:
        subprocess.run(["ip", "link", "delete", "edgespec0"], check=False)
        ip("netns", "delete", _NAMESPACE)


def test_a_worker_is_free_after_its_target_has_vanished(
    network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_UNREACHABLE_SECONDS", 2)
    server = WorkerServer("0.2.0", _HOST, 0, speed={}, note=lambda _: None)
    serving = threading.Thread(target=server.serve)
    serving.start()
    address = WorkerAddress(_HOST, server.port)
    command = in_namespace(sys.executable, "-c", _TARGET, _HOST, str(server.port))
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as target:
            assert target.stdout
            # The worker sends its status just before it becomes busy, and then a byte every second.
            assert all(target.stdout.readline() for _ in range(2))
            assert probe_worker(address).busy
            ip("-n", _NAMESPACE, "link", "set", "edgespec1", "down")
            target.kill()
        end = time.monotonic() + 20
        while probe_worker(address).busy:
            assert time.monotonic() < end
            time.sleep(0.2)
    finally:
        server.close()
        serving.join(20)
