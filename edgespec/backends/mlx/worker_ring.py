"""The ring of worker processes over which MLX runs its all-reduce operations."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from edgespec.cluster.layer_child import temporary_folder
from edgespec.cluster.machines import parse_address
from edgespec.errors import EdgespecError, WorkerError

__all__ = [
    "JOIN_SECONDS",
    "check_addresses",
    "check_neighbour",
    "free_address",
    "join_ring",
    "own_address",
    "watch_neighbour",
]

# Maximum time to join a ring. MLX tries to connect for 31 seconds.
JOIN_SECONDS = 45
_CONNECT_SECONDS = 5.0
_WATCH_SECONDS = 2.0
_ADVICE = (
    "start all workers with --listen, an address that the other workers can reach, and"
    " --i-trust-this-network, or use --split-mode layer"
)


def own_address(connection: socket.socket) -> str:
    """Return the local address of a target's connection, which is this worker's address."""
    host, port = connection.getsockname()
    return f"{host}:{port}"


def free_address(connection: socket.socket) -> str:
    """Return the host by which the target reached this worker, with a free port."""
    with socket.create_server((connection.getsockname()[0], 0)) as server:
        return own_address(server)


def check_addresses(workers: Sequence[str]) -> None:
    """Check that no worker would connect to itself at another worker's address. Called by the target.

    Args:
        workers: The addresses of all workers, as `own_address` returned them on each worker.

    Raises:
        WorkerError: Workers on different machines have the same address, as behind SSH tunnels, or a worker's
            address is reachable only from its own machine.
    """
    if len(set(workers)) < len(workers):
        twice = next(address for address in workers if workers.count(address) > 1)
        raise WorkerError(f"several workers have the address {twice}, each on its own machine", _ADVICE)
    loopback = [address for address in workers if address.startswith("127.")]
    here = {each.address for group in psutil.net_if_addrs().values() for each in group}
    remote = [address for address in workers if address.rpartition(":")[0] not in here]
    if loopback and remote:
        raise WorkerError(
            f"the worker {remote[0]} cannot reach the worker {loopback[0]}, which is on another machine",
            _ADVICE,
        )


def check_neighbour(workers: Sequence[str], index: int) -> None:
    """Check that the next worker in the ring can be reached.

    Args:
        workers: The addresses of all workers.
        index: The index of this worker.

    Raises:
        WorkerError: The next worker cannot be reached.
    """
    neighbour = workers[(index + 1) % len(workers)]
    try:
        address = parse_address("worker", neighbour, _ADVICE)
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except (OSError, EdgespecError) as error:
        raise WorkerError(
            f"the worker {workers[index]} cannot reach the worker {neighbour}: {error}", _ADVICE
        ) from error


def join_ring(addresses: Sequence[str], index: int, token: int) -> Any:
    """Connect to this worker's neighbours and return the process group. Can be called only once.

    Args:
        addresses: The addresses at which the workers listen for each other.
        index: The index of this worker.
        token: A number that the target sent to all workers, which proves that they belong to the same ring.

    Raises:
        WorkerError: The workers cannot form a ring.
    """
    with temporary_folder() as folder:
        file = Path(folder) / "ring.json"
        file.write_text(json.dumps([[address] for address in addresses]))
        # MLX can wait forever for the previous worker without running any Python code, so let the alarm kill
        # this process.
        signal.alarm(JOIN_SECONDS)
        # MLX reads these variables.
        os.environ.update(MLX_RANK=str(index), MLX_HOSTFILE=str(file))
        try:
            group = mx.distributed.init(strict=True, backend="ring")
            total = mx.distributed.all_sum(mx.array([token]), group=group).item()
        except (RuntimeError, ValueError) as error:
            raise WorkerError(
                f"the worker {addresses[index]} cannot join the ring of workers: {error}", _ADVICE
            ) from error
        finally:
            signal.alarm(0)
    if total != token * len(addresses):
        raise WorkerError("another program has joined the ring of workers", "load the model again")
    return group


def watch_neighbour(workers: Sequence[str], index: int, works: threading.Event) -> None:
    """Exit the process if it is waiting for an unreachable worker. Never returns.

    MLX would wait forever if the network between two workers failed without closing the connection.

    Args:
        workers: The addresses of all workers.
        index: The index of this worker.
        works: Set while this process computes or waits for other workers.
    """
    while True:
        works.wait()
        time.sleep(_WATCH_SECONDS)
        if works.is_set():
            try:
                check_neighbour(workers, index)
            except WorkerError:
                os._exit(1)
