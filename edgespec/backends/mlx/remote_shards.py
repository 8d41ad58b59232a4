"""Run layers that are split across workers (tensor parallelism), as seen from the target.

Each worker holds a shard of every layer. A pass takes one round trip between the target and the workers, plus
two all-reduce operations over the ring of workers per layer.
"""

from __future__ import annotations

import math
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.absent_layers import AbsentLayer, LastAbsentLayer
from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.layer_messages import MAX_STATES_BYTES, array_bytes, array_header, read_array
from edgespec.backends.mlx.layers import LayerList
from edgespec.backends.mlx.model_skeleton import read_skeleton
from edgespec.backends.mlx.remote_block import RemoteBlock, describe_model, send_weights
from edgespec.backends.mlx.tensor_shards import (
    JOIN_SECONDS,
    ShardIndex,
    check_addresses,
    shard_for_transfer,
)
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.layer_child import Buffer
from edgespec.errors import BackendError, WorkerLostError
from edgespec.model.base import LoadOptions

__all__ = ["RemoteShards", "send_shards"]

_Message = tuple[dict[str, Any], Buffer]
# After one worker reports an error, wait this long for another worker to fail, which may be the cause.
_REASON_SECONDS = 2.0
# Time between two checks of whether the user has cancelled.
_POLL_SECONDS = 0.2
_MAX_TOKEN = 1 << 24


class RemoteShards:
    """The layers of a target, sharded across all its workers.

    Args:
        workers: The workers.

    Attributes:
        blocks: Each worker's shards.

    Raises:
        WorkerError: A worker cannot be reached.
    """

    def __init__(self, workers: ConnectedWorkers) -> None:
        self._workers = workers
        self.blocks: list[RemoteBlock] = []
        try:
            for link in workers.links:
                self.blocks.append(RemoteBlock(workers, link))
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        messages: Sequence[_Message],
        waiting: Callable[[], None],
        timeout_seconds: float = math.inf,
    ) -> list[_Message]:
        """Send a message to each worker, and return the answers.

        Args:
            messages: The header and the data of each message.
            waiting: Called several times per second until all workers have answered. Can raise an exception
                to cancel.
            timeout_seconds: Time limit for all workers to answer. Raises:
            WorkerLostError: A worker exited, hung or sent an invalid answer.
            BackendError: A worker answered with an error, or the time limit was exceeded.
        """
        exchange = _Exchange(self._workers, self.blocks, timeout_seconds)
        self._workers.call(lambda: exchange.send(messages))
        while not self._workers.call(exchange.receive):
            waiting()
        return exchange.answers()

    def run(self, states: mx.array, offset: int, round_start: int) -> mx.array:
        """Return the output of all layers in a pass. See `RunBlock`."""
        evaluate(states)
        header = {**array_header(states), "offset": offset, "round_start": round_start}
        message = header, array_bytes(states)

        def work() -> _Message:
            exchange = _Exchange(self._workers, self.blocks)
            try:
                exchange.send([message] * len(self.blocks))
                while not exchange.receive():
                    pass
                return exchange.answers()[0]
            except WorkerLostError:
                raise
            except BackendError as error:
                # Other workers may be blocked in this pass, so the ring is unusable from now on.
                reason, advice = f"the workers could not finish a pass: {error.what}", "load the model again"
                self._workers.lose(reason, advice)
                raise WorkerLostError(reason, advice) from error

        answer = self._workers.call(work, can_abandon=True)
        return self.blocks[0].guarded(lambda: read_array(*answer))

    def close(self) -> None:
        """Close the connections. Repeated calls have no effect."""
        for block in self.blocks:
            block.close()


class _Exchange:
    """Sends a message to each worker, and collects the answers.

    Args:
        workers: The workers.
        blocks: The connection to each worker.
        timeout_seconds: Maximum time until all workers have answered.
    """

    def __init__(
        self, workers: ConnectedWorkers, blocks: Sequence[RemoteBlock], timeout_seconds: float = math.inf
    ) -> None:
        self._workers, self._blocks = workers, blocks
        self._end = time.monotonic() + timeout_seconds
        self._answers: dict[RemoteBlock, _Message] = {}
        # For each worker that has not answered, how long `receive` has waited since its last message,
        # excluding the time to receive large answers from other workers.
        self._silence = dict.fromkeys(blocks, 0.0)

    def send(self, messages: Sequence[_Message]) -> None:
        """Send the messages. Raises WorkerLostError."""
        for block, message in zip(self._blocks, messages, strict=True):
            block.guarded(partial(block.messages.send, *message))

    def receive(self) -> bool:
        """Wait briefly for answers. Return whether all have arrived or the time limit was exceeded.

        The workers wait for each other, so any of them could be the one that hangs.

        Raises:
            WorkerLostError: A worker exited, hung or sent an invalid answer.
        """
        with selectors.DefaultSelector() as selector:
            for block in self._silence:
                selector.register(block.connection, selectors.EVENT_READ, block)
            began = time.monotonic()
            events = selector.select(_POLL_SECONDS)
            waited = time.monotonic() - began
        for block in self._silence:
            self._silence[block] += waited
        for block in [key.data for key, _ in events]:
            self._silence[block] = 0.0
            answer = block.guarded(partial(block.messages.receive_any, MAX_STATES_BYTES))
            if answer is None:
                continue
            self._answers[block] = answer
            del self._silence[block]
            if "error" in answer[0]:
                # The cause may be that another worker was lost, which takes a moment to notice.
                self._end = min(self._end, time.monotonic() + _REASON_SECONDS)
        self._check_silence()
        return not self._silence or time.monotonic() > self._end

    def _check_silence(self) -> None:
        limit = self._blocks[0].connection.gettimeout() or 0.0
        if max(self._silence.values(), default=0.0) <= limit:
            return
        # While a worker's process joins the ring, MLX blocks all of its threads, so a hanging worker can
        # silence others too.
        silent = [block.address for block, seconds in self._silence.items() if seconds > limit / 2]
        names = " and ".join(map(str, silent))
        reason = f"the worker {names} has" if len(silent) == 1 else f"the workers {names} have"
        reason += f" not responded for {limit:g} seconds"
        self._workers.lose(reason, silent[0].restart_advice)
        raise WorkerLostError(reason, silent[0].restart_advice)

    def answers(self) -> list[_Message]:
        """Return the answers. Raises BackendError if one is an error, or if some are missing."""
        for block, (header, _) in self._answers.items():
            block.check(header)
        if self._silence:
            names = ", ".join(str(block.address) for block in self._silence)
            raise BackendError(f"{names} did not answer in time", "start these workers again")
        return [self._answers[block] for block in self._blocks]


def send_shards(
    folder: Path,
    name: str,
    model: Any,
    kv_bits: int | None,
    widen: bool,
    workers: ConnectedWorkers,
    report: Callable[[float], None],
) -> RemoteShards:
    """Load a shard of every layer on each worker, and make the model use the shards.

    Args:
        folder: The model's folder.
        name: The model's name, for messages.
        model: The model, whose weights have not been read yet.
        kv_bits: Bits per element in the KV cache, or None if it is not quantised.
        widen: Whether to widen 16-bit weights to float32.
        workers: The workers.
        report: Called with the completed fraction. Can raise an exception to cancel.

    Raises:
        CapabilityError: The layers cannot be sharded across the workers.
        WorkerError, WorkerLostError: A worker cannot be used, or was lost. The caller closes `workers`.
        BackendError: A worker could not load its layers, or could not reach another worker.
    """
    layers = LayerList(model)
    shards = RemoteShards(workers)
    count, total = len(shards.blocks), len(layers.layers)
    try:
        # This takes seconds, because the workers first import MLX.
        descriptions = [describe_model(folder, 0, total, kv_bits, ring_index=index) for index in range(count)]
        answers = [header for header, _ in shards.ask(descriptions, lambda: report(0.0))]
        ring = {key: [str(answer.get(f"{key}_address")) for answer in answers] for key in ("ring", "worker")}
        check_addresses(ring["worker"])
        token = 1 + secrets.randbelow(_MAX_TOKEN)
        shards.ask([({**ring, "token": token}, b"")] * count, lambda: report(0.0), JOIN_SECONDS)
        for index, (block, answer) in enumerate(zip(shards.blocks, answers, strict=True)):
            part = read_skeleton(str(folder), name, LoadOptions())
            shard_for_transfer(part.model, part.config, name, ShardIndex(index, count))
            for number, layer in enumerate(LayerList(part.model).layers):
                send_weights(block, number, layer, widen, answer.get("has_cache") is True)
                report((index * total + number + 1) / (count * total))
        shards.ask([({}, b"")] * count, lambda: report(1.0))
    except BaseException:
        shards.close()
        raise
    absent = [AbsentLayer(layer) for layer in layers.layers[:-1]]
    layers.replace([*absent, LastAbsentLayer(layers.layers[-1], shards.run)])
    return shards
