#!/usr/bin/env python3
"""Measure the time until the chat shows its first screen, and until it accepts the first key.

.venv/bin/python scripts/bench_chat_start.py [--target REF] [--runs N] [--json]

Each run starts `edgespec chat` in a new terminal and types a text immediately, before anything is shown.
After the model is loaded, the text must be in the chat's input: no key press may be lost.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
from fcntl import ioctl
from statistics import median
from termios import TIOCSWINSZ
from time import perf_counter

ALTERNATE_SCREEN = b"\x1b[?1049h"
TYPED = "typedatonce"
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>][A-Z0-9]?")
_MAX_SECONDS = 120.0


def start(target: str, folder: str) -> tuple[int, int]:
    """Start the chat in a terminal of 80 by 24 cells. Return its process ID and the terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "EDGESPEC_DATA_DIR": folder}
        os.execv(sys.executable, [sys.executable, "-m", "edgespec", "chat", "--target", target])
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return process, terminal


def measure(target: str) -> dict[str, float]:
    """Start the chat once, and return the seconds until each event."""
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        process, terminal = start(target, folder)
        os.write(terminal, TYPED.encode())
        found: dict[str, float] = {}
        output = b""
        try:
            while "first_key" not in found:
                if perf_counter() - began > _MAX_SECONDS:
                    raise SystemExit(f"keys were lost: the text did not appear in {_MAX_SECONDS:.0f} s")
                if select.select([terminal], [], [], 0.05)[0]:
                    output += os.read(terminal, 65536)
                shown = _ESCAPES.sub(b"", output.partition(ALTERNATE_SCREEN)[2]).decode("utf-8", "ignore")
                now = perf_counter() - began
                if "edgespec" in shown:
                    found.setdefault("first_screen", now)
                if TYPED in shown:
                    found["first_key"] = now
        finally:
            os.kill(process, signal.SIGTERM)
            _drain(terminal)
            os.waitpid(process, 0)
            os.close(terminal)
        return found


def _drain(terminal: int) -> None:
    """Read the terminal until the chat has ended. The chat would block if nobody read its output."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [measure(options.target) for _ in range(options.runs)]
    medians = {name: median(run[name] for run in runs) for name in ("first_screen", "first_key")}
    if options.json:
        print(json.dumps({"runs": runs, "median": medians}))
        return
    print(f"first screen after {medians['first_screen']:.2f} s (median of {options.runs})")
    print(
        f"text typed at the start is in the input after {medians['first_key']:.2f} s, which includes loading"
    )


if __name__ == "__main__":
    main()
