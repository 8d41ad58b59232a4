#!/usr/bin/env python3
"""Kill `edgespec chat` at random times during its first reply, and count what is lost.

    python scripts/kill_terminal_chats.py --kills 100

Every run opens the chat in a pseudo-terminal, types a question and ends the program. The runs alternate
between SIGKILL, SIGTERM, SIGHUP, SIGINT and closing the terminal. A question counts as sent once the screen
shows that the
reply has started. The script fails if a question that was sent is not in the saved chats, if more than two
seconds of a reply are lost, or if the program does not end within 10 seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgespec.chat.saved_chat import SavedChat
from edgespec.chat.store import ChatStore

WAYS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "closed terminal")
# Sample almost uniformly, so that a reply hardly ever ends before its maximum length.
CHAT = (
    *(sys.executable, "-m", "edgespec", "chat", "--target", "demo", "--method", "none", "--threads", "1"),
    *("--max-tokens", "900"),
    *("--temperature", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0"),
)
READY, REPLYING = "Enter sends", "Esc stops the reply"
MAX_LOST_SECONDS = 2.0
MAX_END_SECONDS = 10.0


def main() -> int:
    """Kill, check and print the results as JSON. Return 1 if data was lost or a program did not end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="number of kills (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, default=3.0, help="longest time before a kill (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = kill_terminal_chats(args.kills, args.max_seconds, args.seed)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 1 if results["errors"] else 0


def kill_terminal_chats(kills: int, max_seconds: float, seed: int) -> dict[str, Any]:
    """Kill `kills` chats and return the results."""
    choices = random.Random(seed)
    results: dict[str, Any] = {
        "kills": 0, "questions_sent": 0, "lost_questions": 0, "unfinished_replies": 0,
        "max_lost_seconds": 0.0, "max_end_seconds": 0.0, "errors": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        store = ChatStore(Path(name) / "data" / "chats")
        for number in range(kills):
            way, question = WAYS[number % len(WAYS)], f"question {number}"
            chat = TerminalChat(Path(name), seed=number)
            chat.wait_for(READY)
            chat.type(f"{question}\r")
            sent = chat.wait_for(REPLYING, choices.uniform(0.0, max_seconds), stop_early=False)
            killed_at = datetime.now(UTC)
            end_seconds = chat.end(way)
            results["kills"] += 1
            results["questions_sent"] += sent
            results["max_end_seconds"] = max(results["max_end_seconds"], end_seconds)
            where = f"kill {number} ({way})"
            if end_seconds >= MAX_END_SECONDS:
                results["errors"].append(f"{where}: the program did not end")
            saved = _saved(store, question)
            if saved is None:
                if sent:
                    results["lost_questions"] += 1
                    results["errors"].append(f"{where}: the question is lost")
                continue
            if saved.unfinished:
                lost_seconds = max(0.0, (killed_at - saved.updated).total_seconds())
                results["unfinished_replies"] += len(saved.messages) > 1
                results["max_lost_seconds"] = max(results["max_lost_seconds"], lost_seconds)
                if lost_seconds > MAX_LOST_SECONDS:
                    results["errors"].append(f"{where}: {lost_seconds:.1f} s of the reply are lost")
        results["errors"] += [f"{each.id}: {each.problem}" for each in store.list() if each.problem]
    return results


def _saved(store: ChatStore, question: str) -> SavedChat | None:
    chats = (store.load(each.id) for each in store.list() if not each.problem)
    return next((chat for chat in chats if chat.messages[0].content == question), None)


class TerminalChat:
    """`edgespec chat` in a pseudo-terminal."""

    def __init__(self, folder: Path, seed: int) -> None:
        folders = {f"EDGESPEC_{name.upper()}_DIR": str(folder / name) for name in ("data", "cache", "config")}
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            os.environ.update(folders, TERM="xterm-256color")
            # A script in the background of a shell ignores Ctrl-C, and its children would ignore it too.
            for ignored in (signal.SIGINT, signal.SIGHUP):
                signal.signal(ignored, signal.SIG_DFL)
            os.execv(CHAT[0], [*CHAT, "--seed", str(seed)])
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self._shown = ""

    def wait_for(self, text: str, timeout_seconds: float = 60.0, *, stop_early: bool = True) -> bool:
        """Read the screen until it shows `text` or time runs out. Return whether it was shown."""
        deadline = time.monotonic() + timeout_seconds
        while (left := deadline - time.monotonic()) > 0 and not (stop_early and text in self._shown):
            if select.select([self._terminal], [], [], left)[0]:
                self._shown += os.read(self._terminal, 65536).decode("utf-8", "replace")
        return text in self._shown

    def type(self, text: str) -> None:
        """Type text into the terminal."""
        self._shown = ""
        os.write(self._terminal, text.encode())

    def end(self, way: str) -> float:
        """End the program in the given way, and return how many seconds it took."""
        began = time.monotonic()
        if way == "closed terminal":
            os.close(self._terminal)
        else:
            os.kill(self.pid, signal.Signals[way])
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() - began > MAX_END_SECONDS:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            if way == "closed terminal":
                time.sleep(0.02)
            else:
                with suppress(OSError):
                    self.wait_for(READY, 0.02, stop_early=False)
        if way != "closed terminal":
            os.close(self._terminal)
        return time.monotonic() - began


if __name__ == "__main__":
    raise SystemExit(main())
