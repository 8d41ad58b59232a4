"""Measure the round trip and the bandwidth of the connection to a worker.

A message starts with its length (8 bytes, little-endian), followed by this number of bytes. The worker
answers each message with one byte.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from statistics import median
from time import perf_counter as now

from edgespec.cluster.link import worker_connection
from edgespec.cluster.machines import WorkerAddress
from edgespec.cluster.status import MEASURE
from edgespec.errors import WorkerError

__all__ = ["LinkSpeed", "answer_messages", "measure_link"]

_SIZE = struct.Struct("<Q")
_ROUND_TRIPS = 9
# Larger messages are sent until one takes this long. Starting small keeps the test short on a slow network.
_ENOUGH_SECONDS = 0.1
_FIRST_BYTES, _MAX_BYTES, _GROWTH = 1 << 16, 1 << 26, 4
_CHUNK = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The measured speed of the connection to a worker.

    Attributes:
        round_trip_seconds: Time for a small message and its answer.
        bytes_per_second: Bandwidth towards the worker.
    """

    round_trip_seconds: float
    bytes_per_second: float


def measure_link(address: WorkerAddress) -> LinkSpeed:
    """Measure the latency and bandwidth of the connection to a worker, even if the worker is in use.

    On most networks, this takes less than a second.

    Raises:
        WorkerError: The worker is unreachable, or the connection broke.
    """
    with worker_connection(address, MEASURE) as (connection, _):
        try:
            round_trip = median(_seconds(connection, 0) for _ in range(_ROUND_TRIPS))
            size = _FIRST_BYTES
            while (seconds := _seconds(connection, size)) < _ENOUGH_SECONDS and size < _MAX_BYTES:
                size *= _GROWTH
        except OSError as error:
            raise WorkerError(
                f"the connection to the worker {address} broke while it was measured",
                "check the network, and that the worker runs the same version of edgespec",
            ) from error
    # The data transfer and the round trip partly overlap, so subtract at most half of the measured time.
    return LinkSpeed(round_trip, size / max(seconds - round_trip, seconds / 2))


def _seconds(connection: socket.socket, size: int) -> float:
    """Send a message with `size` bytes of data, and return the seconds until the answer arrives."""
    began = now()
    connection.sendall(_SIZE.pack(size))
    for start in range(0, size, len(_CHUNK)):
        connection.sendall(_CHUNK[: size - start])
    if not connection.recv(1):
        raise ConnectionError("the worker closed the connection")
    return now() - began


def answer_messages(connection: socket.socket) -> None:
    """Answer the messages of `measure_link`, until the other side closes the connection.

    Raises:
        OSError: The connection broke.
    """
    buffer = memoryview(bytearray(len(_CHUNK)))
    while header := connection.recv(_SIZE.size, socket.MSG_WAITALL):
        if len(header) < _SIZE.size:
            return
        (left,) = _SIZE.unpack(header)
        while left:
            received = connection.recv_into(buffer[: min(left, len(buffer))])
            if not received:
                return
            left -= received
        connection.sendall(b".")
