#!/usr/bin/env python3
"""Compare the memory planned for each method with what its process actually uses.

    scripts/bench_memory.py --target demo --draft demo-draft
    scripts/bench_memory.py --target demo-mlx --methods none,model,learn --contexts 1024

Every method generates the same replies in its own process. `learn` is `model` with --learn. Columns:

- planned weights, caches: the memory planned for the drafter. For `none`, that of the target.
- measured mapped, own: how much the peak memory exceeds that of `none`. For `none`, how much it exceeds the
  memory before the load. `mapped` counts pages of memory-mapped files, and counts a file that is mapped twice
  (`layerskip`) twice. `own` is all other memory: caches, compute buffers, repacked weights and MLX weights.
- difference: measured minus planned.
- buffers: the size of the compute buffers in llama.cpp's log, minus that of `none`. They are part of the
  difference, unless they were never used.

With --plan, the script compares the planned memory of the models (weights, caches, compute buffers, logits,
vocabulary) with the peak memory of the process, minus its memory before the load:

    scripts/bench_memory.py --plan --target FILE --contexts 2048,32768 --kv-types auto,q8_0
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
from edgespec.model.memory_estimate import MODEL_MEMORY_KINDS
from edgespec.store.catalogue import models_folder
from edgespec.store.reference import resolve

_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process in bytes.

    Attributes:
        own: memory that is not backed by a file.
        mapped: pages of memory-mapped files; 0 on systems that do not count them separately.
    """

    own: int
    mapped: int

    @property
    def total(self) -> int:
        """All resident bytes."""
        return self.own + self.mapped

    def __sub__(self, other: Memory) -> Memory:
        return Memory(self.own - other.own, self.mapped - other.mapped)


def current_memory() -> Memory:
    """Return the resident memory of this process."""
    info = psutil.Process().memory_info()
    mapped = int(getattr(info, "shared", 0))
    return Memory(int(info.rss) - mapped, mapped)


@dataclass(frozen=True)
class Measurement:
    """Planned and measured memory of one method, in bytes.

    Attributes:
        method: the method.
        context_tokens: the context length.
        planned_weights: planned weights of the drafter or, for `none`, of the target.
        planned_caches: planned caches and tables of the drafter or, for `none`, of the target.
        buffers: compute buffers that llama.cpp logged.
        started: memory before the load.
        loaded: memory after the load.
        peak: peak memory during the load and the replies.
        drafted_tokens: tokens drafted in all replies.
        tokens: tokens of all replies.
        planned: all planned memory except that of the process and the headroom.
        kv_type: type of the KV cache.
    """

    method: str
    context_tokens: int
    planned_weights: int
    planned_caches: int
    buffers: int
    started: Memory
    loaded: Memory
    peak: Memory
    drafted_tokens: int
    tokens: tuple[int, ...]
    planned: int = 0
    kv_type: str = "auto"


class BufferLogHandler(logging.Handler):
    """Adds up the sizes of the compute buffers that llama.cpp logs."""

    _SIZE = re.compile(r"compute buffer size = *([\d.]+) MiB")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        logging.getLogger("edgespec.llamacpp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if size := self._SIZE.search(record.getMessage()):
            self.bytes += int(float(size[1]) * _MIB)


class PeakSampler:
    """Context manager that samples this process's memory in a thread to find its peak."""

    def __init__(self) -> None:
        self._own: list[int] = []
        self._mapped: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopped.wait(0.005):
            self.sample()

    def sample(self) -> None:
        """Take one sample."""
        now = current_memory()
        self._own.append(now.own)
        self._mapped.append(now.mapped)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.sample()

    @property
    def peak(self) -> Memory:
        """The largest sample of each kind of memory."""
        return Memory(max(self._own), max(self._mapped))


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
        "--options", type=json.loads, default={}, help="additional options for edgespec.load, as JSON"
    )
    parser.add_argument(
        "--plan", action="store_true", help="compare the whole plan, for each method and KV cache type"
    )
    parser.add_argument("--kv-types", default="auto", help="KV cache types, with --plan")
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(asdict(_measure(args, args.inside, int(args.contexts)))))
        return
    methods = ["none", *(method for method in args.methods.split(",") if method != "none")]
    all_rows = []
    if args.plan:
        _compare_plans(methods, args.contexts.split(","), args.kv_types.split(","))
        return
    for context in args.contexts.split(","):
        rows = [row for method in methods if (row := _run_in_process(method, context))]
        all_rows += rows
        if not args.json:
            _print_table(rows)
    if args.json:
        print(json.dumps([asdict(row) for row in all_rows], indent=1))


def _measure(args: argparse.Namespace, method: str, context: int) -> Measurement:
    """Load the models of a method in this process, generate the replies, and measure the memory."""
    name = "model" if method == "learn" else method
    needs_draft = "model" in name.split("+")
    _import_backend(args.target)
    buffers = BufferLogHandler()
    started = current_memory()
    with (
        PeakSampler() as sampler,
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
        loaded = current_memory()
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
    items = runtime.plan.items if runtime.plan else ()
    return Measurement(
        method,
        context,
        *planned,
        buffers.bytes,
        started,
        loaded,
        sampler.peak,
        drafted,
        tuple(tokens),
        sum(item.bytes for item in items if item.kind in MODEL_MEMORY_KINDS),
        args.kv_types,
    )


def _import_backend(target: str) -> None:
    """Load the library of the target's backend, so that its memory use is not included in the measurement."""
    if resolve(target).format == "mlx":
        from edgespec.backends.mlx import model  # noqa: F401
    else:
        from edgespec.backends.llamacpp.native import library

        library()


def _prompt(path: Path, vocabulary: Any, count: int) -> list[int]:
    """Return the first `count` tokens of all prompts in a file, joined and repeated as needed."""
    messages = [
        message["content"]
        for line in path.read_text(encoding="utf-8").splitlines()
        for message in json.loads(line)["messages"]
    ]
    tokens: list[int] = vocabulary.tokenize("\n\n".join(messages), special=False, start=True)
    return (tokens * (count // len(tokens) + 1))[:count]


def _compare_plans(methods: list[str], contexts: list[str], kv_types: list[str]) -> None:
    """Print planned and measured memory for every combination."""
    print("| method | context | cache | planned MiB | measured MiB | planned / measured |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method in methods:
        for context in contexts:
            for kv_type in kv_types:
                if row := _run_in_process(method, context, "--kv-types", kv_type):
                    measured = (row.peak - row.started).total
                    cells = f"{row.planned / _MIB:,.1f} | {measured / _MIB:,.1f}"
                    share = row.planned / measured
                    print(f"| {method} | {context} | {kv_type} | {cells} | {share:.3f} |", flush=True)


def _run_in_process(method: str, context: str, *options: str) -> Measurement | None:
    """Run `_measure` in a new process with an empty data folder. Returns None if it failed."""
    with tempfile.TemporaryDirectory() as data:
        # The options added here replace those in sys.argv, because argparse uses the last value of an option.
        done = subprocess.run(
            [sys.executable, *sys.argv, "--contexts", context, "--inside", method, *options],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "EDGESPEC_DATA_DIR": data},
        )
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        print(f"{method} failed: {reason[-1] if reason else 'no error message'}", file=sys.stderr)
        return None
    row = json.loads(done.stdout)
    for name in ("started", "loaded", "peak"):
        row[name] = Memory(**row[name])
    return Measurement(**{**row, "tokens": tuple(row["tokens"])})


def _print_table(rows: list[Measurement]) -> None:
    """Print one line per method, compared with `none`."""
    if not rows or rows[0].method != "none":
        return
    plain = rows[0]
    print(f"context {plain.context_tokens}, MiB; the peak of `none` is {plain.peak.total / _MIB:,.1f}")
    print(
        "| method | planned weights | caches | measured mapped | own | difference | share of peak | buffers |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        extra = row.peak - (row.started if row is plain else plain.peak)
        planned = row.planned_weights + row.planned_caches
        difference = extra.total - planned
        buffers = row.buffers - (0 if row is plain else plain.buffers)
        cells = " | ".join(
            f"{size / _MIB:,.1f}"
            for size in (row.planned_weights, row.planned_caches, extra.mapped, extra.own, difference)
        )
        name = row.method if row.tokens == plain.tokens else f"{row.method} (different tokens)"
        print(f"| {name} | {cells} | {difference / row.peak.total:.1%} | {buffers / _MIB:,.1f} |")


if __name__ == "__main__":
    main()
