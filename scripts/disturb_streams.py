#!/usr/bin/env python3
"""Disturb replies of a model that is larger than memory, and check that nothing breaks or gets lost.

    python scripts/disturb_streams.py --disturbances 50 --seed 1

A child process runs a random model of 25 MB with so little memory that it is streamed from disk. It drafts
with low-bit copies of the streamed blocks. At random moments of its replies, the model's file is truncated,
overwritten, replaced or deleted, the copies are deleted, a read fails, Ctrl-C is pressed, the reply is
cancelled, or the memory limit of the control group shrinks (this needs root). A reply must then be complete
and correct, or end with an error of edgespec, with Ctrl-C or as cancelled. The messages of the chat must be
kept, and the next reply must be the same as from plain decoding. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROMPT = "List the files of the file, the list of files, the files."
_REPLY_TOKENS = 24
_CGROUPS = Path("/sys/fs/cgroup")
_MIB = 2**20
# Memory that the plan lacks for the whole model.
_MISSING_BYTES = 6 * _MIB
# Memory that the control group keeps in addition to what the process uses, when its limit shrinks.
_SPARE_BYTES = 48 * _MIB
_FILE_CHANGES = ("truncate", "overwrite")


def main() -> int:
    """Disturb, check and print the results as JSON. Return 1 if any check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--disturbances", type=int, default=50, help="number of disturbed replies (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--victim", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1]))
    if args.victim:
        _Victim(Path(args.victim)).run()
        return 0
    with tempfile.TemporaryDirectory() as name:
        os.environ["EDGESPEC_CACHE_DIR"] = str(Path(name) / "cache")
        results = _Disturber(Path(name), random.Random(args.seed)).run(args.disturbances)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 1 if results["errors"] else 0


class _Victim:
    """The child process. It runs the commands on its standard input, and answers each with a line of JSON."""

    def __init__(self, path: Path) -> None:
        import edgespec
        from edgespec.loading.streamed_blocks import prepare_substitutes

        whole = edgespec.plan(str(path), "none", memory=1 << 40).plan.total_bytes
        self._memory_bytes = whole - _MISSING_BYTES
        prepare_substitutes(path, self._memory_bytes, "Q4_0")
        self._path = path
        self._messages: tuple[Any, ...] = ()
        self._runtime: Any = None
        self._commands: dict[str, Callable[[], dict[str, Any]]] = {
            "plain": self._plain, "load": self._load, "reply": self._reply, "check": self._check,
            "failing-read": self._failing_read, "cancelled-reply": self._cancelled_reply,
        }  # fmt: skip

    def run(self) -> None:
        self._answer({"ready": True})
        while line := self._next_line():
            self._answer(self._commands[line]())

    @staticmethod
    def _next_line() -> str:
        while True:
            # A Ctrl-C may arrive just after the reply that it was meant for.
            with suppress(KeyboardInterrupt):
                return sys.stdin.readline().strip()

    def _answer(self, answer: dict[str, Any]) -> None:
        while True:
            with suppress(KeyboardInterrupt):
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()
                return

    def _plain(self) -> dict[str, Any]:
        import edgespec

        with edgespec.load(str(self._path), "none", method="none", exactness="off") as runtime:
            return {"tokens": runtime.generate(_PROMPT, max_tokens=_REPLY_TOKENS, temperature=0).tokens}

    def _load(self) -> dict[str, Any]:
        import edgespec

        if self._runtime is not None:
            self._runtime.close()
        self._runtime = edgespec.load(
            str(self._path), "none", method="lowbit", memory=self._memory_bytes, exactness="off",
            measure_costs=False,
        )  # fmt: skip
        plan = self._runtime.plan
        assert plan is not None
        assert plan.streaming is not None
        return {"copies": plan.streaming.substitute_bytes}

    def _check(self) -> dict[str, Any]:
        reply = self._runtime.generate(_PROMPT, max_tokens=_REPLY_TOKENS, temperature=0)
        return {"tokens": reply.tokens}

    def _reply(self) -> dict[str, Any]:
        from edgespec.errors import EdgespecError

        before = self._messages if len(self._messages) < 6 else ()
        chat = self._runtime.chat(messages=before)
        outcome = "complete"
        try:
            outcome = str(chat.ask(_PROMPT, max_tokens=_REPLY_TOKENS, temperature=0).finish_reason)
        except KeyboardInterrupt:
            outcome = "Ctrl-C"
        except EdgespecError as error:
            outcome = f"error {error.code}"
        self._messages = tuple(chat.messages)
        # A stopped reply keeps the text generated so far. A failed reply leaves the chat unchanged.
        kept = self._messages[: len(before)] == before and len(self._messages) - len(before) in (0, 2)
        return {"outcome": outcome, "kept": kept}

    def _failing_read(self) -> dict[str, Any]:
        read, left = os.preadv, [random.randrange(40)]

        def fail(*arguments: Any) -> int:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(5, "Input/output error")
            return read(*arguments)

        os.preadv = fail
        try:
            return self._reply()
        finally:
            os.preadv = read

    def _cancelled_reply(self) -> dict[str, Any]:
        import threading

        timer = threading.Timer(random.random(), self._runtime.cancel)
        timer.start()
        try:
            return self._reply()
        finally:
            timer.cancel()
            timer.join()


class _Group:
    """A control group (version 1 or 2) for the child process."""

    def __init__(self) -> None:
        is_v1 = (_CGROUPS / "memory").is_dir()
        self.folder = (_CGROUPS / "memory" if is_v1 else _CGROUPS) / f"edgespec-disturb-{os.getpid()}"
        self._limit = "memory.limit_in_bytes" if is_v1 else "memory.max"
        self._none = "-1" if is_v1 else "max"

    @classmethod
    def create(cls) -> _Group | None:
        """Create the group. Return None if that is not permitted."""
        group = cls()
        try:
            group.folder.mkdir()
            (group.folder / group._limit).write_text(group._none)
        except OSError:
            return None
        return group

    def add(self, process_id: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(process_id))

    def set_limit(self, size_bytes: int | None) -> None:
        with suppress(OSError):
            (self.folder / self._limit).write_text(self._none if size_bytes is None else str(size_bytes))

    def close(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()


class _Disturber:
    """Starts the child process, disturbs its replies, and checks the outcomes."""

    def __init__(self, folder: Path, random_source: random.Random) -> None:
        from tests.backends.tiny_models import write_llama

        self._random = random_source
        self._original = write_llama(folder / "original.gguf", layers=16, feed_forward=4096)
        self._path = folder / "model.gguf"
        self._copies = folder / "cache" / "prepared" / "substitutes"
        self._saved_copies = folder / "saved-copies"
        self._group = _Group.create()
        self._restore()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--victim", str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._group:
            self._group.add(self._process.pid)
        self._in_child = ("failing-read", "cancelled-reply")
        self._kinds = [*_FILE_CHANGES, "replace", "delete", "delete copies", "Ctrl-C", *self._in_child]
        if self._group:
            self._kinds.append("less memory")

    def run(self, count: int) -> dict[str, Any]:
        self._receive()
        shutil.copytree(self._copies, self._saved_copies)
        expected = self._call("plain")["tokens"]
        errors: list[str] = []
        outcomes: Counter[str] = Counter()
        if not self._call("load")["copies"]:
            errors.append("the model does not draft with low-bit copies")
        started = time.monotonic()
        self._check(expected, "the first reply", errors)
        self._reply_seconds = time.monotonic() - started
        for number in range(count):
            kind = self._kinds[number % len(self._kinds)]
            what = f"disturbance {number} ({kind})"
            answer = self._disturb(kind)
            if answer is None:
                errors.append(f"{what}: the process ended with status {self._process.wait()}")
                break
            outcomes[f"{kind}: {answer['outcome']}"] += 1
            if not answer["kept"]:
                errors.append(f"{what}: messages of the chat were lost")
            self._restore()
            if kind in ("replace", "delete"):
                # The loaded model still reads the old file.
                self._check(expected, f"another reply after {what}", errors)
            if kind in (*_FILE_CHANGES, "replace", "delete"):
                self._call("load")
            self._check(expected, f"the reply after {what}", errors)
        if self._process.poll() is None:
            assert self._process.stdin
            self._process.stdin.close()
            if status := self._process.wait():
                errors.append(f"the process ended with status {status}")
        if self._group:
            self._group.close()
        return {
            "disturbances": sum(outcomes.values()),
            "outcomes": dict(sorted(outcomes.items())),
            "errors": errors,
        }

    def _check(self, expected: list[int], what: str, errors: list[str]) -> None:
        tokens = self._call("check")["tokens"]
        if tokens != expected:
            errors.append(f"{what} differs from plain decoding: {tokens} instead of {expected}")

    def _disturb(self, kind: str) -> dict[str, Any] | None:
        """Start a reply, disturb it, and return its outcome. Return None if the process has ended."""
        self._send(kind if kind in self._in_child else "reply")
        if kind not in self._in_child:
            time.sleep(self._random.uniform(0, self._reply_seconds))
            self._change(kind)
        try:
            return self._receive()
        except EOFError:
            return None
        finally:
            if self._group:
                self._group.set_limit(None)

    def _change(self, kind: str) -> None:
        size = self._path.stat().st_size
        if kind == "truncate":
            os.truncate(self._path, self._random.randrange(size))
        elif kind == "overwrite":
            with self._path.open("r+b") as file:
                file.seek(self._random.randrange(size - 100))
                file.write(b"damaged")
        elif kind == "replace":
            other = self._path.with_name("other.gguf")
            other.write_bytes(b"another model")
            other.replace(self._path)
        elif kind == "delete":
            self._path.unlink()
        elif kind == "delete copies":
            shutil.rmtree(self._copies)
        elif kind == "Ctrl-C":
            self._process.send_signal(signal.SIGINT)
        elif kind == "less memory":
            assert self._group
            with suppress(OSError, IndexError, ValueError):
                text = Path(f"/proc/{self._process.pid}/status").read_text()
                kib = int(text.split("RssAnon:")[1].split()[0])
                self._group.set_limit(kib * 1024 + _SPARE_BYTES)

    def _restore(self) -> None:
        """Put back the model and its copies, keeping the modification time of an undamaged file."""
        if self._path.exists() and self._path.read_bytes() == self._original.read_bytes():
            pass
        else:
            self._path.unlink(missing_ok=True)
            shutil.copy2(self._original, self._path)
        if self._saved_copies.exists() and not self._copies.exists():
            shutil.copytree(self._saved_copies, self._copies)

    def _send(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _call(self, command: str) -> dict[str, Any]:
        self._send(command)
        return self._receive()


if __name__ == "__main__":
    raise SystemExit(main())
