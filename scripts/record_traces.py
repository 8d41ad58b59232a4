#!/usr/bin/env python3
"""Record where a draft model predicts the target's next token, and with what probability.

    scripts/record_traces.py --output scripts/simulation/recorded.json

The target replies to each prompt with plain decoding. Before each token, the draft model predicts it from all
tokens so far. No times are recorded, because each simulated machine has its own costs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgespec
from edgespec.api.runtime import Runtime
from edgespec.backends import llamacpp
from edgespec.decode.drafter_set import DrafterSet
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.tree_growth import Children, DraftProbs, FixedShape
from edgespec.model.base import LoadOptions
from edgespec.store.catalogue import models_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=models_folder() / "demo-target-q8_0.gguf")
    parser.add_argument("--draft", type=Path, default=models_folder() / "demo-draft-q8_0.gguf")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=Path, default=models_folder() / "eval_prompts.jsonl")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    options = LoadOptions(context_tokens=1024)
    target, draft = (llamacpp.load(str(path), path.stem, options) for path in (args.target, args.draft))
    recorder = RecordingShape()
    drafter = SilentDrafter(draft, target.facts.vocab_size, branches=recorder)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    recorded: list[dict[str, Any]] = []
    with Runtime(target, None, DrafterSet(target, {"model": drafter})) as runtime:
        for temperature in map(float, args.temperatures.split(",")):
            for prompt in map(json.loads, lines):
                recorder.predictions.clear()
                *before, last = [edgespec.Message(**message) for message in prompt["messages"]]
                reply = runtime.chat(messages=before).ask(
                    last.content, method="model", temperature=temperature, max_tokens=args.max_tokens, seed=1
                )
                recorded.append(
                    {
                        "name": prompt["skill"],
                        "temperature": temperature,
                        "prompt_tokens": reply.stats.prompt_tokens,
                        "right": "".join("01"[right] for _, right in recorder.predictions),
                        "sure_percent": [round(100.0 * confidence) for confidence, _ in recorder.predictions],
                    }
                )
    rows = ",\n".join(json.dumps(one, separators=(",", ":")) for one in recorded)
    args.output.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    print(f"{len(recorded)} replies, {args.output.stat().st_size:,} bytes")


class RecordingShape(FixedShape):
    """Drafts one token at a time and records the predictions.

    Attributes:
        predictions: Probability of each drafted token, and whether it was the target's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.predictions: list[tuple[float, bool]] = []

    def grow_level(self, path_probs: Sequence[float], draft_probs: DraftProbs) -> list[Children]:
        draft_probs(0)  # Read the probabilities, because outcomes are recorded only for those that were read.
        return super().grow_level(path_probs, draft_probs)

    def record_outcome(self, probs: NDArray[np.float64], accepted: int | None) -> None:
        self.predictions.append((float(probs[0]), accepted == 0))


class SilentDrafter(ModelDrafter):
    """Drafts one token per round but does not propose it, so that the target uses plain decoding."""

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        draft = super().propose(sampler, acceptance, min(draft_length, 1))
        return TokenTree.chain(draft.tokens[0])


if __name__ == "__main__":
    main()
