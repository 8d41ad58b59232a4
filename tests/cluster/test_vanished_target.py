"""A worker becomes available again after its target's machine has disappeared from the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from edgespec.cluster import worker_server
from edgespec.cluster.link import probe_worker
from edgespec.cluster.machines import WorkerAddress
from edgespec.cluster.worker_server import WorkerServer

_NAMESPACE, _HOST = f"edgespec{os.getpid()}", "10.213.97.1"
_TARGET = """
import socket, sys
from edgespec.cluster.status import LEAD
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
