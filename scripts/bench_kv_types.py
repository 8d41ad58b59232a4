#!/usr/bin/env python3
"""Measure how much a quantised KV cache changes a model's predictions on held-out prompts.

    scripts/bench_kv_types.py --target demo

Replies are generated with an f32 cache. Each cache type then predicts the same replies token by token.

nats         mean Kullback-Leibler divergence from the predictions with f32
same         share of positions with the same most likely token
perplexity   perplexity of the replies, which were generated with f32

Flash attention is disabled for f32, because it would read the cache as f16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgespec
from edgespec.chat.message import Message
from edgespec.chat.prompt import PromptBuilder
from edgespec.engine.tree import TokenTree
from edgespec.store.catalogue import models_folder

_MAX_ROWS = 64  # Maximum reply length in tokens. Each reply is scored in a single pass.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--types", default="f16,f16/bf16,q8_0,q5_0,q4_0")
    parser.add_argument("--prompts", type=Path, default=models_folder() / "eval_prompts.jsonl")
    parser.add_argument("--max-tokens", type=int, default=_MAX_ROWS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["messages"][-1]["content"] for line in lines]
    texts: list[tuple[list[int], list[int]]] = []
    with _loaded(args.target, "f32") as runtime:
        builder = PromptBuilder(runtime.template, runtime.vocabulary)
        for prompt in prompts:
            written = builder.build([Message("user", prompt)]).tokens
            stream = runtime.stream_tokens(
                written, max_tokens=min(args.max_tokens, _MAX_ROWS), temperature=0.0
            )
            for _ in stream:
                pass
            texts.append((written, list(stream.reply.tokens)))
        exact = _predictions(runtime, texts)
    rows = []
    for kv_type in ["f32", *args.types.split(",")]:
        with _loaded(args.target, kv_type) as runtime:
            found = _predictions(runtime, texts)
        divergence = [(np.exp(a) * (a - b)).sum(axis=1) for a, b in zip(exact, found, strict=True)]
        same = [a.argmax(axis=1) == b.argmax(axis=1) for a, b in zip(exact, found, strict=True)]
        own = [rows_[range(len(reply)), reply] for rows_, (_, reply) in zip(found, texts, strict=True)]
        rows.append(
            {
                "kv_type": kv_type,
                "tokens": sum(map(len, same)),
                "nats": float(np.concatenate(divergence).mean()),
                "same": float(np.concatenate(same).mean()),
                "perplexity": float(np.exp(-np.concatenate(own).mean())),
            }
        )
    if args.json:
        print(json.dumps(rows))
        return
    print("| cache | tokens | nats | same | perplexity |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print("| {kv_type} | {tokens} | {nats:.5f} | {same:.2%} | {perplexity:.4f} |".format(**row))


def _loaded(target: str, kv_type: str) -> Any:
    flash_attention = "off" if kv_type == "f32" else "auto"
    return edgespec.load(
        target, "none", kv_type=kv_type, method="none", prefix_cache="none", flash_attention=flash_attention
    )


def _predictions(runtime: Any, texts: list[tuple[list[int], list[int]]]) -> list[NDArray[np.float64]]:
    """Return the log-probabilities at each position of each reply, float64 [tokens, vocab]."""
    found = []
    with runtime.borrowed_target() as model:
        for prompt, reply in texts:
            model.truncate(0)
            model.prefill(prompt[:-1])
            tree = TokenTree.chain(prompt[-1], reply[:-1])
            rows = model.verify(tree)
            logits = np.array([rows.at(i, np.arange(rows.vocab_size)) for i in range(tree.width)])
            logits -= logits.max(axis=1, keepdims=True)
            found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        model.truncate(0)
    return found


if __name__ == "__main__":
    main()
