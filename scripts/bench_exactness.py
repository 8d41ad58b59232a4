#!/usr/bin/env python3
"""Measure what identical replies cost: compare the settings of `exactness`, interleaved, on each model.

    scripts/bench_exactness.py              # all GGUF files written by scripts/real_models
    scripts/bench_exactness.py --long       # one prompt of 1,900 tokens instead of eight short ones
    scripts/bench_exactness.py big-target.gguf --draft big-draft.gguf --tokens 96

Each model is loaded with `--exactness off`, `auto` and `bits`. The prompts are every third built-in prompt of
`edgespec bench`, so that there is one of each category. All settings reply to a prompt, with plain decoding
(`none`)
and with `auto`, at temperature 0, before the next prompt is used. Their order changes from prompt to prompt.
Nothing is cached between replies.

first load   seconds with an empty data folder, including the trial of the widths. The file was read before.
next load    seconds of the second load with the same data folder
first token  mean over the prompts of the shortest time to the first round's last token
ms/token     geometric mean over the prompts of the shortest time per token after the first round
x off        speed after the first round relative to `off` with the same method, fastest reply of each: the
             geometric mean over the prompts, and the worst and the best prompt
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from time import perf_counter as now
from typing import Any

import edgespec
from edgespec.bench.runs import bench_prompts
from edgespec.errors import OptionError
from edgespec.losslessness.cases import prompt_tokens
from scripts.peers.configurations import rotated_order
from scripts.peers.figures import decode_speed
from scripts.peers.replies import Run, edgespec_reply

_REAL_MODELS = Path(__file__).resolve().parents[1] / "build" / "real-models"
_SETTINGS, _METHODS = ("off", "auto", "bits"), ("none", "auto")
_SHORT_CONTEXT, _WARM_UP_TOKENS = 1024, 4


def main() -> int:
    """Print the results of each model as text or JSON. Return 1 if a model was left out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="the models (default: all GGUF files in build/real-models)")
    parser.add_argument("--draft", default="none", help="the draft model (default: none)")
    parser.add_argument("--tokens", type=int, default=64, help="length of a reply (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="replies of each kind (default: 3)")
    parser.add_argument("--every", type=int, default=3, help="use every nth prompt (default: 3)")
    parser.add_argument(
        "--long", type=int, nargs="?", const=1900, help="instead, use one prompt of this many tokens"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    models = args.models or [*map(str, sorted(_REAL_MODELS.rglob("*.gguf")))]
    if not models:
        raise SystemExit(f"error: {_REAL_MODELS} has no models; run scripts/real_models, or name a model")
    results = []
    for model in models:
        try:
            results.append(_measure(model, args))
        except edgespec.EdgespecError as error:
            print(f"{model} is left out: {error}", file=sys.stderr)
            continue
        if not args.json:
            _print(results[-1])
    if args.json:
        print(json.dumps({"models": results}))
    return int(len(results) < len(models))


def _measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    context = (args.long or _SHORT_CONTEXT) + args.tokens + 1
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def load(draft: str, setting: str, data: str) -> tuple[edgespec.Runtime, float]:
            os.environ["EDGESPEC_DATA_DIR"] = os.environ["EDGESPEC_CACHE_DIR"] = f"{folder}/{data}"
            began = now()
            runtime = edgespec.load(model, draft, exactness=setting, context=context, prefix_cache="none")
            return runtime, now() - began

        # This load also reads the file, so that the first setting measured is not at a disadvantage.
        with load("none", "off", "prompts")[0] as runtime:
            prompts = _prompts(runtime, args)
        loads, runtimes = [], {}
        for setting in _SETTINGS:
            runtime, first_seconds = load(args.draft, setting, setting)
            runtime.close()
            runtime, next_seconds = load(args.draft, setting, setting)
            runtimes[setting] = stack.enter_context(runtime)
            assert runtime.target.exactness
            seconds = {"first_load_seconds": first_seconds, "next_load_seconds": next_seconds}
            loads.append({**runtime.target.exactness.to_json(), **seconds})
        runs = _runs(runtimes, prompts, args)
    rows = [_row(runs, prompts, setting, method) for method, setting in product(_METHODS, _SETTINGS)]
    return {"model": model, "prompts": {k: len(v) for k, v in prompts.items()}, "loads": loads, "rows": rows}


def _prompts(runtime: edgespec.Runtime, args: argparse.Namespace) -> dict[str, list[int]]:
    if not args.long:
        return {each.name: prompt_tokens(runtime, each) for each in bench_prompts()[:: args.every]}
    tokens = [token for prompt in bench_prompts() for token in prompt_tokens(runtime, prompt)]
    # Keep the end, where the model expects to reply.
    return {"long": (tokens * (args.long // len(tokens) + 1))[-args.long :]}


def _runs(
    runtimes: Mapping[str, edgespec.Runtime], prompts: Mapping[str, list[int]], args: argparse.Namespace
) -> Mapping[tuple[str, str, str], list[Run]]:
    """Return the replies by setting, method and prompt."""
    runs: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    cases = [*product(_SETTINGS, _METHODS)]
    warm_up = [(next(iter(prompts)), _WARM_UP_TOKENS)]
    turns = [(name, args.tokens) for _, name in product(range(args.repeats), prompts)]
    for index, (name, max_tokens) in enumerate(warm_up + turns):
        for setting, method in rotated_order(cases, index):
            options = {"method": method, "max_tokens": max_tokens, "temperature": 0.0, "seed": 1}
            run = edgespec_reply(runtimes[setting], prompts[name], options)
            # This also cancels work between replies, which would slow down the other settings.
            runtimes[setting].clear_cache()
            if index:
                runs[setting, method, name].append(run)
    return runs


def _row(
    runs: Mapping[tuple[str, str, str], list[Run]], prompts: Mapping[str, Any], setting: str, method: str
) -> dict[str, Any]:
    def speed(of: str, name: str) -> float:
        return max(decode_speed(run) or 0.0 for run in runs[of, method, name])

    speeds = {name: found for name in prompts if (found := speed(setting, name)) and speed("off", name)}
    if not speeds:
        raise OptionError("all replies are too short to be compared", "use more --tokens or other models")
    ratios = {name: found / speed("off", name) for name, found in speeds.items()}
    waits = [min(run.seconds - run.later_seconds for run in runs[setting, method, name]) for name in prompts]
    return {
        "method": method,
        "setting": setting,
        "first_token_seconds": fmean(waits),
        "milliseconds_per_token": 1e3 / geometric_mean(speeds.values()),
        "ratio": geometric_mean(ratios.values()),
        "worst": min(ratios.items(), key=lambda item: item[1]),
        "best": max(ratios.items(), key=lambda item: item[1]),
    }


def _print(result: Mapping[str, Any]) -> None:
    print(f"{result['model']}: {len(result['prompts'])} prompts, {sum(result['prompts'].values()):,} tokens")
    for each in result["loads"]:
        print("  {requested:4} first load {first_load_seconds:.1f} s,".format(**each), end=" ")
        print("next load {next_load_seconds:.1f} s; {reason}".format(**each))
    print("  method setting  first token  ms/token  x off")
    for row in result["rows"]:
        print("  {method:6} {setting:7} {first_token_seconds:10.3f} s".format(**row), end=" ")
        print("{milliseconds_per_token:9.2f}  {ratio:.3f}".format(**row), end=" ")
        print("(worst {worst[0]} {worst[1]:.3f}, best {best[0]} {best[1]:.3f})".format(**row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
