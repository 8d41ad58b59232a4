"""The server under attack, and its use of memory, files and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

_START_SECONDS = 120
_STOP_SECONDS = 60


class Usage(NamedTuple):
    """The resources that the server and its child processes use at one point in time."""

    memory_bytes: int
    files: int
    threads: int


class Victim:
    """A running server.

    Args:
        pid: The server's process.

    Attributes:
        port: The server's port.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        listening = [each for each in self._process.net_connections() if each.status == psutil.CONN_LISTEN]
        self.port: int = listening[0].laddr.port

    def is_running(self) -> bool:
        """Whether the server process is still running."""
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    def usage(self) -> Usage:
        """Return the resources in use."""
        memory = 0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                memory += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return Usage(memory, self._process.num_fds(), self._process.num_threads())

    def prefix_cache_bytes(self) -> int:
        """Return the memory of all models' prefix caches, according to the server, or 0 if it is too busy."""
        lines = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=60).text.splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("edgespec_prefix_cache_bytes{"))


@contextmanager
def started(options: Sequence[str], log: Path) -> Iterator[Victim]:
    """Start `edgespec serve` with its own folders, and stop it at the end.

    Args:
        options: Further options of the command.
        log: File for the server's log.

    Raises:
        RuntimeError: The server does not start, or its exit status is not 0.
    """
    with tempfile.TemporaryDirectory() as home, log.open("w") as stderr:
        folders = {f"EDGESPEC_{name}_DIR": f"{home}/{name}" for name in ("DATA", "CACHE", "CONFIG")}
        command = [sys.executable, "-m", "edgespec", "serve", "--port", "0", "--temperature", "0", "--json"]
        server = subprocess.Popen(
            # `options` can name another target.
            [*command, "--target", "demo", *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **folders},
            text=True,
        )
        assert server.stdout
        if not server.stdout.readline():
            raise RuntimeError(f"the server did not start: {log.read_text()}")
        try:
            yield Victim(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                status = server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                raise RuntimeError(f"the server did not stop within {_STOP_SECONDS} seconds") from None
        if status:
            raise RuntimeError(f"the server's exit status is {status}")
