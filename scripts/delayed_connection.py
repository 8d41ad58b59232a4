"""Forward a TCP connection with a delay, to imitate a slow network."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress


def forward(
    client: socket.socket,
    port: int,
    delay_seconds: float,
    on_data: Callable[[bool, int], None] = lambda _sent, _size: None,
) -> None:
    """Forward a connection to a port of this machine until both sides have closed it.

    Args:
        client: The accepted connection. It is closed at the end.
        port: The port to connect to.
        delay_seconds: How much later data arrives, in each direction.
        on_data: Called for each piece of data, with whether the client sent it and its size in bytes.
    """
    with suppress(OSError), client, socket.create_connection(("127.0.0.1", port)) as target:
        threads = []
        for source, sink in ((client, target), (target, client)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arrived: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            reading = (source, arrived, source is client, on_data)
            threads.append(threading.Thread(target=_read, args=reading, daemon=True))
            threads.append(threading.Thread(target=_write, args=(sink, arrived, delay_seconds), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _read(
    source: socket.socket,
    arrived: queue.SimpleQueue[tuple[float, bytes]],
    sent: bool,
    on_data: Callable[[bool, int], None],
) -> None:
    data = b"."
    while data:
        try:
            data = source.recv(1 << 20)
        except OSError:
            data = b""
        arrived.put((time.monotonic(), data))
        on_data(sent, len(data))


def _write(
    sink: socket.socket, arrived: queue.SimpleQueue[tuple[float, bytes]], delay_seconds: float
) -> None:
    data = b"."
    while data:
        at, data = arrived.get()
        time.sleep(max(0.0, at + delay_seconds - time.monotonic()))
        with suppress(OSError):
            if data:
                sink.sendall(data)
            else:
                sink.shutdown(socket.SHUT_RDWR)
