"""Send questions to the program under test, disturb it, and record its answers and memory use."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from edgespec.chat.store import ChatStore
from scripts.kill_terminal_chats import READY, TerminalChat

_ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "How do I list files by size?",
    "And by name?",
    "What does chmod do?",
    "How do I unpack a tar file?",
)
# Seconds after which a missing answer counts as a hang. A load takes about one second, and a reply a few.
_ANSWER_SECONDS = 120.0
_SAMPLE_SECONDS = 10.0
# Memory samples from the first seconds after a start are ignored, because caches are still filling.
_WARM_UP_SECONDS = 60.0
# Growth in MiB per hour below which memory counts as flat. Allocators never return all memory.
_NEGLIGIBLE = 4.0
# Relative frequency of each event. Most questions run without a disturbance.
_EVENTS = {
    "ask": 70,
    "cancel": 10,
    "suspend": 6,
    "reload": 4,
    "full disk": 4,
    "memory pressure": 4,
    "terminal": 2,
}


class Hang(Exception):
    """Raised if the program does not answer."""


class Soak:
    """A soak test with a log. If the folder contains a log, the test resumes with the next event.

    Args:
        folder: Holds `log.jsonl` and the data folder of the program.
        seed: Random seed for the order of events.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder, self._seed = folder, seed
        self._log = folder / "log.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        text = self._log.read_text("utf-8") if self._log.exists() else ""
        self.lines: list[dict[str, Any]] = [
            json.loads(line) for line in text.splitlines() if line.endswith("}")
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._sampled = 0.0
        self._pending: list[str] = []

    @property
    def seconds(self) -> float:
        """Total running time of the program in seconds, including earlier runs."""
        return float(sum(line["seconds"] for line in self.lines if line["kind"] == "event"))

    def run(self, seconds: float) -> None:
        """Run events until the program has run for `seconds` in total."""
        try:
            while self.seconds < seconds:
                number = sum(line["kind"] == "event" for line in self.lines)
                rng = Random(f"{self._seed}/{number}")
                name = rng.choices(list(_EVENTS), list(_EVENTS.values()))[0]
                began, error = time.monotonic(), ""
                try:
                    getattr(self, f"_{name.replace(' ', '_')}")(rng, f"{QUESTIONS[number % 4]} ({number})")
                except (Hang, BrokenPipeError, json.JSONDecodeError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
                    self._stop()
                self._write("event", name=name, seconds=time.monotonic() - began, error=error)
        finally:
            self._stop()

    def _ask(self, rng: Random, question: str, *, cancel_after: int | None = None) -> None:
        self._request_reply(rng, question, cancel_after)
        self._expect(question, self._answer())

    def _cancel(self, rng: Random, question: str) -> None:
        self._ask(rng, question, cancel_after=rng.randrange(20))

    def _suspend(self, rng: Random, question: str) -> None:
        """Suspend the program during a reply, as closing a laptop or Ctrl-Z does."""
        self._request_reply(rng, question, None)
        process = self._process
        assert process
        time.sleep(rng.uniform(0.0, 0.3))
        process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.2, 3.0))
        process.send_signal(signal.SIGCONT)
        self._expect(question, self._answer())

    def _reload(self, rng: Random, question: str) -> None:
        self._request("reload")
        self._answer()
        self._ask(rng, question)

    def _full_disk(self, rng: Random, question: str) -> None:
        """Make all file writes fail during one reply. The chat must be saved afterwards."""
        self._request("disk", full=True)
        self._answer()
        self._ask(rng, question)
        self._request("disk", full=False)
        if self._answer()["saved"]:
            self._saved()

    def _memory_pressure(self, rng: Random, question: str) -> None:
        self._request("memory", low=True)
        self._answer()
        self._ask(rng, question)
        self._request("memory", low=False)
        self._answer()

    def _terminal(self, rng: Random, question: str) -> None:
        """Ask in the terminal chat and end it with a signal during or after the reply."""
        chat = TerminalChat(self._folder, seed=rng.randrange(1000))
        shown = chat.wait_for(READY)
        chat.type(f"{question}\r")
        sent = chat.wait_for("Esc stops the reply", 10.0)
        chat.wait_for("never shown", rng.uniform(0.0, 3.0), stop_early=False)
        seconds = chat.end("SIGTERM")
        if not shown or seconds >= 10:
            raise Hang("the terminal chat did not start or end in time")
        if sent:
            self._write("saved", texts=[question])

    def _request_reply(self, rng: Random, question: str, cancel_after: int | None) -> None:
        self._request("ask", question=question, seed=rng.randrange(2**31), cancel_after=cancel_after)

    def _expect(self, question: str, answer: dict[str, Any]) -> None:
        """Record the messages that the saved chats must contain."""
        self._pending += [question, answer["reply"]] if answer["reply"] else []
        if answer["saved"]:
            self._saved()

    def _saved(self) -> None:
        self._write("saved", texts=self._pending)
        self._pending = []

    def _request(self, name: str, **values: Any) -> None:
        process = self._process or self._start()
        assert process.stdin
        process.stdin.write(json.dumps({"do": name, **values}).encode() + b"\n")
        process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        process = self._process
        assert process
        assert process.stdout
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not select.select([process.stdout], [], [], 1.0)[0]:
            self._sample(process.pid)
            if time.monotonic() > deadline:
                raise Hang(f"the program did not answer within {_ANSWER_SECONDS:.0f} seconds")
        self._sample(process.pid)
        line = process.stdout.readline()
        if not line:
            raise BrokenPipeError(f"the program exited with status {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        folders = {
            f"EDGESPEC_{name.upper()}_DIR": str(self._folder / name) for name in ("data", "cache", "config")
        }
        with (self._folder / "messages").open("ab") as messages:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.soaking.chats"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                cwd=_ROOT,
                env=os.environ | folders,
                start_new_session=True,
            )
        self._started, self._pending = time.monotonic(), []
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _sample(self, pid: int) -> None:
        if time.monotonic() - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            resident = psutil.Process(pid).memory_info().rss
            self._write("memory", pid=pid, at=time.monotonic() - self._started, bytes=resident)

    def _write(self, kind: str, **values: Any) -> None:
        line = {"kind": kind, **values}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)

    def trend(self) -> Trend:
        """Return the program's memory growth, without the first minute of each process."""
        segments: dict[int, list[tuple[float, float]]] = {}
        for line in self.lines:
            if line["kind"] == "memory" and line["at"] >= _WARM_UP_SECONDS:
                segments.setdefault(line["pid"], []).append((line["at"], line["bytes"]))
        return fit(list(segments.values()))

    def lost(self) -> list[str]:
        """Return the questions and replies that were saved but are not in the saved chats."""
        store = ChatStore(self._folder / "data" / "chats")
        found = {
            message.content
            for entry in store.list()
            if not entry.problem
            for message in store.load(entry.id).messages
        }
        expected = [text for line in self.lines if line["kind"] == "saved" for text in line["texts"]]
        damaged = [f"{entry.id}: {entry.problem}" for entry in store.list() if entry.problem]
        return [text for text in expected if text not in found] + damaged


def report(soak: Soak, write: Callable[[str], None] = print) -> bool:
    """Print the results, and return whether the program passed."""
    events = [line for line in soak.lines if line["kind"] == "event"]
    for name in _EVENTS:
        write(f"{name:16} {sum(event['name'] == name for event in events):6}")
    errors = [event["error"] for event in events if event["error"]]
    trend, lost = soak.trend(), soak.lost()
    kept = sum(len(line["texts"]) for line in soak.lines if line["kind"] == "saved")
    write(f"hours            {soak.seconds / 3600:9.2f}")
    write(f"questions and replies saved {kept}, lost {len(lost)}")
    write(f"crashes and hangs {len(errors)}")
    write(f"memory {trend}")
    for problem in [*errors, *lost][:20]:
        write(f"  {problem}")
    return not errors and not lost and trend.is_flat


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth in MiB per hour, and the half width of its 95 % interval."""

    slope: float
    error: float

    @property
    def is_flat(self) -> bool:
        """Whether the growth is negligible, or not significantly greater than zero."""
        return self.slope - self.error <= 0 or self.slope <= _NEGLIGIBLE

    def __str__(self) -> str:
        if self.error == inf:
            return "too few samples to tell"
        verdict = "flat" if self.is_flat else "it grows"
        return f"{self.slope:+.2f} ± {self.error:.2f} MiB per hour: {verdict}"


def fit(segments: Sequence[Sequence[tuple[float, float]]]) -> Trend:
    """Fit one growth rate to the samples of all processes.

    Args:
        segments: For each process, samples of (seconds, bytes). Each process has its own intercept.
    """
    hours, mebibytes, levels = [], [], 0
    for segment in segments:
        if len(segment) > 2:
            samples = np.array(segment, float)
            hours.append(samples[:, 0] / 3600 - samples[:, 0].mean() / 3600)
            mebibytes.append(samples[:, 1] / 2**20 - samples[:, 1].mean() / 2**20)
            levels += 1
    if not levels:
        return Trend(0.0, inf)
    x, y = np.concatenate(hours), np.concatenate(mebibytes)
    spread = float((x**2).sum())
    slope = float((x * y).sum()) / spread
    freedom = max(1, len(x) - levels - 1)
    return Trend(slope, 1.96 * sqrt(float(((y - slope * x) ** 2).sum()) / freedom / spread))
