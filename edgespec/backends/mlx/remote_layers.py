"""Run layers on workers: send them the weights once, then the hidden states of each pass.

A worker runs a block of layers, or a shard of every layer (tensor parallelism). Each worker has its own
connection to the target, so a lost worker shows up as an error on one connection.

Hidden states travel between blocks through the target, so a pass takes one round trip per worker. We do not
use an `mlx.distributed` process group for this, because the remaining processes cannot join a new group after
one is lost, and the target would have to run in a process of its own.

With shards, a pass takes one round trip between the target and the workers, plus two all-reduce operations
per layer over the ring of workers.
"""

from __future__ import annotations

import math
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_unflatten

from edgespec.backends.mlx.evaluation import array_bytes, array_header, evaluate, read_array
from edgespec.backends.mlx.layer_block import (
    HALF_TYPES,
    JSON_FILES,
    MAX_STATES_BYTES,
    PROTOCOL,
    AbsentLayer,
    LastAbsentLayer,
)
from edgespec.backends.mlx.layers import LayerList
from edgespec.backends.mlx.model_skeleton import named_arrays, read_skeleton
from edgespec.backends.mlx.tensor_shards import JOIN_SECONDS, ShardIndex, check_addresses, shard_for_transfer
from edgespec.cluster.connected import ConnectedWorkers, Link, open_layers
from edgespec.cluster.layer_child import Buffer, MessageConnection
from edgespec.cluster.weight_cache import weight_digest
from edgespec.errors import BackendError, WorkerLostError
from edgespec.model.base import LoadOptions
from edgespec.model.formats.mlx_files import MAX_JSON_BYTES, weight_files
from edgespec.system.files import read_regular_file

__all__ = ["RemoteBlock", "RemoteShards", "send_blocks", "send_shards"]

_Result = TypeVar("_Result")
# Minimum size in bytes of a weight that workers cache. llama.cpp uses the same limit.
_CACHED_BYTES = 10 * 2**20
_Message = tuple[dict[str, Any], Buffer]
# After a worker reports an error, wait this many seconds for another worker to fail, because that failure may
# be the cause.
_REASON_SECONDS = 2.0
# Seconds between checks for cancellation by the user.
_POLL_SECONDS = 0.2
_MAX_TOKEN = 1 << 24


class RemoteBlock:
    """A block of layers on a worker, and the connection to it. If the connection fails, the worker is lost.

    Raises:
        WorkerError: The worker cannot be reached.
    """

    def __init__(self, workers: ConnectedWorkers, link: Link) -> None:
        self._workers, self.address = workers, link.address
        self.connection = open_layers(link.address)
        self.messages = MessageConnection(self.connection)

    def send(self, header: dict[str, Any], data: Buffer = b"") -> None:
        """Send a message. Raises WorkerLostError if the connection fails."""
        self._workers.call(lambda: self.guarded(lambda: self.messages.send(header, data)))

    def ask(
        self, header: dict[str, Any], data: Buffer = b"", *, is_pass: bool = False
    ) -> tuple[dict[str, Any], Buffer]:
        """Send a message, and return the answer's header and data.

        Raises:
            WorkerLostError: The worker exited, hung or sent an invalid answer.
            BackendError: The worker answered with an error.
            CancelledError: The message started a pass that was interrupted. The answer is discarded when it
                arrives.
        """

        def exchange() -> tuple[dict[str, Any], Buffer]:
            self.messages.send(header, data)
            return self.messages.receive(MAX_STATES_BYTES)

        answer, received = self._workers.call(lambda: self.guarded(exchange), can_abandon=is_pass)
        self.check(answer)
        return answer, received

    def check(self, answer: dict[str, Any]) -> None:
        """Raise BackendError if the header of an answer contains an error."""
        if "error" in answer:
            next_step, code = str(answer.get("next_step", "")), str(answer.get("code", ""))
            raise BackendError(f"the worker {self.address}: {answer['error']}", next_step, code=code)

    def run(self, states: mx.array, offset: int, round_start: int) -> mx.array:
        """Return the block's output for one forward pass. See `RunBlock`."""
        evaluate(states)
        header = {**array_header(states), "offset": offset, "round_start": round_start}
        answer, data = self.ask(header, array_bytes(states), is_pass=True)
        return self.guarded(lambda: read_array(answer, data))

    def guarded(self, work: Callable[[], _Result]) -> _Result:
        """Call `work` and return its result. Raises WorkerLostError if the connection fails."""
        try:
            return work()
        except TimeoutError as error:
            seconds = self.connection.gettimeout()
            raise self._lost(f"has not responded for {seconds:g} seconds") from error
        except (OSError, ValueError) as error:
            raise self._lost("exited, or the connection to it was lost") from error

    def _lost(self, what: str) -> WorkerLostError:
        reason = f"the worker {self.address} {what}"
        self._workers.lose(reason, self.address.restart_advice)
        return WorkerLostError(reason, self.address.restart_advice)

    def close(self) -> None:
        """Close the connection. Repeated calls have no effect."""
        with suppress(OSError):
            self.connection.close()


def send_blocks(
    folder: Path,
    model: Any,
    blocks: Sequence[tuple[int, int]],
    kv_bits: int | None,
    widen: bool,
    workers: ConnectedWorkers,
    report: Callable[[float], None],
) -> list[RemoteBlock]:
    """Load a model's layers on workers, make the model use them, and return the blocks.

    Args:
        folder: The model's folder.
        model: The model, whose weights have not been read yet.
        blocks: For each worker, the index of its first layer and the index after its last layer.
        kv_bits: Bits per element in the KV cache, or None if it is not quantised.
        widen: Whether to widen 16-bit weights to float32.
        workers: The workers to load the layers on.
        report: Called with the completed fraction. Can raise an exception to cancel.

    Raises:
        WorkerError, WorkerLostError: A worker cannot be used, or was lost. The caller closes `workers`.
        BackendError: A worker could not load its layers.
    """
    layers = LayerList(model)
    present, sent = list(layers.layers), []
    total = sum(end - first for first, end in blocks)
    done = 0
    with ExitStack() as undo:
        for link, (first, end) in zip(workers.links, blocks, strict=True):
            if first == end:
                continue
            block = RemoteBlock(workers, link)
            undo.callback(block.close)
            sent.append(block)
            # This takes seconds, because the worker has to import MLX first.
            answer, _ = block.ask(*_describe_model(folder, first, end, kv_bits))
            for index in range(first, end):
                _send_weights(block, index, layers.layers[index], widen, answer.get("has_cache") is True)
                present[index] = AbsentLayer(layers.layers[index])
                done += 1
                report(done / total)
            present[end - 1] = LastAbsentLayer(layers.layers[end - 1], block.run)
            block.ask({})
        layers.replace(present)
        undo.pop_all()
    return sent


def _describe_model(
    folder: Path, first: int, end: int, kv_bits: int | None, ring_index: int | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return the header and data of the message that tells a worker how to build the model.

    If every layer is sharded, `ring_index` is the worker's index in the ring.
    """
    headers, sizes = [], []
    for file in weight_files(folder):
        with file.open("rb") as stream:
            length = stream.read(8)
            headers.append(length + stream.read(int.from_bytes(length, "little")))
        sizes.append((len(headers[-1]), file.stat().st_size))
    present = (name for name in JSON_FILES if (folder / name).exists())
    texts = {name: read_regular_file(folder / name, MAX_JSON_BYTES).decode("utf-8-sig") for name in present}
    header = {
        "protocol": PROTOCOL,
        "json_files": texts,
        "weight_files": sizes,
        "layers": (first, end),
        "kv_bits": kv_bits,
        "ring_index": ring_index,
    }
    return header, b"".join(headers)


def _send_weights(block: RemoteBlock, index: int, layer: Any, widen: bool, has_cache: bool) -> None:
    """Send a layer's weights one at a time, freeing each once it has been sent."""
    for name, weight in named_arrays(layer.parameters()):
        sent = weight.astype(mx.float32) if widen and weight.dtype in HALF_TYPES else weight
        evaluate(sent)
        header, data = {"weight": f"{index}.{name}", **array_header(sent)}, array_bytes(sent)
        if has_cache and len(data) >= _CACHED_BYTES:
            header["digest"] = weight_digest(data)
            if not block.ask(header)[0].get("has_weight"):
                block.ask(header, data)
        else:
            block.send(header, data)
        # Replace the weight rather than deleting it, because mlx-lm still reads the layer's attributes. The
        # new array is never evaluated, so it takes up no memory.
        layer.update(tree_unflatten([(name, mx.zeros(weight.shape, weight.dtype))]))


class RemoteShards:
    """The layers of a target, sharded across all its workers. `blocks` are the shards of each worker.

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
            messages: The header and data of each message.
            waiting: Called several times per second until all workers have answered. Can raise an exception
                to cancel.
            timeout_seconds: Time limit for all workers to answer.

        Raises:
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
                # Other workers may be blocked in this pass, so the ring can no longer be used.
                reason = f"the workers could not finish a computation: {error.what}"
                advice = "load the model again"
                self._workers.lose(reason, advice)
                raise WorkerLostError(reason, advice) from error

        answer = self._workers.call(work, can_abandon=True)
        return self.blocks[0].guarded(lambda: read_array(*answer))

    def close(self) -> None:
        """Close the connections. Repeated calls have no effect."""
        for block in self.blocks:
            block.close()


class _Exchange:
    """Sends a message to each worker, and collects the answers within a time limit."""

    def __init__(
        self, workers: ConnectedWorkers, blocks: Sequence[RemoteBlock], timeout_seconds: float = math.inf
    ) -> None:
        self._workers, self._blocks = workers, blocks
        self._end = time.monotonic() + timeout_seconds
        self._answers: dict[RemoteBlock, _Message] = {}
        # For each worker that has not answered, the seconds that `receive` has waited since that worker's
        # last message, excluding the time spent receiving large answers from other workers.
        self._silence = dict.fromkeys(blocks, 0.0)

    def send(self, messages: Sequence[_Message]) -> None:
        """Send the messages. Raises WorkerLostError if a connection fails."""
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
                # The underlying cause may be the loss of another worker, which takes a moment to detect.
                self._end = min(self._end, time.monotonic() + _REASON_SECONDS)
        self._check_silence()
        return not self._silence or time.monotonic() > self._end

    def _check_silence(self) -> None:
        limit = self._blocks[0].connection.gettimeout() or 0.0
        if max(self._silence.values(), default=0.0) <= limit:
            return
        # While a worker's process joins the ring, MLX blocks all of its threads, so a single hanging worker
        # can make others appear silent too.
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
            raise BackendError(f"{names} did not answer in time", "restart these workers")
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
    """Load a shard of every layer on each worker, and make the model use the shards. See `send_blocks`.

    Raises:
        CapabilityError: The layers cannot be sharded across the workers.
        WorkerError, WorkerLostError: A worker cannot be used, or was lost. The caller closes `workers`.
        BackendError: A worker could not load its layers, or could not reach another worker.
    """
    layers = LayerList(model)
    shards = RemoteShards(workers)
    count, total = len(shards.blocks), len(layers.layers)
    try:
        # This takes seconds, because the workers have to import MLX first.
        descriptions = [
            _describe_model(folder, 0, total, kv_bits, ring_index=index) for index in range(count)
        ]
        answers = [header for header, _ in shards.ask(descriptions, lambda: report(0.0))]
        ring = {key: [str(answer.get(f"{key}_address")) for answer in answers] for key in ("ring", "worker")}
        check_addresses(ring["worker"])
        token = 1 + secrets.randbelow(_MAX_TOKEN)
        shards.ask([({**ring, "token": token}, b"")] * count, lambda: report(0.0), JOIN_SECONDS)
        for index, (block, answer) in enumerate(zip(shards.blocks, answers, strict=True)):
            part = read_skeleton(str(folder), name, LoadOptions())
            shard_for_transfer(part.model, part.config, name, ShardIndex(index, count))
            for number, layer in enumerate(LayerList(part.model).layers):
                _send_weights(block, number, layer, widen, answer.get("has_cache") is True)
                report((index * total + number + 1) / (count * total))
        shards.ask([({}, b"")] * count, lambda: report(1.0))
    except BaseException:
        shards.close()
        raise
    absent = [AbsentLayer(layer) for layer in layers.layers[:-1]]
    layers.replace([*absent, LastAbsentLayer(layers.layers[-1], shards.run)])
    return shards
