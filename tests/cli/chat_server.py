"""A running `edgespec serve --chat`, and the chat processes of its tabs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.conftest import NO_TRIALS, ROOT

__all__ = ["Server", "ended", "needs_proc", "processes", "serving"]

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


class Server(NamedTuple):
    """A running server: its process, its address with the key, and its data folder for chats."""

    process: subprocess.Popen[bytes]
    address: str
    folder: Path


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server, and end it with Ctrl-C unless it has ended."""
    folder.mkdir(exist_ok=True)
    with (
        (folder / "errors.txt").open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "edgespec", "serve", "--chat", "--port", "0", "--json", "--threads", "1"],
            env=os.environ
            | NO_TRIALS
            | {"PYTHONPATH": str(ROOT), "HOME": str(folder), "EDGESPEC_DATA_DIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # A shell that runs the tests in the background makes its programs ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield Server(process, json.loads(process.stdout.readline())["chat_url"], folder)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 0
        finally:
            process.kill()


def processes(folder: Path) -> list[int]:
    """Return the chat processes that use this data folder."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            variables = (place / "environ").read_bytes()
        except OSError:
            continue
        if words[1:4] == [b"-m", b"edgespec", b"chat"] and os.fsencode(folder) in variables:
            found.append(int(place.name))
    return found


async def ended(folder: Path) -> bool:
    """Return whether all chat processes end within 15 seconds."""
    for _ in range(150):
        if not processes(folder):
            return True
        await asyncio.sleep(0.1)
    return False
