"""Run layers of an MLX target in a child process of the worker."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from edgespec.system.child_process import ChildProcess, module_arguments

__all__ = ["LayerChild", "remove_folders", "temporary_folder"]


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder that `remove_folders` can find if this process is killed."""
    return tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()))


def remove_folders(pid: int) -> None:
    """Remove the temporary folders of a process that has exited or is about to."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(pid: int) -> str:
    return f"edgespec-layers-{pid}-"


class LayerChild:
    """A child process that runs layers until the target closes the connection.

    Args:
        connection: The connection to the target. The child process uses a duplicate of it.
        memory_bytes: The memory limit for weights.
        cache: Folder for received weights, or None to keep none.

    Raises:
        EdgespecError: The process cannot be started.
    """

    def __init__(self, connection: socket.socket, memory_bytes: int, cache: Path | None) -> None:
        number = connection.fileno()
        self._process = ChildProcess(
            module_arguments("edgespec.backends.mlx.layer_server"), open_files=(number,)
        )
        options = {
            "connection": number,
            "memory_bytes": memory_bytes,
            "cache": None if cache is None else str(cache),
        }
        self._process.stdin.write(json.dumps(options).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Stop the process, and remove its temporary folders. Repeated calls have no effect."""
        self._process.close()
        remove_folders(self._process.pid)
