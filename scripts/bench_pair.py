#!/usr/bin/env python3
"""Compare the speed of methods with plain decoding on one target, prompt by prompt.

    scripts/bench_pair.py --target big-target.gguf --draft big-draft.gguf --draft-lengths 3,4,6
    scripts/bench_pair.py --target demo --methods model,ngram,model+ngram --skills copy,edit

Every prompt is answered with plain decoding and then with each method. Speed-ups compare the time per token
on the same prompt, excluding prefill. Replies with different tokens are counted.

v           cost of a verify pass, in target steps
c           cost of a drafted token, in target steps
predicted   tokens per pass / (drafted tokens per pass * c + v): the speed-up if sampling, rollback and
            the engine's own work took no time
share       measured speed-up / predicted
limit       predicted speed-up if every drafted token had been accepted
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import edgespec
from edgespec.store.catalogue import models_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--methods", default="model", help="such as model,suffix (default: model)")
    parser.add_argument("--draft-lengths", default="4", help="such as 3,4,6 (default: 4)")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--acceptance", default="invariant")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=Path, default=models_folder() / "eval_prompts.jsonl")
    parser.add_argument("--skills", help="only prompts of these skills, such as copy,edit")
    parser.add_argument("--every", type=int, default=1, help="use every nth prompt")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="additional options for edgespec.load, as JSON"
    )
    args = parser.parse_args()

    skills = set(args.skills.split(",")) if args.skills else None
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [prompt for prompt in prompts if not skills or prompt["skill"] in skills][:: args.every]
    methods = args.methods.split(",")
    configs = [(method, int(k)) for method in methods for k in args.draft_lengths.split(",")]
    with edgespec.load(
        args.target, args.draft, context=1024, methods=tuple(methods), **args.options
    ) as runtime:
        print(
            f"{_describe(runtime.target)}, draft {_describe(runtime.draft) if runtime.draft else 'none'},"
            f" {len(prompts)} prompts"
        )
        for temperature in map(float, args.temperatures.split(",")):
            options = {"max_tokens": args.max_tokens, "temperature": temperature, "seed": 1}
            _compare(runtime, prompts, configs, options, args.acceptance)


def _describe(facts: edgespec.ModelFacts) -> str:
    return f"{facts.name} ({facts.parameters / 1e6:,.0f} M parameters, {facts.quantisation})"


def _compare(
    runtime: edgespec.Runtime,
    prompts: Sequence[dict[str, Any]],
    configs: Sequence[tuple[str, int]],
    options: dict[str, Any],
    acceptance: str,
) -> None:
    plain: list[edgespec.Reply] = []
    replies: dict[tuple[str, int], list[edgespec.Reply]] = defaultdict(list)
    for prompt in prompts:
        plain.append(_reply(runtime, prompt, method="none", **options))
        for config in configs:
            method, length = config
            replies[config].append(
                _reply(runtime, prompt, method=method, draft_length=length, acceptance=acceptance, **options)
            )
    speed = statistics.geometric_mean(reply.stats.tokens_per_second or 0.0 for reply in plain)
    print(f"T {options['temperature']:g}: plain {speed:.1f} tokens/s")
    skills = [prompt["skill"] for prompt in prompts]
    for (method, length), of_config in replies.items():
        print(f"  {method}, draft length {length}: {_summary(skills, plain, of_config)}")


def _reply(runtime: edgespec.Runtime, prompt: dict[str, Any], **options: Any) -> edgespec.Reply:
    *history, last = [edgespec.Message(**message) for message in prompt["messages"]]
    return runtime.chat(messages=history).ask(last.content, **options)


def _summary(
    skills: Sequence[str], plain: Sequence[edgespec.Reply], drafted_replies: Sequence[edgespec.Reply]
) -> str:
    """Return the report of one method and draft length."""
    by_skill: dict[str, list[float]] = defaultdict(list)
    for skill, baseline, reply in zip(skills, plain, drafted_replies, strict=True):
        ratio = (reply.stats.tokens_per_second or 0.0) / (baseline.stats.tokens_per_second or 1.0)
        by_skill[skill].append(ratio)
    means = {skill: statistics.geometric_mean(ratios) for skill, ratios in by_skill.items()}
    worst = min(ratio for ratios in by_skill.values() for ratio in ratios)
    mean = statistics.geometric_mean(means.values())
    step = _sum(plain, "decode_seconds") / _sum(plain, "decoded_tokens")
    passes, emitted = _sum(drafted_replies, "target_passes"), _sum(drafted_replies, "decoded_tokens")
    drafted, accepted = _sum(drafted_replies, "drafted_tokens"), _sum(drafted_replies, "accepted_tokens")
    v = _sum(drafted_replies, "verify_seconds") / passes / step
    c = _sum(drafted_replies, "draft_seconds") / max(1, drafted) / step
    cost = drafted / passes * c + v
    differ = sum(a.tokens != b.tokens for a, b in zip(plain, drafted_replies, strict=True))
    stats = drafted_replies[0].stats
    return (
        f"{mean:.2f}x plain decoding (geometric mean of {len(means)} skills; worst reply {worst:.2f}x)\n"
        f"    drafted {drafted}, accepted {accepted} ({accepted / max(1, drafted):.3f}),"
        f" {emitted / passes:.2f} tokens per pass, v {v:.2f}, c {c:.3f},"
        f" predicted {emitted / passes / cost:.2f}x, share {mean * cost * passes / emitted:.2f},"
        f" limit {(drafted / passes + 1) / cost:.2f}x\n"
        f"    extra weights {stats.draft_weight_bytes:,} bytes, extra cache {stats.draft_kv_bytes:,} bytes,"
        f" rollback {_sum(drafted_replies, 'rollback_seconds') / passes * 1e3:.2f} ms per pass,"
        f" replies that differ from plain decoding: {differ}\n"
        "    " + ", ".join(f"{skill} {ratio:.2f}x" for skill, ratio in sorted(means.items()))
    )


def _sum(replies: Iterable[edgespec.Reply], name: str) -> Any:
    return sum(getattr(reply.stats, name) for reply in replies)


if __name__ == "__main__":
    main()
