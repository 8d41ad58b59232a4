#!/usr/bin/env python3
"""Compare how many simple questions several models answer correctly, and how fast they generate.

Each model answers every question in `models/simple_questions.jsonl` with several seeds. An answer is correct
if it contains an accepted answer as a whole word, ignoring case. The models take turns, so that other
programs slow all of them down alike. Speeds are medians without speculation.

    .venv/bin/python scripts/bench_answers.py build/real-models/smollm2-*.gguf
    .venv/bin/python scripts/bench_answers.py --temperature 0 --seeds 1 --print smollm2 demo
"""

from __future__ import annotations

import argparse
import json
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import edgespec

_QUESTIONS = Path(__file__).resolve().parent.parent / "models" / "simple_questions.jsonl"


@dataclass
class Score:
    """A model's results: for each question, the number of correct replies, and the speed of each reply."""

    correct: list[int]
    tokens_per_second: list[float] = field(default_factory=list)


def is_correct(reply: str, answers: list[str]) -> bool:
    """Return whether a reply contains one of the accepted answers as a whole word, ignoring case."""
    return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="model references, such as paths or catalogue names")
    parser.add_argument("--questions", type=Path, default=_QUESTIONS, help="JSON Lines file of questions")
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of replies to each question (default: 5)"
    )
    # The defaults are the settings that the card of SmolLM2-Instruct recommends.
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--print", action="store_true", dest="prints", help="also print every reply")
    args = parser.parse_args()

    lines = args.questions.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    scores = {model: Score([0] * len(questions)) for model in args.models}
    with ExitStack() as stack:
        runtimes = {
            model: stack.enter_context(edgespec.load(model, draft="none", method="none", context=1024))
            for model in args.models
        }
        for at, question in enumerate(questions):
            for seed in range(args.seeds):
                for model, runtime in runtimes.items():
                    reply = runtime.generate(
                        question["question"],
                        max_tokens=args.max_tokens,
                        temperature=args.temperature,
                        top_p=args.top_p,
                        seed=seed,
                    )
                    correct = is_correct(reply.text, question["answers"])
                    scores[model].correct[at] += correct
                    if reply.stats.tokens_per_second:
                        scores[model].tokens_per_second.append(reply.stats.tokens_per_second)
                    if args.prints:
                        print(f"{model}, seed {seed}, {'right' if correct else 'wrong'}: {reply.text!r}")

    print("| model | right answers | questions right with most seeds | tokens/s |")
    print("|---|---|---|---|")
    for model, score in scores.items():
        share = sum(score.correct) / (len(questions) * args.seeds)
        mostly = sum(2 * count > args.seeds for count in score.correct)
        speed = median(score.tokens_per_second)
        print(f"| {Path(model).name} | {share:.0%} | {mostly} of {len(questions)} | {speed:.0f} |")


if __name__ == "__main__":
    main()
