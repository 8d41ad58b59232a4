"""Run a block of layers on a worker: send it the weights once, then the hidden states of each pass.

Each worker has its own connection to the target, so a lost worker shows up as an error on one connection.
Hidden states travel between workers through the target, so a pass takes one round trip per worker. We do not
use an `mlx.distributed` process group here, because the remaining processes cannot join a new group after one
is lost, and the target would have to run in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from edgespec.backends.mlx.absent_layers import AbsentLayer, LastAbsentLayer
from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.layer_messages import (
    JSON_FILES,
    MAX_STATES_BYTES,
    PROTOCOL,
    array_bytes,
    array_header,
    read_array,
)
from edgespec.backends.mlx.layers import LayerList
from edgespec.backends.mlx.model_skeleton import named_arrays
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.layer_child import Buffer, MessageConnection
from edgespec.cluster.link import Link, open_layers
from edgespec.cluster.weight_cache import weight_digest
from edgespec.errors import BackendError, WorkerLostError
from edgespec.model.formats.mlx_files import MAX_JSON_BYTES, weight_files
from edgespec.system.files import read_regular_file

__all__ = ["RemoteBlock", "describe_model", "send_blocks", "send_weights"]

_Result = TypeVar("_Result")
_HALF_TYPES = (mx.float16, mx.bfloat16)
# Weights of at least this size are cached. llama.cpp has the same limit.
_CACHED_BYTES = 10 * 2**20


class RemoteBlock:
    """A block of layers on a worker. A connection error means that the worker is lost.

    Args:
        workers: All workers of the target.
        link: The block's worker.

    Attributes:
        address: The block's worker.
        connection: The connection to it.
        messages: Sends and receives messages over this connection.

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
        """Send a message, and return the header and the data of the answer.

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
        """Return the block's output in a pass. See `RunBlock`."""
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
            raise self._lost("ended, or the connection to it broke") from error

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
        workers: The workers.
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
            # Takes seconds, because the worker first imports MLX.
            answer, _ = block.ask(*describe_model(folder, first, end, kv_bits))
            for index in range(first, end):
                send_weights(block, index, layers.layers[index], widen, answer.get("has_cache") is True)
                present[index] = AbsentLayer(layers.layers[index])
                done += 1
                report(done / total)
            present[end - 1] = LastAbsentLayer(layers.layers[end - 1], block.run)
            block.ask({})
        layers.replace(present)
        undo.pop_all()
    return sent


def describe_model(
    folder: Path, first: int, end: int, kv_bits: int | None, ring_index: int | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return the header and data of the message that tells a worker how to build the model.

    Args:
        folder: The model's folder.
        first: Index of the first layer on the worker.
        end: Index after the last layer on the worker.
        kv_bits: Bits per element in the KV cache, or None if it is not quantised.
        ring_index: Index of the worker in the ring if every layer is sharded, or None if workers hold whole
            layers.
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


def send_weights(block: RemoteBlock, index: int, layer: Any, widen: bool, has_cache: bool) -> None:
    """Send a layer's weights one at a time, and free them.

    Args:
        block: The block that the layer belongs to.
        index: The layer's index.
        layer: The layer.
        widen: Whether to widen 16-bit weights to float32.
        has_cache: Whether the worker has a weight cache.
    """
    from mlx.utils import tree_unflatten

    for name, weight in named_arrays(layer.parameters()):
        sent = weight.astype(mx.float32) if widen and weight.dtype in _HALF_TYPES else weight
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
