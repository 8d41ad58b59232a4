"""Child process of `edgespec worker` that runs llama.cpp's RPC server."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from edgespec.backends.llamacpp.native import ggml, library
from edgespec.backends.llamacpp.rpc_library import lent_devices, serve_devices
from edgespec.cluster.rpc_child import LOOPBACK
from edgespec.cluster.weight_cache import hide_unverified
from edgespec.errors import EdgespecError
from edgespec.system.cores import usable_cores

__all__ = ["main"]

_BEAT_SECONDS = 1.0
_SAVED = re.compile(r"\[set_tensor\] saved to '(.+)'")


class _SavedWeights(logging.Handler):
    """Hides each weight file that llama.cpp saves, before the server's next command could read it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hide the file if this log line says that llama.cpp saved one."""
        if saved := _SAVED.fullmatch(record.getMessage()):
            with suppress(OSError):
                hide_unverified(Path(saved[1]))


def main() -> None:
    """Read the options from stdin, report the port and devices on stdout, and serve until stdin closes."""
    options = json.loads(sys.stdin.buffer.readline())
    # Duplicate stdout for messages to the parent process, and discard what llama.cpp prints to stdout.
    parent = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        lib, (devices, on_cpu) = library(), lent_devices()
    except EdgespecError as error:
        parent.write(json.dumps({"error": error.what, "next_step": error.next_step}).encode() + b"\n")
        return
    logging.getLogger("edgespec.llamacpp").addHandler(_SavedWeights())
    port = _free_port()
    started = {
        "port": port,
        "llama_cpp": lib.__version__,
        "devices": [ggml().ggml_backend_dev_name(device).decode("utf-8", "replace") for device in devices],
        "on_cpu": on_cpu,
    }
    parent.write(json.dumps(started).encode() + b"\n")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_beat, args=(parent,), daemon=True).start()
    serve_devices(f"{LOOPBACK}:{port}", options["cache"], options["threads"] or usable_cores(), devices)
    os._exit(1)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _beat(parent: IO[bytes]) -> None:
    while True:
        try:
            parent.write(b".")
        except OSError:
            os._exit(0)
        time.sleep(_BEAT_SECONDS)
