#!/usr/bin/env python3
"""Compare the speed of each method with that of plain decoding, for a target on two workers.

    scripts/bench_workers.py                                          # the demo pair
    scripts/bench_workers.py --target big-target.gguf --draft big-draft.gguf --every 17 --max-tokens 64
    scripts/bench_workers.py --target demo-mlx --split-modes layer,tensor --round-trips 0

This script starts two workers on this machine. Proxies delay the connections to them, so that each message
arrives later by half of the round-trip time. For each round-trip time and split mode, the script loads the
models again. With the split mode tensor, the connections between the workers are not delayed.
Every prompt is answered with all methods, in an order that changes from prompt to prompt. Nothing is cached
between replies, and nothing is known about the models at the start. The first token and all work before it
are not counted.

x none      speed divided by that of plain decoding of the same prompt: geometric mean over the prompts
long        the same for replies with at least 64 tokens. The loss limit of auto hardly matters for them
worst       lowest of these ratios, over replies with at least 64 tokens if there are any
equal       replies with the same tokens as plain decoding
passes      target passes per token
KiB         KiB sent and received per token, for all workers
trips       round trips per token, for all workers
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import edgespec
from edgespec.losslessness.cases import prompt_tokens, read_prompts
from scripts.delayed_connection import forward
from scripts.peers.configurations import parse, rotated_order

PLAIN = "none"
_LONG_TOKENS = 64
_SENT, _RECEIVED, _TRIPS = range(3)


@dataclass(frozen=True)
class TimedReply:
    """A reply, and what happened after its first token.

    Attributes:
        tokens: Tokens of the reply.
        seconds: Seconds per token.
        passes: Target passes per token.
        traffic: Bytes sent, bytes received and round trips, each per token.
    """

    tokens: tuple[int, ...]
    seconds: float
    passes: float
    traffic: tuple[float, ...]


class Proxy:
    """A process that forwards connections to a port, and delays and counts their data.

    Attributes:
        port: The port to connect to.
    """

    def __init__(self, target_port: int, round_trip_seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._counts = context.Array("q", 3)
        arguments = (listener, target_port, round_trip_seconds / 2, self._counts)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        listener.close()

    @property
    def counts(self) -> tuple[int, ...]:
        """Bytes sent, bytes received, and round trips so far."""
        return tuple(self._counts[:])

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(listener: socket.socket, target_port: int, delay_seconds: float, counts: Any) -> None:
    while True:
        client, _ = listener.accept()
        arguments = (client, target_port, delay_seconds, _Counter(counts).on_data)
        threading.Thread(target=forward, args=arguments, daemon=True).start()


class _Counter:
    """Counts the data of one connection. A round trip is data that the client sent, followed by an answer."""

    def __init__(self, counts: Any) -> None:
        self._counts = counts
        self._waits_for_answer = threading.Event()

    def on_data(self, sent: bool, size: int) -> None:
        self._counts[_SENT if sent else _RECEIVED] += size
        if sent:
            self._waits_for_answer.set()
        elif self._waits_for_answer.is_set():
            self._waits_for_answer.clear()
            self._counts[_TRIPS] += 1


def main() -> None:
    args = _arguments()
    methods = {name: parse(name) for name in dict.fromkeys([PLAIN, *args.methods.split(",")])}
    results = {}
    for milliseconds, split_mode in product(args.round_trips, args.split_modes):
        with _two_workers(milliseconds / 1000) as proxies:
            replies = _measure(args, methods, proxies, split_mode)
        title = f"round trip {milliseconds:g} ms" + f", split mode {split_mode}" * (split_mode != "layer")
        print(f"{title}\n{_report(replies)}", flush=True)
        results[title] = {
            name: [(len(each.tokens), each.seconds) for each in of_name] for name, of_name in replies.items()
        }
    if args.json:
        args.json.write_text(json.dumps(results), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--head", default="none", help="head to draft with, such as demo-head")
    parser.add_argument(
        "--methods",
        default="auto,model:2,model:4,model:8",
        help="methods to compare with none, each with an optional draft length (default: %(default)s)",
    )
    parser.add_argument(
        "--round-trips",
        type=lambda text: [float(each) for each in text.split(",")],
        default=[0.0, 5.0, 20.0],
        help="round-trip times in milliseconds (default: 0,5,20)",
    )
    parser.add_argument(
        "--split-modes",
        type=lambda text: text.split(","),
        default=["layer"],
        help="how to divide the model: layer, tensor or both (default: layer)",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=Path, help="JSONL file (default: edgespec's own prompts)")
    parser.add_argument("--every", type=int, default=1, help="use every nth prompt")
    parser.add_argument("--json", type=Path, help="write the seconds per token of all replies to this file")
    return parser.parse_args()


@contextmanager
def _two_workers(round_trip_seconds: float) -> Iterator[list[Proxy]]:
    """Start two workers and yield a proxy for each."""
    command = [sys.executable, "-m", "edgespec", "worker", "--listen", "127.0.0.1:0", "--threads", "1"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    proxies = []
    try:
        for worker in workers:
            assert worker.stdout
            proxies.append(Proxy(json.loads(worker.stdout.readline())["port"], round_trip_seconds))
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()
        for worker in workers:
            worker.communicate()


def _measure(
    args: argparse.Namespace,
    methods: dict[str, tuple[str, int | None]],
    proxies: Sequence[Proxy],
    split_mode: str,
) -> dict[str, list[TimedReply]]:
    """Return the replies of each method, in the order of the prompts."""
    replies: dict[str, list[TimedReply]] = {name: [] for name in methods}
    with edgespec.load(
        args.target,
        args.draft,
        workers=",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies),
        split_mode=split_mode,
        context=1024,
        head=args.head,
        methods=[method for method, _ in methods.values()],
    ) as runtime:
        for index, prompt in enumerate(read_prompts(args.prompts)[:: args.every]):
            tokens = prompt_tokens(runtime, prompt)
            for name in rotated_order(list(methods), index):
                method, length = methods[name]
                options = {"method": method, "temperature": args.temperature, "seed": 1}
                replies[name].append(
                    _reply(
                        runtime, proxies, tokens, max_tokens=args.max_tokens, draft_length=length, **options
                    )
                )
    return replies


def _reply(
    runtime: edgespec.Runtime, proxies: Sequence[Proxy], tokens: Sequence[int], **options: Any
) -> TimedReply:
    stream = runtime.stream_tokens(
        tokens, **{name: each for name, each in options.items() if each is not None}
    )
    first = next(stream)
    started, before = time.perf_counter(), _traffic(proxies)
    for _ in stream:
        pass
    seconds = time.perf_counter() - started
    reply = stream.reply
    count = max(1, len(reply.tokens) - first.token_count)
    traffic = tuple((b - a) / count for a, b in zip(before, _traffic(proxies), strict=True))
    return TimedReply(reply.tokens, seconds / count, reply.stats.target_passes / count, traffic)


def _traffic(proxies: Sequence[Proxy]) -> list[int]:
    return [sum(counts) for counts in zip(*(proxy.counts for proxy in proxies), strict=True)]


def _report(replies: dict[str, list[TimedReply]]) -> str:
    lines = ["method       x none    long   worst   equal   passes      KiB    trips   ms/token"]
    for name, of_name in replies.items():
        ratios = [plain.seconds / each.seconds for plain, each in zip(replies[PLAIN], of_name, strict=True)]
        long = [
            ratio for ratio, each in zip(ratios, of_name, strict=True) if len(each.tokens) >= _LONG_TOKENS
        ]
        equal = sum(plain.tokens == each.tokens for plain, each in zip(replies[PLAIN], of_name, strict=True))
        sent, received, trips = (
            sum(values) / len(of_name) for values in zip(*(each.traffic for each in of_name), strict=True)
        )
        passes = sum(each.passes for each in of_name) / len(of_name)
        seconds = geometric_mean(each.seconds for each in of_name)
        lines.append(
            f"{name:12} {geometric_mean(ratios):6.2f} {geometric_mean(long or ratios):7.2f}"
            f" {min(long or ratios):7.2f} {equal:4} / {len(ratios):2}"
            f" {passes:6.2f} {(sent + received) / 1024:8.1f} {trips:8.2f} {seconds * 1000:10.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
