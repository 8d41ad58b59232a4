#!/usr/bin/env python3
"""What each method was planned to take in memory against what its process really takes.

    scripts/bench_memory.py --target demo --draft demo-draft
    scripts/bench_memory.py --target demo-mlx --methods none,model,learn,swift --contexts 1024

Every method makes the same replies in a process of its own. planned: what its drafter counts (weights;
caches and whatever it looks guesses up in). measured: what the process holds at its peak more than that of
`none`. Weights that llama.cpp maps are pages of a file, counted when they were touched (`mapped`); everything
else is the process's own (`own`): caches, buffers to compute in, weights arranged anew, MLX's weights. A file
that is mapped twice (`layerskip`) counts twice, though its pages are in memory once. buffers: what llama.cpp
says it set aside to compute in, more than with `none`; it is part of the difference, but for what no pass has
touched yet. The row of `none` compares the target's weights and cache
with what its process holds more than before it loaded them. `learn` is `model` with --learn; after each reply
every process rests for a moment.

    scripts/bench_memory.py --plan --target FILE --contexts 2048,32768 --kv-types auto,q8_0

compares the plan instead: weights, caches, buffers and logits as `edgespec plan` tells them with the most
that the process holds more than before, once a text has filled a part of the context.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

import edgespec
from edgespec.catalog import resolve
from edgespec.catalog.catalogue import models_folder

_MIB = 2**20


@dataclass(frozen=True)
class Held:
    """Bytes a process holds. mapped: pages of files; 0 where the system does not tell them apart."""

    own: int
    mapped: int

    @property
    def all(self) -> int:
        return self.own + self.mapped

    def __sub__(self, other: Held) -> Held:
        return Held(self.own - other.own, self.mapped - other.mapped)


def held() -> Held:
    """What this process holds now."""
    info = psutil.Process().memory_info()
    mapped = int(getattr(info, "shared", 0))
    return Held(int(info.rss) - mapped, mapped)


@dataclass(frozen=True)
class Measured:
    """One method in its process, in bytes.

    planned_weights, planned_caches: of `none`, the target's; else extra. buffers: by llama.cpp's own account.
    """

    method: str
    context_tokens: int
    planned_weights: int
    planned_caches: int
    buffers: int
    started: Held
    loaded: Held
    peak: Held
    drafted_tokens: int
    tokens: tuple[int, ...]
    planned: int = 0
    kv_type: str = "auto"


class Buffers(logging.Handler):
    """Adds up the buffers that llama.cpp logs."""

    _SIZE = re.compile(r"compute buffer size = *([\d.]+) MiB")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        logging.getLogger("edgespec.llamacpp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if size := self._SIZE.search(record.getMessage()):
            self.bytes += int(float(size[1]) * _MIB)


class Watch:
    """Sees the most that this process holds, while it is open."""

    def __init__(self) -> None:
        self._own: list[int] = []
        self._mapped: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.look()

    def look(self) -> None:
        now = held()
        self._own.append(now.own)
        self._mapped.append(now.mapped)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    @property
    def most(self) -> Held:
        return Held(max(self._own), max(self._mapped))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--methods", default="none,model,ngram,suffix,model+suffix,lookahead")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--prompts", type=Path, default=models_folder() / "eval_prompts.jsonl")
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, default=6)
    parser.add_argument("--exit-layer", type=int, help="for layerskip on MLX")
    parser.add_argument("--rest-seconds", type=float, default=4.0)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="more options of edgespec.load, as JSON"
    )
    parser.add_argument("--plan", action="store_true", help="compare the plan of each method and type")
    parser.add_argument("--kv-types", default="auto", help="with --plan")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(asdict(_measure(args, args.inside, int(args.contexts)))))
        return
    methods = ["none", *(method for method in args.methods.split(",") if method != "none")]
    found = []
    if args.plan:
        _compare_plans(methods, args.contexts.split(","), args.kv_types.split(","))
        return
    for context in args.contexts.split(","):
        rows = [row for method in methods if (row := _in_a_process(method, context))]
        found += rows
        if not args.json:
            _print_table(rows)
    if args.json:
        print(json.dumps([asdict(row) for row in found], indent=1))


def _measure(args: argparse.Namespace, method: str, context: int) -> Measured:
    """Load what a method needs, make the replies, and tell what that took."""
    name = "model" if method == "learn" else method
    needs_draft = "model" in name.split("+")
    _import_backend(args.target)
    buffers = Buffers()
    started = held()
    with (
        Watch() as watch,
        edgespec.load(
            args.target,
            args.draft if needs_draft else "none",
            context=context,
            reserve_full_context=True,
            method=name,
            learn=method == "learn",
            exit_layer=args.exit_layer if "layerskip" in name else None,
            kv_type=args.kv_types,
            prefix_cache="none",
            **args.options,
        ) as runtime,
    ):
        loaded = held()
        prompt = _prompt(args.prompts, runtime.vocabulary, args.prompt_tokens)
        tokens: list[int] = []
        drafted = 0
        for part in (prompt[: len(prompt) // 2], prompt):
            stream = runtime.stream_tokens(
                part, max_tokens=args.max_tokens, temperature=0.0, seed=1, draft_length=args.draft_length
            )
            for _ in stream:
                pass
            tokens += stream.reply.tokens
            drafted += stream.reply.stats.drafted_tokens
            time.sleep(args.rest_seconds)
        stats = stream.reply.stats
        planned = (stats.draft_weight_bytes, stats.draft_kv_bytes + stats.draft_other_bytes)
        if method == "none":
            planned = (runtime.target.weight_bytes, runtime.target.kv_bytes)
    beside = ("process", "headroom")
    items = runtime.plan.items if runtime.plan else ()
    return Measured(
        method,
        context,
        *planned,
        buffers.bytes,
        started,
        loaded,
        watch.most,
        drafted,
        tuple(tokens),
        sum(item.bytes for item in items if item.kind not in beside),
        args.kv_types,
    )


def _import_backend(target: str) -> None:
    """Load the library that the target needs, and no model."""
    if resolve(target).format == "mlx":
        from edgespec.backends.mlx import model  # noqa: F401
    else:
        from edgespec.backends.llamacpp.native import library

        library()


def _prompt(path: Path, vocabulary: Any, count: int) -> list[int]:
    """The first tokens of all prompts of a file, one after the other."""
    messages = [
        message["content"]
        for line in path.read_text(encoding="utf-8").splitlines()
        for message in json.loads(line)["messages"]
    ]
    tokens: list[int] = vocabulary.tokenize("\n\n".join(messages), special=False, start=True)
    return (tokens * (count // len(tokens) + 1))[:count]


def _compare_plans(methods: list[str], contexts: list[str], kv_types: list[str]) -> None:
    print("| method | context | cache | planned MiB | measured MiB | planned / measured |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method in methods:
        for context in contexts:
            for kv_type in kv_types:
                if row := _in_a_process(method, context, "--kv-types", kv_type):
                    held_bytes = (row.peak - row.started).all
                    cells = f"{row.planned / _MIB:,.1f} | {held_bytes / _MIB:,.1f}"
                    share = row.planned / held_bytes
                    print(f"| {method} | {context} | {kv_type} | {cells} | {share:.3f} |", flush=True)


def _in_a_process(method: str, context: str, *more: str) -> Measured | None:
    """What `_measure` finds in a fresh process; nothing is kept from one to the next."""
    with tempfile.TemporaryDirectory() as data:
        # Of an option that is given twice the last one counts.
        done = subprocess.run(
            [sys.executable, *sys.argv, "--contexts", context, "--inside", method, *more],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "EDGESPEC_DATA_DIR": data},
        )
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        print(f"{method}: left out: {reason[-1] if reason else 'no reason given'}", file=sys.stderr)
        return None
    row = json.loads(done.stdout)
    for name in ("started", "loaded", "peak"):
        row[name] = Held(**row[name])
    return Measured(**{**row, "tokens": tuple(row["tokens"])})


def _print_table(rows: list[Measured]) -> None:
    if not rows or rows[0].method != "none":
        return
    plain = rows[0]
    print(f"context {plain.context_tokens}, MiB; `none` holds {plain.peak.all / _MIB:,.1f} at its peak")
    print("| method | planned weights | caches | measured mapped | own | difference | of all | buffers |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        more = row.peak - (row.started if row is plain else plain.peak)
        planned = row.planned_weights + row.planned_caches
        difference = more.all - planned
        buffers = row.buffers - (0 if row is plain else plain.buffers)
        cells = " | ".join(
            f"{size / _MIB:,.1f}"
            for size in (row.planned_weights, row.planned_caches, more.mapped, more.own, difference)
        )
        name = row.method if row.tokens == plain.tokens else f"{row.method} (other tokens)"
        print(f"| {name} | {cells} | {difference / row.peak.all:.1%} | {buffers / _MIB:,.1f} |")


if __name__ == "__main__":
    main()
