"""Fixtures: real workers on this machine, and a proxy that adds delay."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from edgespec.cluster.worker_server import HELLO
from scripts.delayed_connection import forward


class Worker:
    """An `edgespec worker` process."""

    def __init__(self, *options: str, address: str = "127.0.0.1:0") -> None:
        command = [
            sys.executable,
            "-m",
            "edgespec",
            "worker",
            "--listen",
            address,
            "--threads",
            "1",
            *options,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=10)
        self.facts: dict[str, Any] = json.loads(line)
        self.address: str = self.facts["address"]
        self.port: int = self.facts["port"]

    @property
    def rpc_server(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(20)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream
            stream.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*options: str, **settings: str) -> Worker:
        workers.append(Worker(*options, **settings))
        return workers[-1]

    yield start
    for each in workers:
        each.close()


@pytest.fixture(scope="session")
def workers() -> Iterator[tuple[Worker, Worker]]:
    """Two workers for tests that leave them running."""
    pair = Worker(), Worker()
    yield pair
    for each in pair:
        each.close()


@pytest.fixture
def unconnected() -> Iterator[Callable[[int], int]]:
    """Start a proxy for a worker's port that closes all llama.cpp connections, and return its port."""
    servers: list[socket.socket] = []

    def start(port: int) -> int:
        servers.append(socket.create_server(("127.0.0.1", 0)))

        def serve(server: socket.socket) -> None:
            with suppress(OSError):
                while True:
                    client, _ = server.accept()
                    if client.recv(1, socket.MSG_PEEK) == bytes([HELLO]):
                        client.close()
                    else:
                        threading.Thread(target=forward, args=(client, port, 0.0), daemon=True).start()

        threading.Thread(target=serve, args=(servers[-1],), daemon=True).start()
        return int(servers[-1].getsockname()[1])

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.fixture
def delayed() -> Iterator[Callable[[int, float], int]]:
    """Start a proxy that delays each direction of a port, and return the proxy's port."""
    servers: list[socket.socket] = []

    def start(port: int, seconds: float) -> int:
        servers.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=_proxy, args=(servers[-1], port, seconds), daemon=True).start()
        return int(servers[-1].getsockname()[1])

    yield start
    for server in servers:
        # Closing the socket alone does not wake the thread that accepts connections.
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _proxy(server: socket.socket, port: int, seconds: float) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            threading.Thread(target=forward, args=(client, port, seconds), daemon=True).start()
