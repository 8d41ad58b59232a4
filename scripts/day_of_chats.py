#!/usr/bin/env python3
"""A day of chats in a memory that holds three of them: is every reply right, and how much is read again?

    python scripts/day_of_chats.py                                  # the demo
    python scripts/day_of_chats.py --target MODEL --longest 20000 --context 24576 --turns 80

There are some chats, six of them open at a time, one of which is taken at random for a turn; now and then one
is left for good and another begins. They have one system prompt, and a document of some length each. The
memory for texts holds three of the longest; what is over that goes to disk. Every turn is taken again by a
runtime that keeps nothing and reads all.

unequal: replies that are not those of the fresh run. A model of 64 MiB or more rounds a text that was read in
parts over a large cache otherwise than one read whole: near_ties are those that at most one logit of it
explains, violations all others, as in verify. With --exact no reply may be unequal. read: prompt tokens
that the model read. least: those that no text before had, which a memory without bounds would read. whole:
what reading every prompt would come to.
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
from edgespec import Reply, Runtime, SamplingParams
from edgespec.losslessness.rescore import is_near_tie, rescore

SYSTEM_TOKENS = 80
# Narrower than what llama.cpp's kernel for wide passes takes.
PIECE_TOKENS = 48


def main() -> int:
    """Say as JSON how the day went; 1 where a reply was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--turns", type=int, default=160)
    parser.add_argument("--shortest", type=int, default=200)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kv-type", default="auto")
    parser.add_argument("--exact", action="store_true", help="no reply may be unequal, rounding or not")
    parser.add_argument(
        "--budget", action="store_true", help="give all of the pair one budget that has room for three texts"
    )
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_DATA_DIR"] = folder
        told = _day(asked)
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    return 1 if told["violations"] else 0


def _day(asked: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"draft": asked.draft, "context": asked.context, "method": asked.method}
    options |= {"kv_type": asked.kv_type, "exact": asked.exact}
    with edgespec.load(asked.target, prefix_cache="none", **options) as fresh:
        three = 3 * asked.longest * fresh.target.kv_bytes // fresh.target.context_tokens
        room: dict[str, Any] = {"prefix_cache_memory": three}
        if asked.budget and fresh.plan:
            room = {"memory": fresh.plan.planned_bytes("memory") + three}
        with edgespec.load(asked.target, prefix_cache="disk", **room, **options) as runtime:
            told = _talked(runtime, fresh, asked)
            kept = runtime.memory().prefix_cache
            return {**told, "memory_for_texts_bytes": kept.memory_limit_bytes}


def _talked(runtime: Runtime, fresh: Runtime, asked: argparse.Namespace) -> dict[str, Any]:
    luck = random.Random(asked.seed)
    vocab = runtime.target.vocab_size
    system = _words(asked.seed, SYSTEM_TOKENS, vocab)
    # Lengths from the shortest to the longest, as many short as long ones by their logarithm.
    lengths = np.geomspace(asked.shortest, asked.longest, asked.chats).astype(int).tolist()
    luck.shuffle(lengths)
    waiting = [system + _words(1000 + i, length - SYSTEM_TOKENS, vocab) for i, length in enumerate(lengths)]
    opened = [waiting.pop() for _ in range(min(6, len(waiting)))]
    before: list[list[int]] = []
    told = {"turns": 0, "unequal": 0, "near_ties": 0, "violations": 0}
    told |= {"read": 0, "least": 0, "whole": 0, "most_memory_bytes": 0}
    for turn in range(asked.turns):
        if waiting and turn and turn % max(1, asked.turns // asked.chats) == 0:
            opened[luck.randrange(len(opened))] = waiting.pop()
        place = luck.randrange(len(opened))
        chat = opened[place] + _words(5000 + turn, luck.randint(5, 40), vocab)
        if len(chat) + asked.max_tokens >= asked.context:
            chat = chat[: asked.shortest]
        how: dict[str, Any] = {"seed": turn, "max_tokens": asked.max_tokens, "temperature": 0.8 * (turn % 2)}
        reply = _asked(runtime, chat, **how)
        fresh.clear_cache()
        plain = _asked(fresh, chat, method="none", **how)
        if reply.tokens != plain.tokens:
            told["unequal"] += 1
            excused = _rounded(fresh, chat, plain, reply, how) and not asked.exact
            told["near_ties" if excused else "violations"] += 1
        told["turns"] += 1
        told["whole"] += len(chat)
        told["read"] += len(chat) - reply.stats.cached_prompt_tokens
        told["least"] += len(chat) - max((_shared(chat, text) for text in before), default=0)
        told["most_memory_bytes"] = max(told["most_memory_bytes"], runtime.memory().prefix_cache.memory_bytes)
        opened[place] = chat + list(reply.tokens)
        before.append(opened[place])
    kept = runtime.memory().prefix_cache
    return {
        **told,
        "hits": kept.hits,
        "disk_bytes": kept.disk_bytes,
        "texts": kept.sequences,
        "notice": kept.notice,
    }


def _rounded(fresh: Runtime, chat: list[int], plain: Reply, other: Reply, how: dict[str, Any]) -> bool:
    """Whether rounding alone parts two replies: as far as narrow passes over a text are from wide ones."""
    at = _shared(plain.tokens, other.tokens)
    if at == min(len(plain.tokens), len(other.tokens)):
        return False
    told = plain.tokens[:at]
    with fresh.borrowed_target() as target:
        rescored = rescore(target, chat, told, [2, 4], batch_sizes=[PIECE_TOKENS])
    params = SamplingParams(temperature=how["temperature"])
    history = [*chat, *told]
    tie = is_near_tie(rescored, params, how["seed"], history, plain.tokens[at], other.tokens[at])
    sys.stderr.write(
        f"unequal after {len(chat)} + {at} tokens: passes differ by {rescored.error:.2f} logits there,"
        f" {'a near-tie' if tie else 'a violation'}\n"
    )
    return tie


def _words(seed: int, count: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(vocab // 8, vocab, count).tolist()  # type: ignore[no-any-return]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _asked(runtime: Runtime, tokens: Sequence[int], **options: Any) -> Reply:
    stream = runtime.stream_tokens(tokens, **options)
    for _ in stream:
        pass
    return stream.reply


if __name__ == "__main__":
    raise SystemExit(main())
