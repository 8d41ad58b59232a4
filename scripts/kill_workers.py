#!/usr/bin/env python3
"""Kill, freeze and restart workers at random times, and check that the target's process survives.

    python scripts/kill_workers.py --losses 200
    python scripts/kill_workers.py --losses 200 --target demo-mlx
    python scripts/kill_workers.py --losses 200 --target demo-mlx --split-mode tensor

A child process loads the demo model on 1, 2 or 4 workers and generates a reply. With the split mode tensor,
there are always 2 workers. At a random time, this script kills, freezes or restarts a worker or the process
that runs its layers, or sends garbage to its port. For GGUF models, the layers run in llama.cpp's RPC
server. The script then checks that

- the child process still runs,
- the text so far is the beginning of the reply without workers, or all of it if there was no error,
- an error is a WorkerLostError or WorkerError, and comes within `--max-seconds`, or within 23 seconds if the
  worker was starting the process for its layers,
- the same process can load the model again on the same workers, and generates the whole reply.

Requires a POSIX system.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

import edgespec
from edgespec.cluster.machines import LEAD, MEASURE, PROBE
from edgespec.cluster.worker_server import HELLO

PROMPT = "How do I list files by size, and how do I count the lines of each?"
REPLY: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "seed": 3}
LOAD: dict[str, Any] = {"context": 512}
# A killed worker needs some seconds to restart, and a load waits for it.
_HANG_SECONDS = 60
_MAX_START_SECONDS = 23.0
_HELLO = bytes([HELLO]) + (24).to_bytes(8, "little") + bytes(24)
_ERRORS = ("WorkerLostError", "WorkerError")


def main() -> int:
    """Disrupt workers, check the outcome and print the results as JSON. Return 1 if any check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--split-mode", default="layer", choices=("layer", "tensor"))
    parser.add_argument("--losses", type=int, default=200, help="number of losses (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, default=10.0, help="longest time until an error (default: %(default)s)"
    )
    parser.add_argument(
        "--hang-seconds",
        type=int,
        default=_HANG_SECONDS,
        help="longest time to load a model and to reply (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _generate(args.target, args.split_mode)
        return 0
    results = _lose_workers(args)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 1 if results["errors"] else 0


def _generate(target: str, split_mode: str) -> None:
    """Load the model and generate a reply for each line of stdin, and print what happens as lines of JSON."""
    for line in sys.stdin:
        request = json.loads(line)
        text, error = "", None
        try:
            # `split_mode` is refused without workers.
            spread = {"workers": request["workers"], "split_mode": split_mode} if request["workers"] else {}
            with edgespec.load(target, method=request["method"], **spread, **LOAD) as runtime:
                for chunk in runtime.stream(PROMPT, **REPLY):
                    text += chunk.text
        except edgespec.EdgespecError as failure:
            error = [type(failure).__name__, str(failure)]
        sys.stdout.write(json.dumps({"text": text, "error": error}) + "\n")
        sys.stdout.flush()


class Worker:
    """An `edgespec worker` process that can be restarted on the same port."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the worker, and wait until it is ready."""
        command = [sys.executable, "-m", "edgespec", "worker", "--threads", "1"]
        self._process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{self.port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout
        self.port = json.loads(self._process.stdout.readline())["port"]

    def layer_process(self) -> psutil.Process | None:
        """Return the process that runs the layers, or None while it starts."""
        with suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children()
            # The process for MLX layers starts after the RPC server.
            return max(children, key=lambda child: child.create_time(), default=None)
        return None

    def send(self, number: int) -> None:
        """Send a signal to the worker."""
        self._process.send_signal(number)

    def send_to_layers(self, number: int) -> None:
        """Send a signal to the process that runs the layers."""
        if (layers := self.layer_process()) is not None:
            with suppress(psutil.Error):
                layers.send_signal(number)

    def layers_port(self) -> int:
        """Return a port that the layer process listens on, or the worker's port if there is none."""
        if (layers := self.layer_process()) is not None:
            with suppress(psutil.Error):
                for each in layers.net_connections("tcp4"):
                    if each.status == psutil.CONN_LISTEN:
                        return int(each.laddr.port)
        return self.port

    def kill(self) -> None:
        """Kill the worker. The process that runs its layers then ends too."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Kill the worker and start it again."""
        self.end()
        self.start()

    def recover(self) -> None:
        """Continue the worker and its layer process if they are frozen. Start the worker if it has ended."""
        self.send_to_layers(signal.SIGCONT)
        if self._process.poll() is not None:
            self.end()
            self.start()
        self.send(signal.SIGCONT)

    def end(self) -> None:
        """Kill the worker, and close its streams."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            stream.close()


def _garbage(port: int, bytes_to_send: bytes) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.settimeout(0.5)
        connection.sendall(bytes_to_send)
        connection.recv(4096)


def _send_garbage(worker: Worker, choices: random.Random) -> None:
    start = choices.choice(
        (b"", LEAD, PROBE, MEASURE, LEAD[:7], _HELLO, _HELLO[:12], b"GET / HTTP/1.1\r\n\r\n")
    )
    port = choices.choice((worker.port, worker.layers_port()))
    _garbage(port, start + choices.randbytes(choices.randrange(3000)))


LOSSES: dict[str, Callable[[Worker, random.Random], None]] = {
    "killed worker": lambda worker, _: worker.kill(),
    "killed layer process": lambda worker, _: worker.send_to_layers(signal.SIGKILL),
    "restarted worker": lambda worker, _: worker.restart(),
    "frozen worker": lambda worker, _: worker.send(signal.SIGSTOP),
    "frozen layer process": lambda worker, _: worker.send_to_layers(signal.SIGSTOP),
    "garbage": _send_garbage,
}


class Target:
    """The child process that loads the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._hang_seconds = args.hang_seconds
        self._process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--child",
                "--target",
                args.target,
                "--split-mode",
                args.split_mode,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, workers: str | None, method: str) -> None:
        """Start to load the model and to generate a reply."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"workers": workers, "method": method}) + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any] | None:
        """Return the text and the error, or None if the process died or hangs."""
        assert self._process.stdout
        timeout = signal.signal(signal.SIGALRM, _raise_timeout)
        signal.alarm(self._hang_seconds)
        try:
            line = self._process.stdout.readline()
        except TimeoutError:
            return None
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, timeout)
        result: dict[str, Any] | None = json.loads(line) if line else None
        return result

    def end(self) -> str:
        """Kill the process, and return how it had ended."""
        status = self._process.poll()
        self._process.kill()
        self._process.wait()
        return "hung" if status is None else f"ended with status {status}"


def _raise_timeout(*_: object) -> None:
    raise TimeoutError


def _lose_workers(args: argparse.Namespace) -> dict[str, Any]:
    choices = random.Random(args.seed)
    # The demo model has two key-value heads, so it cannot be divided among more workers.
    counts = (1, 2, 4) if args.split_mode == "layer" else (2,)
    workers = [Worker() for _ in range(max(counts))]
    target = Target(args)
    errors: list[str] = []
    outcomes: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    reported = 0
    try:
        target.begin(None, "none")
        plain = target.result()
        assert plain
        assert not plain["error"]
        durations = {}
        for count in counts:
            for _ in range(2):  # The first load imports modules.
                began = time.monotonic()
                target.begin(_list(workers[:count]), "none")
                assert target.result() == plain
                durations[count] = time.monotonic() - began
        for number in range(args.losses):
            count, how = choices.choice(counts), choices.choice(tuple(LOSSES))
            used, method = workers[:count], choices.choice(("none", "model", "auto"))
            what = f"loss {number} ({how}, {count} workers, method {method})"
            target.begin(_list(used), method)
            time.sleep(choices.uniform(0.0, 1.2 * durations[count]))
            worker = choices.choice(used)
            began = time.monotonic()
            LOSSES[how](worker, choices)
            result = target.result()
            seconds = time.monotonic() - began
            if result is None:
                errors.append(f"{what}: the process {target.end()}")
                target = Target(args)
            elif result["error"]:
                outcomes[f"{how}: {result['error'][0]}"] += 1
                slowest[how] = max(slowest.get(how, 0.0), round(seconds, 2))
                if result["error"][0] not in _ERRORS:
                    errors.append(f"{what}: {': '.join(result['error'])}")
                if not plain["text"].startswith(result["text"]):
                    errors.append(f"{what}: the text is not the beginning of the reply: {result['text']!r}")
                is_starting = "did not report its status in time" in result["error"][1]
                if seconds > max(args.max_seconds, _MAX_START_SECONDS if is_starting else 0.0):
                    errors.append(f"{what}: the error came after {seconds:.1f} s: {result['error'][1]}")
            else:
                outcomes[f"{how}: no error"] += 1
                if result != plain:
                    errors.append(f"{what}: the text differs: {result['text']!r}")
            for each in used:
                each.recover()
            target.begin(_list(used), method)
            again = target.result()
            if again and again["error"] and "is busy with another model" in again["error"][1]:
                # The connection that sent the garbage reserved the worker, which has not noticed yet that it
                # is closed.
                time.sleep(1.0)
                target.begin(_list(used), method)
                again = target.result()
            if again is None:
                errors.append(f"{what}: the process {target.end()} when it loaded the model again")
                target = Target(args)
            elif again != plain:
                errors.append(f"{what}: after that, loading again gave {again['error'] or again['text']!r}")
            sys.stderr.write(f"{what}: {seconds:.2f} s, {result and result['error']}\n")
            sys.stderr.writelines(f"    error: {each}\n" for each in errors[reported:])
            reported = len(errors)
    finally:
        target.end()
        for each in workers:
            each.end()
    return {
        "losses": args.losses,
        "outcomes": dict(sorted(outcomes.items())),
        "slowest": slowest,
        "errors": errors,
    }


def _list(workers: list[Worker]) -> str:
    """Return the value of `--workers`, with sizes that divide the layers evenly."""
    return ",".join(f"127.0.0.1:{worker.port}=200MiB" for worker in workers)


if __name__ == "__main__":
    raise SystemExit(main())
