#!/usr/bin/env python3
"""How soon a saved chat answers again: what the model read of it is on disk, against reading it all again.

    scripts/bench_resume.py                                           # the demo, 1,000 and 10,000 tokens
    scripts/bench_resume.py --target big-target.gguf --lengths 4000   # see scripts/inflate_gguf.py

A chat of some length is answered and left; other runtimes go on with it, one that finds what was kept, and
one that keeps nothing. seconds: to the first token of the answer, loading the model left out.
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

_SAID_NEXT = 20


def main() -> None:
    """Print a row for each length, or all as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--lengths", default="1000,10000", help="tokens of the chats")
    parser.add_argument("--kv-type", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [_row(asked, int(length)) for length in asked.lengths.split(",")]
    if asked.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print(
            "{tokens:,} tokens, {disk_mib:.1f} MiB on disk: {restored_seconds:.3f} s with what was kept"
            " ({restored_tokens:,} tokens), {read_seconds:.3f} s reading it again: {times:.0f} times".format(
                **row
            )
        )


def _row(asked: argparse.Namespace, length: int) -> dict[str, Any]:
    options: dict[str, Any] = {"draft": "none", "method": "none", "kv_type": asked.kv_type}
    options["context"] = length + 100
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_DATA_DIR"] = folder
        with edgespec.load(asked.target, prefix_cache="disk", **options) as runtime:
            chat = np.random.default_rng(length).integers(300, runtime.target.vocab_size, length).tolist()
            chat += _asked(runtime, chat).tokens
            runtime.save_prefix_cache()
            disk_bytes = runtime.memory().prefix_cache.disk_bytes
        chat += chat[:_SAID_NEXT]
        restored: list[Reply] = []
        read: list[Reply] = []
        for _ in range(asked.repeats):  # one after another, so that a machine that slows down is fair to both
            for found, keep in ((restored, "disk"), (read, "none")):
                with edgespec.load(asked.target, prefix_cache=keep, **options) as runtime:
                    found.append(_asked(runtime, chat))
    kept, again = (float(np.median([r.stats.ttft_seconds for r in found])) for found in (restored, read))
    return {
        "tokens": length,
        "disk_mib": disk_bytes / 2**20,
        "restored_tokens": restored[0].stats.cached_prompt_tokens,
        "restored_seconds": kept,
        "read_seconds": again,
        "times": again / kept,
    }


def _asked(runtime: edgespec.Runtime, tokens: Sequence[int]) -> Reply:
    stream = runtime.stream_tokens(tokens, max_tokens=8, seed=1)
    for _ in stream:
        pass
    return stream.reply


if __name__ == "__main__":
    main()
