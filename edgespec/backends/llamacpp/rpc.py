"""Both ends of llama.cpp's RPC backend, which runs computations on the devices of other machines.

On the target's machine, `add_devices` connects to the workers. On a worker, `main` runs in a child process of
`edgespec worker` and serves the worker's devices.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from edgespec.backends.llamacpp.native import ggml, library, library_path
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import LOOPBACK
from edgespec.cluster.weight_cache import hide_unverified
from edgespec.errors import BackendMissingError, EdgespecError
from edgespec.system.cores import usable_cores
from edgespec.system.files import error_reason
from edgespec.system.installation import setup_command

__all__ = ["add_devices", "guard_against_aborts", "main"]

# Values of `enum ggml_backend_dev_type`.
_CPU, _GPU, _INTEGRATED_GPU = 0, 1, 2
_Abort = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
# Name of the RPC client's source file in llama.cpp, which occurs in its abort messages.
_CLIENT_SOURCE = b"ggml-rpc"
_guarded: weakref.WeakSet[ConnectedWorkers] = weakref.WeakSet()
# The workers of models that use the newest copy of the RPC library. If a worker is lost while llama.cpp is
# connecting to it, a thread that never returns keeps holding one of that copy's locks, so later models use
# another copy.
_users: weakref.WeakSet[ConnectedWorkers] = weakref.WeakSet()
# Number of copies made of the RPC library.
_copies = 0
# Number of `add_devices` calls. It is part of each address, so that each call opens new connections.
_generation = 0
_BEAT_SECONDS = 1.0
_SAVED = re.compile(r"\[set_tensor\] saved to '(.+)'")


@cache
def _rpc(copy: int = 0) -> Any:
    """Load a copy of the RPC library. Each copy has its own locks and connections.

    Raises:
        BackendMissingError: The library is not built, or cannot be copied or loaded.
    """
    lib = library()
    path = library_path(lib, "rpc")
    try:
        # Do not use `ggml_backend_load`, which would register the backend and make llama.cpp assume that a
        # GPU is available to all models.
        with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
            rpc = ctypes.CDLL(shutil.copy(path, folder) if copy else str(path))
    except OSError as error:
        raise BackendMissingError(
            f"llama.cpp's RPC library for llama-cpp-python {lib.__version__} cannot be loaded from {path}:"
            f" {error_reason(error)}",
            "restart edgespec" if copy else f"build it with `{setup_command('workers')}`",
        ) from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    rpc.ggml_backend_rpc_add_server.restype = pointer
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    rpc.ggml_backend_rpc_start_server.restype = None
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, size, size, ctypes.POINTER(pointer),
    ]  # fmt: skip
    return rpc


def _lent_devices() -> tuple[list[Any], bool]:
    """Return the devices that this machine offers as a worker, and whether the CPU is the only one.

    If there are GPUs, the CPU is not offered, because the GPUs would sit idle waiting for it.
    """
    _rpc()
    backend = ggml()
    devices = [backend.ggml_backend_dev_get(i) for i in range(backend.ggml_backend_dev_count())]
    kinds = [backend.ggml_backend_dev_type(device) for device in devices]
    cards = [d for d, kind in zip(devices, kinds, strict=True) if kind in (_GPU, _INTEGRATED_GPU)]
    return cards or [d for d, kind in zip(devices, kinds, strict=True) if kind == _CPU], not cards


def _serve_devices(endpoint: str, cache_folder: str | None, threads: int, devices: Sequence[Any]) -> None:
    """Serve devices to RPC clients. Returns only if the port cannot be used."""
    pointers = (ctypes.c_void_p * len(devices))(*devices)
    folder = cache_folder and cache_folder.encode()
    _rpc().ggml_backend_rpc_start_server(endpoint.encode(), folder, threads, len(devices), pointers)


def add_devices(workers: ConnectedWorkers) -> list[list[Any]]:
    """Connect llama.cpp to the workers, and return the devices of each.

    Raises:
        BackendMissingError: The RPC library is not built, or cannot be copied.
    """
    global _copies, _generation  # noqa: PLW0603
    if any(user.is_lost for user in _users):
        _copies += 1
        _users.clear()
    rpc = _rpc(_copies)
    _users.add(workers)
    libggml = ggml()
    found = []
    _generation += 1
    for link in workers.links:
        # llama.cpp would reuse a lost connection if the address were spelled the same. Leading zeros in the
        # port change the spelling but not the address.
        endpoint = f"{link.address.host}:{'0' * _generation}{link.address.port}"
        reg = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        count = libggml.ggml_backend_reg_dev_count(reg) if reg else 0
        found.append([libggml.ggml_backend_reg_dev_get(reg, i) for i in range(count)])
    return found


def guard_against_aborts(workers: ConnectedWorkers) -> None:
    """Make `workers` report a lost connection instead of letting llama.cpp abort the process."""
    _guarded.add(workers)
    _set_abort_callback()


@cache
def _set_abort_callback() -> Any:
    callback = _Abort(_on_abort)
    ggml().ggml_set_abort_callback(callback)
    return callback


def _on_abort(message: bytes) -> None:
    """Handle an abort in llama.cpp, which terminates the process when this function returns."""
    if _CLIENT_SOURCE not in message:
        sys.stderr.write(message.decode("utf-8", "replace") + "\n")
        sys.stderr.flush()
        return
    for workers in tuple(_guarded):
        workers.report_abort()
    # Never return, because llama.cpp would then abort the process. `report_abort` has already released the
    # thread that was waiting for this one.
    threading.Event().wait()


class _SavedWeights(logging.Handler):
    """Hides each weight file that llama.cpp saves, so the server cannot read it before verification."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hide the weight file if this log line reports that llama.cpp saved one."""
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
        lib, (devices, on_cpu) = library(), _lent_devices()
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
    _serve_devices(f"{LOOPBACK}:{port}", options["cache"], options["threads"] or usable_cores(), devices)
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
