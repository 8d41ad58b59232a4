"""Shard every layer of an MLX model across a ring of workers (tensor parallelism).

mlx-lm's models shard their attention heads and feed-forward layers as in Megatron-LM (Shoeybi et al., 2019,
section 3). Each layer then needs two all-reduce operations, which MLX runs over the ring.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from edgespec.backends.mlx.build_info import mlx_core
from edgespec.backends.mlx.layer_block import check_separable
from edgespec.cluster.layer_child import temporary_folder
from edgespec.cluster.machines import parse_address
from edgespec.errors import CapabilityError, EdgespecError, WorkerError
from edgespec.model.formats.mlx_metadata import language_config

__all__ = [
    "JOIN_SECONDS",
    "ShardIndex",
    "check_addresses",
    "check_neighbour",
    "free_address",
    "join_ring",
    "own_address",
    "shard_for_transfer",
    "shard_model",
    "watch_neighbour",
]

# Time limit in seconds for joining a ring. MLX itself tries to connect for 31 seconds.
JOIN_SECONDS = 45
_CONNECT_SECONDS = 5.0
_WATCH_SECONDS = 2.0
_ADVICE = (
    "start all workers with --listen, an address that the other workers can reach, and"
    " --i-trust-this-network, or use --split-mode layer"
)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Selects one shard of a model.

    Takes the place of a process group while mlx-lm shards a model, but does not support passes.
    """

    index: int
    count: int

    def rank(self) -> int:
        """Return the index. mlx-lm calls this."""
        return self.index

    def size(self) -> int:
        """Return the number of shards. mlx-lm calls this."""
        return self.count


def shard_for_transfer(model: Any, config: Mapping[str, Any], name: str, shard: ShardIndex) -> None:
    """Replace each layer of a model with one of its shards. The model's weights must be lazy.

    The shard's weights can then be evaluated and sent to a worker. Passes compute only this shard, so their
    results are meaningless, but their arrays have the same shapes as on the worker.

    Raises:
        CapabilityError: The layers cannot be sharded across this number of workers.
    """
    shard_model(model, config, name, shard)
    # Without environment variables for a ring, this is a group of just this process.
    alone = mlx_core().distributed.init(backend="ring")
    for module in model.modules():
        for attribute, value in vars(module).items():
            if value is shard:
                setattr(module, attribute, alone)
    try:
        check_separable(model, name)
    except CapabilityError:
        raise
    except Exception as error:
        # For example, there may be more workers than KV heads.
        raise _error(name, shard, error) from error
    # Collect the replaced modules and the traced graph, which contain reference cycles. They would otherwise
    # keep whole weights in memory after a shard has been evaluated.
    gc.collect()


def shard_model(model: Any, config: Mapping[str, Any], name: str, group: Any) -> None:
    """Replace each layer of a model with the shard of this process in a process group, or a `ShardIndex`.

    Raises:
        CapabilityError: The layers cannot be sharded across this number of workers.
    """
    divide = getattr(model, "shard", None)
    if divide is None:
        raise _error(name, group, "mlx-lm cannot divide models of its architecture")
    # Check the head counts, because mlx-lm would silently round them down and compute wrong results.
    settings = language_config(dict(config))
    heads = settings.get("num_attention_heads")
    for number, kind in ((heads, "attention"), (settings.get("num_key_value_heads", heads), "key-value")):
        if not isinstance(number, int) or number % group.size():
            raise _error(name, group, f"it has {number} {kind} {'head' if number == 1 else 'heads'}")
    try:
        divide(group)
    except Exception as error:
        raise _error(name, group, error) from error


def _error(name: str, group: Any, reason: object) -> CapabilityError:
    text = " ".join(str(reason).split())
    return CapabilityError(
        f"the layers of {name} cannot be divided among {group.size()} workers: {text}",
        "use --split-mode layer, or another number of workers",
        code="workers_not_supported",
    )


def own_address(connection: socket.socket) -> str:
    """Return the local address of a target's connection, which is this worker's address."""
    host, port = connection.getsockname()
    return f"{host}:{port}"


def free_address(connection: socket.socket) -> str:
    """Return an address with a free port, on the host address that the target used to reach this worker."""
    with socket.create_server((connection.getsockname()[0], 0)) as server:
        return own_address(server)


def check_addresses(workers: Sequence[str]) -> None:
    """Check that no worker would connect to itself at another worker's address, as `own_address` returned it.

    Raises:
        WorkerError: Workers on different machines have the same address, as behind SSH tunnels, or a worker's
            address is reachable only from its own machine.
    """
    if len(set(workers)) < len(workers):
        twice = next(address for address in workers if workers.count(address) > 1)
        raise WorkerError(f"several workers on different machines have the same address, {twice}", _ADVICE)
    loopback = [address for address in workers if address.startswith("127.")]
    here = {each.address for group in psutil.net_if_addrs().values() for each in group}
    remote = [address for address in workers if address.rpartition(":")[0] not in here]
    if loopback and remote:
        raise WorkerError(
            f"the worker {remote[0]} cannot reach the worker {loopback[0]}, which is on another machine",
            _ADVICE,
        )


def check_neighbour(workers: Sequence[str], index: int) -> None:
    """Raise WorkerError if the worker with this index cannot reach the next one in the ring."""
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
        token: A number that the target sent to all workers, to check that they belong to the same ring.

    Raises:
        WorkerError: The workers cannot form a ring.
    """
    with temporary_folder() as folder:
        file = Path(folder) / "ring.json"
        file.write_text(json.dumps([[address] for address in addresses]))
        # MLX can wait forever for the previous worker without running any Python code, so let an alarm kill
        # this process.
        signal.alarm(JOIN_SECONDS)
        # MLX reads this worker's rank and all addresses from these variables.
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
