#!/usr/bin/env python3
"""Simulate a day of chats with little memory for the prefix cache, and check every reply.

    python scripts/day_of_chats.py                                  # the demo
    python scripts/day_of_chats.py --target MODEL --longest 20000 --context 24576 --turns 80

Six chats are open at a time, and each turn goes to one of them at random. From time to time a new chat
replaces an open one. All chats have the same system prompt, followed by a document of random tokens. The
prefix cache holds three of the longest chats in memory and moves the rest to disk. Every turn is repeated
by a second runtime without a prefix cache.

different           replies that differ from those without a prefix cache
rounding            different replies whose logits change if the prompt is prefilled in parts: models of
                    64 MiB or more then round differently
faults              all other different replies; with --exact, all different replies
largest_difference  largest difference in logits between prompts that are prefilled in one part and in several
prompt_tokens       tokens of all prompts
prefilled_tokens    prompt tokens that were not in the prefix cache
new_tokens          prompt tokens after the longest prefix shared with any earlier chat, which even an
                    unlimited prefix cache would have to prefill
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

import edgespec
from edgespec import Reply, Runtime
from edgespec.losslessness.replay import Alone, largest_difference, logit_rows

OPEN_CHATS = 6
CACHED_CHATS = 3
SYSTEM_TOKENS = 80
# Prefill batch size for measuring the rounding error. llama.cpp uses a different kernel for larger batches,
# so the result shows how much the two kernels differ.
BATCH_TOKENS = 48


def main() -> int:
    """Print the results as JSON. Return 1 if there was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--chats", type=int, default=40, help="number of chats (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=160, help="number of turns (default: %(default)s)")
    parser.add_argument("--shortest", type=int, default=200, help="tokens of the shortest first prompt")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest first prompt")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kv-type", default="auto")
    parser.add_argument(
        "--exact", action="store_true", help="load with exact=True; every different reply is a fault"
    )
    parser.add_argument(
        "--budget",
        action="store_true",
        help="set one memory budget for the models and the prefix cache, with room for three chats",
    )
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_DATA_DIR"] = os.environ["EDGESPEC_CACHE_DIR"] = folder
        results = _run(args)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 1 if results["faults"] else 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"draft": args.draft, "context": args.context, "method": args.method}
    options |= {"kv_type": args.kv_type, "exact": args.exact}
    with edgespec.load(args.target, prefix_cache="none", **options) as uncached:
        chat_bytes = args.longest * uncached.target.kv_bytes // uncached.target.context_tokens
        limits: dict[str, Any] = {"prefix_cache_memory": CACHED_CHATS * chat_bytes}
        if args.budget and uncached.plan:
            limits = {"memory": uncached.plan.planned_bytes("memory") + CACHED_CHATS * chat_bytes}
        with edgespec.load(args.target, prefix_cache="disk", **limits, **options) as runtime:
            results = _talk(runtime, uncached, args)
            limit_bytes = runtime.memory().prefix_cache.memory_limit_bytes
            return {**results, "memory_limit_bytes": limit_bytes}


def _talk(runtime: Runtime, uncached: Runtime, args: argparse.Namespace) -> dict[str, Any]:
    choices = random.Random(args.seed)
    vocab_size = runtime.target.vocab_size
    system = _random_tokens(args.seed, SYSTEM_TOKENS, vocab_size)
    lengths = np.geomspace(args.shortest, args.longest, args.chats).astype(int).tolist()
    choices.shuffle(lengths)
    unopened = [
        system + _random_tokens(1000 + i, length - SYSTEM_TOKENS, vocab_size)
        for i, length in enumerate(lengths)
    ]
    opened = [unopened.pop() for _ in range(min(OPEN_CHATS, len(unopened)))]
    earlier: list[list[int]] = []
    results: dict[str, Any] = {"turns": 0, "different": 0, "rounding": 0, "faults": 0}
    results["largest_difference"] = 0.0
    results |= {"prompt_tokens": 0, "prefilled_tokens": 0, "new_tokens": 0, "max_memory_bytes": 0}
    for turn in range(args.turns):
        if unopened and turn and turn % max(1, args.turns // args.chats) == 0:
            opened[choices.randrange(len(opened))] = unopened.pop()
        index = choices.randrange(len(opened))
        prompt = opened[index] + _random_tokens(5000 + turn, choices.randint(5, 40), vocab_size)
        if len(prompt) + args.max_tokens >= args.context:
            prompt = prompt[: args.shortest]
        sampling: dict[str, Any] = {"seed": turn, "temperature": 0.8 * (turn % 2)}
        reply = _reply(runtime, prompt, max_tokens=args.max_tokens, **sampling)
        uncached.clear_cache()
        expected = _reply(uncached, prompt, max_tokens=args.max_tokens, method="none", **sampling)
        if reply.tokens != expected.tokens:
            results["different"] += 1
            error = _rounding(uncached, prompt, expected, reply)
            results["largest_difference"] = max(results["largest_difference"], error)
            results["rounding" if error and not args.exact else "faults"] += 1
        results["turns"] += 1
        results["prompt_tokens"] += len(prompt)
        results["prefilled_tokens"] += len(prompt) - reply.stats.cached_prompt_tokens
        results["new_tokens"] += len(prompt) - max((_shared(prompt, other) for other in earlier), default=0)
        cache = runtime.memory().prefix_cache
        results["max_memory_bytes"] = max(results["max_memory_bytes"], cache.memory_bytes)
        opened[index] = prompt + list(reply.tokens)
        earlier.append(opened[index])
    cache = runtime.memory().prefix_cache
    return {
        **results,
        "hits": cache.hits,
        "disk_bytes": cache.disk_bytes,
        "sequences": cache.sequences,
        "notice": cache.notice,
    }


def _rounding(uncached: Runtime, prompt: list[int], expected: Reply, other: Reply) -> float:
    """Return how much the logits of a reply change if its prompt is prefilled in parts.

    The result is 0 if one of the replies ends before they differ, because rounding cannot explain that.
    """
    position = _shared(expected.tokens, other.tokens)
    if position == min(len(expected.tokens), len(other.tokens)):
        return 0.0
    shared = expected.tokens[:position]
    with uncached.borrowed_target() as target:
        whole = logit_rows(target, prompt, shared)
        error = largest_difference(whole, logit_rows(target, prompt, shared, Alone(BATCH_TOKENS)))
    sys.stderr.write(
        f"replies to a prompt of {len(prompt)} tokens differ at token {position}: prefilling the prompt in"
        f" parts changes the logits by {error:.2f}\n"
    )
    return error


def _random_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(vocab_size // 8, vocab_size, count)
    return tokens.tolist()  # type: ignore[no-any-return]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reply(runtime: Runtime, tokens: Sequence[int], **options: Any) -> Reply:
    stream = runtime.stream_tokens(tokens, **options)
    for _ in stream:
        pass
    return stream.reply


if __name__ == "__main__":
    raise SystemExit(main())
