"""Child process of `edgespec worker` that runs a block of an MLX target's layers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cluster.layer_child import Buffer, MessageConnection, remove_folders
from edgespec.cluster.weight_cache import read_weight, write_weight
from edgespec.errors import BackendError, EdgespecError, WorkerError

if TYPE_CHECKING:
    from edgespec.backends.mlx.layer_block import LayerBlock
    from edgespec.backends.mlx.model_skeleton import ModelSkeleton

__all__ = ["main"]

_BEAT_SECONDS = 1.0


def main() -> None:
    """Read options from stdin, and serve the target until it closes the connection or stdin is closed."""
    options = json.loads(sys.stdin.buffer.readline())
    # Discard anything that libraries print to stdout, because nobody reads it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cache = options["cache"] and Path(options["cache"])
    server = _LayerServer(socket.socket(fileno=options["connection"]), options["memory_bytes"], cache)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=server.beat, daemon=True).start()
    with contextlib.suppress(OSError):
        server.serve()
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    remove_folders(os.getpid())
    os._exit(0)


class _LayerServer:
    def __init__(self, connection: socket.socket, memory_bytes: int, cache: Path | None) -> None:
        self._connection, self._messages = connection, MessageConnection(connection)
        self._is_in_ring, self._sends_output = False, True
        self._memory_bytes, self._cache = memory_bytes, cache
        self._works = threading.Event()
        self._works.set()

    def beat(self) -> None:
        """Send an empty message every second while the target waits for an answer."""
        while True:
            self._works.wait()
            with contextlib.suppress(OSError):
                self._messages.beat()
            time.sleep(_BEAT_SECONDS)

    def serve(self) -> None:
        """Load the layers, then run passes until the target closes the connection, which raises OSError."""
        try:
            block = self._load()
            while True:
                self._run(block)
        except OSError:
            raise
        except EdgespecError as error:
            self._answer_error(error)
        except Exception as error:
            # Catch everything, because an invalid message can cause any exception.
            self._answer_error(WorkerError(f"received an invalid message: {type(error).__name__}: {error}"))

    def _answer_error(self, error: EdgespecError) -> None:
        self._messages.send({"error": error.what, "next_step": error.next_step, "code": error.code})

    def _load(self) -> LayerBlock:
        # Import mlx-lm here rather than at startup, because the import takes seconds, and `beat` can send
        # keepalives to the target meanwhile.
        from edgespec.backends.mlx.evaluation import read_array
        from edgespec.backends.mlx.layer_block import MAX_FILES_BYTES, PROTOCOL, LayerBlock, build_skeleton

        header, data = self._messages.receive(MAX_FILES_BYTES)
        if header["protocol"] != PROTOCOL:
            raise WorkerError(
                "the worker runs a different version of edgespec",
                "install the same version on both machines",
                code="worker_version_mismatch",
            )
        headers, start = [], 0
        for header_bytes, file_bytes in header["weight_files"]:
            headers.append((bytes(data[start : start + header_bytes]), file_bytes))
            start += header_bytes
        skeleton = build_skeleton(header["json_files"], headers)
        answer: dict[str, Any] = {"has_cache": self._cache is not None}
        if header["ring_index"] is None:
            self._messages.send(answer)
        else:
            self._join_ring(skeleton, header["ring_index"], answer)
        first, end = header["layers"]
        block = LayerBlock(skeleton.model, first, end, header["kv_bits"], self._memory_bytes)
        while True:
            header, data = self._messages.receive(self._memory_bytes)
            if "weight" not in header:
                break
            if (weight := self._cached(header, data)) is not None:
                block.load(header["weight"], read_array(header, weight))
        block.finish()
        self._messages.send({})
        return block

    def _join_ring(self, skeleton: ModelSkeleton, index: int, answer: dict[str, Any]) -> None:
        """Join a ring of workers, and replace the model's layers with this worker's shards."""
        from edgespec.backends.mlx import tensor_shards

        own = tensor_shards.free_address(self._connection)
        self._messages.send(
            {**answer, "worker_address": tensor_shards.own_address(self._connection), "ring_address": own}
        )
        header, _ = self._messages.receive(0)
        workers = header["worker"]
        tensor_shards.check_neighbour(workers, index)
        group = tensor_shards.join_ring(header["ring"], index, header["token"])
        threading.Thread(
            target=tensor_shards.watch_neighbour, args=(workers, index, self._works), daemon=True
        ).start()
        tensor_shards.shard_model(skeleton.model, skeleton.config, "the model", group)
        self._is_in_ring, self._sends_output = True, index == 0
        self._messages.send({})

    def _cached(self, header: dict[str, Any], data: Buffer) -> Buffer | None:
        """Return the weight that a message contains or refers to, or None if the cache lacks that weight."""
        if self._cache is None or "digest" not in header:
            return data
        weight: Buffer | None = data
        if data:
            write_weight(self._cache, data)
        else:
            weight = read_weight(self._cache, header["digest"])
        self._messages.send({"has_weight": weight is not None})
        return weight

    def _run(self, block: LayerBlock) -> None:
        from edgespec.backends.mlx.evaluation import array_bytes, array_header, read_array
        from edgespec.backends.mlx.layer_block import MAX_STATES_BYTES

        self._works.clear()
        try:
            header, data = self._messages.receive(MAX_STATES_BYTES)
        finally:
            self._works.set()
        try:
            output = block.run(read_array(header, data), header["offset"], header["round_start"])
        except BackendError as error:
            if self._is_in_ring:
                # Other workers may be blocked in this pass, so the ring can no longer be used.
                raise
            self._answer_error(error)
        else:
            if self._sends_output:
                self._messages.send(array_header(output), array_bytes(output))
            else:
                self._messages.send({})
