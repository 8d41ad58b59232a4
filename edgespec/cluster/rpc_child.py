"""Run llama.cpp's RPC server in a child process, so that an abort there does not take down the worker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from edgespec.cluster.rpc_probe import RpcServer, probe_rpc_server
from edgespec.errors import WorkerError
from edgespec.system.child_process import ChildProcess, module_arguments

__all__ = ["LOOPBACK", "RpcChild"]

LOOPBACK = "127.0.0.1"
# Importing llama.cpp takes seconds on a slow disk, and initialising a GPU can take longer.
_START_SECONDS = 60.0
_PROBE_SECONDS = 5.0


class RpcChild:
    """A running RPC server. It writes a byte to `beats` every second.

    Args:
        cache: Folder for received weights, or None to keep none.
        threads: Number of CPU threads, or None for the default.

    Attributes:
        port: The port on the loopback interface that the server listens on.
        llama_cpp: The version of llama-cpp-python.
        device_names: The names of the devices.
        on_cpu: Whether the only device is the CPU.
        server: The version of the protocol, and the memory of each device.
        beats: The stream of heartbeat bytes.

    Raises:
        WorkerError: The server cannot be started.
    """

    def __init__(self, cache: Path | None, threads: int | None) -> None:
        self._process = ChildProcess(module_arguments("edgespec.backends.llamacpp.rpc"))
        try:
            options = {"cache": None if cache is None else str(cache), "threads": threads}
            self._process.stdin.write(json.dumps(options).encode() + b"\n")
            self._process.stdin.flush()
            started = self._read_start()
            self.port, self.llama_cpp = int(started["port"]), str(started["llama_cpp"])
            self.device_names: tuple[str, ...] = tuple(started["devices"])
            self.on_cpu = bool(started["on_cpu"])
            self.server = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.beats = self._process.stdout

    def _read_start(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(
                "llama.cpp's RPC server exited during startup",
                "run `edgespec doctor`",
                code="worker_not_started",
            )
        started: dict[str, Any] = json.loads(line)
        if "error" in started:
            raise WorkerError(started["error"], started["next_step"], code="worker_not_started")
        return started

    def _wait_until_ready(self) -> RpcServer:
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                return probe_rpc_server(LOOPBACK, self.port, _PROBE_SECONDS)
            except (OSError, ValueError) as error:
                if time.monotonic() > end or not self._process.alive:
                    raise WorkerError(
                        f"llama.cpp's RPC server did not start: {error}",
                        "run `edgespec doctor`",
                        code="worker_not_started",
                    ) from error
                time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Stop the server. Repeated calls have no effect."""
        self._process.close()
