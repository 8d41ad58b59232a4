#!/usr/bin/env python3
"""Compare the speed of edgespec on MLX with that of mlx-lm, in interleaved runs.

    scripts/bench_mlx.py --target demo-mlx --draft demo-mlx-draft --draft-lengths 2,4

Both programs answer the same prompts with the same weights and take turns going first. Plain decoding is
compared with `mlx_lm.stream_generate`, and speculative decoding with the same function and a draft model.
Ratios compare the time per token after the first one. On a CPU, both programs compute in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load as load_mlx_lm

import edgespec
from edgespec.store.catalogue import models_folder
from edgespec.store.reference import resolve
from scripts.peers.replies import Run, TokenClock, edgespec_reply


def load_with_mlx_lm(reference: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer with mlx-lm, in float32 if MLX runs on the CPU."""
    model, tokenizer, *_ = load_mlx_lm(str(resolve(reference).path))
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model, tokenizer


def mlx_lm_reply(model: Any, tokenizer: Any, prompt: list[int], options: dict[str, Any]) -> Run:
    """Generate a reply with mlx-lm."""
    tokens, accepted, clock = [], 0, TokenClock()
    for chunk in stream_generate(model, tokenizer, prompt, **options):
        clock.add(1, chunk.from_draft)
        tokens.append(chunk.token)
        accepted += chunk.from_draft
    # Count passes by the target's own tokens. Each pass ends with one, unless the length limit cuts it off.
    return clock.finish(tokens, accepted, len(tokens) - accepted + chunk.from_draft)


def compare(args: argparse.Namespace, programs: Programs, temperature: float) -> None:
    """Compare plain decoding and each draft length at one temperature, with both acceptance rules."""
    sampler = make_sampler(temp=temperature)
    # mlx-lm applies no sampling filters by default, so edgespec must not either.
    base = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": args.max_tokens}
    print(f"temperature {temperature:g}, {len(programs.prompts)} prompts, up to {args.max_tokens} tokens")
    plain = {"max_tokens": args.max_tokens, "sampler": sampler}
    report("plain", *programs.measure(plain, {**base, "method": "none"}))
    for length in map(int, args.draft_lengths.split(",")):
        drafted = {**plain, "draft_model": programs.draft, "num_draft_tokens": length}
        for rule in ("invariant", "rejection") if temperature else ("invariant",):
            edgespec_options = {**base, "method": "model", "draft_length": length, "acceptance": rule}
            report(f"draft length {length}, {rule}", *programs.measure(drafted, edgespec_options))


@dataclass
class Programs:
    """Both programs, loaded with the same weights, and the prompts."""

    runtime: edgespec.Runtime
    model: Any
    draft: Any
    tokenizer: Any
    prompts: list[list[int]]

    def measure(
        self, mlx_lm_options: dict[str, Any], edgespec_options: dict[str, Any]
    ) -> tuple[list[Run], list[Run]]:
        """Answer all prompts with both programs, alternating which one goes first."""
        mlx_lm_runs, edgespec_runs = [], []
        for number, prompt in enumerate(self.prompts):
            mx.random.seed(number)
            for edgespec_turn in (True, False) if number % 2 else (False, True):
                if edgespec_turn:
                    edgespec_runs.append(
                        edgespec_reply(self.runtime, prompt, {**edgespec_options, "seed": number})
                    )
                else:
                    mlx_lm_runs.append(mlx_lm_reply(self.model, self.tokenizer, prompt, mlx_lm_options))
        return mlx_lm_runs, edgespec_runs


def report(title: str, mlx_lm_runs: list[Run], edgespec_runs: list[Run]) -> None:
    """Print speed ratios. Above 1, edgespec is faster."""
    ratios = [
        a.seconds_per_token / b.seconds_per_token for a, b in zip(mlx_lm_runs, edgespec_runs, strict=True)
    ]
    same = sum(a.tokens == b.tokens for a, b in zip(mlx_lm_runs, edgespec_runs, strict=True))
    print(
        f"  {title:28} edgespec / mlx-lm speed: median {statistics.median(ratios):.3f},"
        f" geometric mean {statistics.geometric_mean(ratios):.3f};"
        f" tokens per pass {rate(edgespec_runs):.2f} against {rate(mlx_lm_runs):.2f};"
        f" {same} of {len(edgespec_runs)} replies equal"
    )


def rate(runs: list[Run]) -> float:
    """Return tokens per target pass."""
    return sum(len(run.tokens) for run in runs) / sum(run.passes for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo-mlx")
    parser.add_argument("--draft", default="demo-mlx-draft")
    parser.add_argument("--draft-lengths", default="2,4")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=Path, default=models_folder() / "eval_prompts.jsonl")
    parser.add_argument("--every", type=int, default=3, help="use every nth prompt")
    args = parser.parse_args()

    with edgespec.load(args.target, args.draft, context=1024) as runtime:
        model, tokenizer = load_with_mlx_lm(args.target)
        draft, _ = load_with_mlx_lm(args.draft)
        prompts = [
            tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True)
            for line in args.prompts.read_text().splitlines()[:: args.every]
        ]
        programs = Programs(runtime, model, draft, tokenizer, prompts)
        for temperature in map(float, args.temperatures.split(",")):
            compare(args, programs, temperature)


if __name__ == "__main__":
    main()
