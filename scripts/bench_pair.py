#!/usr/bin/env python3
"""Speculative against plain decoding of one pair, interleaved prompt by prompt, as ratios.

    scripts/bench_pair.py --target big-target.gguf --draft big-draft.gguf --draft-lengths 3,4,6

Every prompt is decoded plainly and with each draft length right after one another; a ratio compares times per
token of the same prompt, prefill not counted. The tokens of all sides are compared as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import edgespec
from edgespec.catalog.catalogue import models_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--method", default="model")
    parser.add_argument("--draft-lengths", default="4")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--acceptance", default="invariant")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=Path, default=models_folder() / "eval_prompts.jsonl")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    args = parser.parse_args()

    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()][:: args.every]
    lengths = [int(k) for k in args.draft_lengths.split(",")]
    with edgespec.load(args.target, args.draft, context=1024) as runtime:
        print(
            f"{runtime.target.description}, method {args.method},"
            f" draft {runtime.draft.description if runtime.draft else 'none'}"
        )
        for temperature in map(float, args.temperatures.split(",")):
            plain_speed: list[float] = []
            rows: dict[int, list[edgespec.Reply]] = {k: [] for k in lengths}
            ratios: dict[int, list[float]] = {k: [] for k in lengths}
            different = 0
            for prompt in prompts:
                chat = runtime.chat(messages=[edgespec.Message(**m) for m in prompt["messages"][:-1]])
                options = {"max_tokens": args.max_tokens, "temperature": temperature, "seed": 1}
                said = prompt["messages"][-1]["content"]
                plain = chat.ask(said, method="none", **options)
                plain_speed.append(plain.stats.tokens_per_second or 0.0)
                for k in lengths:
                    chat = runtime.chat(messages=[edgespec.Message(**m) for m in prompt["messages"][:-1]])
                    reply = chat.ask(
                        said, method=args.method, draft_length=k, acceptance=args.acceptance, **options
                    )
                    different += reply.tokens != plain.tokens
                    rows[k].append(reply)
                    ratios[k].append((reply.stats.tokens_per_second or 0.0) / plain_speed[-1])
            print(
                f"T {temperature:g}: plain {statistics.geometric_mean(plain_speed):.1f} tokens/s, "
                f"{len(prompts)} prompts, replies that differ from plain: {different}"
            )
            for k in lengths:
                drafted = sum(r.stats.drafted_tokens for r in rows[k])
                accepted = sum(r.stats.accepted_tokens for r in rows[k])
                emitted = sum(r.stats.generated_tokens for r in rows[k])
                passes = sum(r.stats.target_passes for r in rows[k])
                print(
                    f"  draft length {k:2}: {statistics.geometric_mean(ratios[k]):.2f}x plain "
                    f"(geometric mean; worst {min(ratios[k]):.2f}x), "
                    f"acceptance {accepted / max(1, drafted):.3f}, "
                    f"tokens per pass {emitted / passes:.2f}"
                )


if __name__ == "__main__":
    main()
