#!/usr/bin/env python3
"""Measure the time to the first token of a resumed chat, with and without the prefix cache on disk.

    scripts/bench_resume.py                                           # the demo, 1,000 and 10,000 tokens
    scripts/bench_resume.py --target big-target.gguf --lengths 4000   # see scripts/inflate_gguf.py

One runtime generates a chat and is closed. Other runtimes then continue the chat, with and without the prefix
cache. The time to load the model is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

import edgespec
from edgespec import Reply

_NEXT_TURN_TOKENS = 20


def main() -> None:
    """Print one row per chat length, or all rows as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--lengths", default="1000,10000", help="lengths of the chats in tokens")
    parser.add_argument("--kv-type", default="auto", help="type of the KV cache (default: auto)")
    parser.add_argument("--repeats", type=int, default=3, help="runtimes of each kind (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    rows = [_row(args, int(length)) for length in args.lengths.split(",")]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(
            "{tokens:,} tokens, {disk_mib:.1f} MiB on disk: {restored_seconds:.3f} s with the prefix cache"
            " ({restored_tokens:,} tokens), {prefilled_seconds:.3f} s without it:"
            " speed-up {speedup:.0f}x".format(**row)
        )


def _row(args: argparse.Namespace, length: int) -> dict[str, Any]:
    options: dict[str, Any] = {"draft": "none", "method": "none", "kv_type": args.kv_type}
    options["context"] = length + 100
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_DATA_DIR"] = folder
        with edgespec.load(args.target, prefix_cache="disk", **options) as runtime:
            chat = np.random.default_rng(length).integers(300, runtime.target.vocab_size, length).tolist()
            chat += _answer(runtime, chat).tokens
            runtime.save_prefix_cache()
            disk_bytes = runtime.memory().prefix_cache.disk_bytes
        chat += chat[:_NEXT_TURN_TOKENS]
        restored: list[Reply] = []
        prefilled: list[Reply] = []
        for _ in range(args.repeats):  # Alternate, so that changes in the machine's speed affect both.
            for replies, prefix_cache in ((restored, "disk"), (prefilled, "none")):
                with edgespec.load(args.target, prefix_cache=prefix_cache, **options) as runtime:
                    replies.append(_answer(runtime, chat))
    restored_seconds, prefilled_seconds = (
        float(np.median([reply.stats.ttft_seconds for reply in replies])) for replies in (restored, prefilled)
    )
    return {
        "tokens": length,
        "disk_mib": disk_bytes / 2**20,
        "restored_tokens": restored[0].stats.cached_prompt_tokens,
        "restored_seconds": restored_seconds,
        "prefilled_seconds": prefilled_seconds,
        "speedup": prefilled_seconds / restored_seconds,
    }


def _answer(runtime: edgespec.Runtime, tokens: Sequence[int]) -> Reply:
    stream = runtime.stream_tokens(tokens, max_tokens=8, seed=1)
    for _ in stream:
        pass
    return stream.reply


if __name__ == "__main__":
    main()
