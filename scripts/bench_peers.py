#!/usr/bin/env python3
"""edgespec against llama-server (GGUF) or mlx-lm (MLX): the same files, prompts and lengths, as ratios.

    scripts/build_llama_server ../llama
    scripts/bench_peers.py --llama-server ../llama/llama-server --target big.gguf --draft big-draft.gguf
    scripts/bench_peers.py --target demo-mlx --draft demo-mlx-draft --grid none,draft:2,draft:4

Every configuration is a process of its own. All answer a prompt before the next one comes, one after another
in an order that changes from prompt to prompt, and all but the one that answers are held still. Each
temperature and each repeat begins with fresh processes, so no prompt finds anything of itself in a cache.

decode: tokens per second after the first round, by llama-server's own clock and by ours. whole: tokens per
second with the reading of the prompt, by our clock. Both are geometric means over the prompts. The ratios are
to the one configuration of the other program that is fastest on all prompts together, chosen afterwards,
which favours it; their 95 % intervals are a bootstrap over prompts. equal: replies that say the same tokens
as plain decoding of the other program, and of the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from time import monotonic
from typing import TypeAlias

import psutil

import edgespec
from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.pairing import Pair, find_pair
from edgespec.errors import EdgespecError, OptionError
from edgespec.files import replace_when_written
from edgespec.losslessness import Prompt, prompt_tokens, read_prompts
from scripts.peers.configurations import GRID, Configuration, parse, server_flags
from scripts.peers.figures import Measured
from scripts.peers.llama_server import LlamaServer, kernels_of, kernels_of_binary, version_of
from scripts.peers.pool import Peer, Pool
from scripts.peers.replies import Asked
from scripts.peers.report import OURS, report
from scripts.peers.worker import Edgespec, MlxLm, Worker

# A configuration, how it is made, and what it is told.
Program: TypeAlias = tuple[Configuration, Callable[[], Peer], str]

MLX_GRID = "none,draft:1,draft:2,draft:3,draft:4,draft:6,draft:8"


@dataclass(frozen=True)
class Setup:
    """What is compared: how each configuration is made, and what it is told.

    filters: top_k, top_p and min_p of all.
    """

    makers: Mapping[Configuration, Callable[[], Peer]]
    flags: Mapping[Configuration, str]
    versions: Sequence[str]
    filters: tuple[int, float, float]


@dataclass(frozen=True)
class Texts:
    """The prompts as tokens, and the tokens that end a reply."""

    prompts: Sequence[Prompt]
    tokens: Mapping[str, list[int]]
    ends: frozenset[int]


def main() -> None:
    args = _arguments()
    try:
        pair = find_pair(args.target, args.draft, DraftingOptions.of(), None)
        setup = _setup(args, pair)
        texts = _texts(args, pair)
        print("\n".join(setup.versions))
        for configuration, flags in setup.flags.items():
            print(f"  {configuration!s:40} {flags}")
        measured: list[Measured] = []
        _save(args, setup, measured)  # a place that cannot be written to is told now
        # Ended like this, too, no program is left behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            measure(args, setup, texts, _needed_bytes(pair), measured)
        except KeyboardInterrupt:
            print("interrupted; what was measured until now:", file=sys.stderr)
        _save(args, setup, measured)
    except (EdgespecError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    for temperature in dict.fromkeys(each.temperature for each in measured):
        print(report(list(setup.makers), [each for each in measured if each.temperature == temperature]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo", help="a GGUF file or an MLX folder")
    parser.add_argument("--draft", default="auto", help="its draft, or none")
    parser.add_argument("--llama-server", type=Path, help="the binary, for a GGUF target")
    parser.add_argument("--grid", help=f"configurations of the other program; llama-server: {GRID}")
    parser.add_argument(
        "--methods",
        default="none,model:2,model:4,model:8,suffix,auto",
        help="of edgespec, each with a draft length or without",
    )
    parser.add_argument("--acceptance", default="invariant")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    parser.add_argument(
        "--kv-type", help="of the caches in all GGUF programs, such as f16; each its own if not given"
    )
    parser.add_argument("--prompts", type=Path, help="JSONL; by default those that come with edgespec")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every number here, after each prompt")
    return parser.parse_args()


def _setup(args: argparse.Namespace, pair: Pair) -> Setup:
    usual = edgespec.SamplingParams()
    filters = (usual.top_k, usual.top_p, usual.min_p)
    versions = [f"edgespec {edgespec.__version__}"]
    target, draft = str(pair.target.path), str(pair.draft.path) if pair.draft else None
    programs: list[Program] = []
    if pair.target.format == "mlx":
        versions += [f"{name} {_version(name)}" for name in ("mlx", "mlx-lm")]
        programs += _mlx_programs(args, target, draft)
        filters = (0, 1.0, 0.0)  # the programs apply them in different orders
        args.threads = None  # MLX chooses them
    elif args.llama_server:
        versions += [f"llama-server {version_of(args.llama_server)}", *_kernels(args.llama_server)]
        versions.append(f"llama-server {' '.join(_server_flags(args, target))}")
        programs += _server_programs(args, target, draft)
    else:
        versions.append("no --llama-server: edgespec alone")
    programs += _our_programs(args, target, draft)
    makers = {configuration: maker for configuration, maker, _ in programs}
    return Setup(makers, {configuration: told for configuration, _, told in programs}, versions, filters)


def _mlx_programs(args: argparse.Namespace, target: str, draft: str | None) -> Iterator[Program]:
    for name in (args.grid or MLX_GRID).split(","):
        length = _mlx_length(name, draft)
        maker = partial(Worker, MlxLm(target, draft or "none", length))
        yield Configuration("mlx-lm", name), maker, f"--num-draft-tokens {length}" if length else ""


def _server_programs(args: argparse.Namespace, target: str, draft: str | None) -> Iterator[Program]:
    for name in (args.grid or _without_draft(GRID, draft)).split(","):
        own = server_flags(name, draft)
        maker = partial(LlamaServer, args.llama_server, [*_server_flags(args, target), *own])
        yield Configuration("llama-server", name), maker, " ".join(own)


def _server_flags(args: argparse.Namespace, target: str) -> list[str]:
    """Of all configurations: one reply at a time, and nothing kept of the last: it would only cost time."""
    flags = ["--model", target, "--ctx-size", args.context, "--threads", args.threads]
    flags += ["--threads-batch", args.threads, "--parallel", 1, "--cache-ram", 0, "--offline"]
    if args.kv_type:
        flags += ["--cache-type-k", args.kv_type, "--cache-type-v", args.kv_type]
        flags += ["--spec-draft-type-k", args.kv_type, "--spec-draft-type-v", args.kv_type]
    return [*map(str, flags)]


def _our_programs(args: argparse.Namespace, target: str, draft: str | None) -> Iterator[Program]:
    for name in args.methods.split(","):
        method, length = parse(name)
        # A method that needs no draft model is not to pay for one.
        drafted = draft if method == "auto" or "model" in method.split("+") else None
        kv_type = args.kv_type or "auto"
        ours = Edgespec(
            target, drafted or "none", method, length, args.acceptance, args.context, args.threads, kv_type
        )
        told = ", ".join(f"{key}={value}" for key, value in vars(ours).items() if value)
        yield Configuration(OURS, name), partial(Worker, ours), told


def _mlx_length(name: str, draft: str | None) -> int | None:
    """The draft length of a configuration of mlx-lm; None drafts nothing. Raises OptionError."""
    kind, length = parse(name)
    if (kind == "draft" and length and draft) or name == "none":
        return length
    raise OptionError(f"{name!r} is no configuration of mlx-lm", "give none, or draft:LENGTH and a --draft")


def _without_draft(grid: str, draft: str | None) -> str:
    """The default grid, without what needs a draft model where there is none."""
    return ",".join(name for name in grid.split(",") if draft or "draft:" not in name)


def _kernels(binary: Path) -> list[str]:
    """What both were built for; different kernels would be compared otherwise."""
    import llama_cpp

    ours, theirs = kernels_of(llama_cpp.llama_print_system_info().decode()), kernels_of_binary(binary)
    said = [f"llama-cpp-python {_version('llama-cpp-python')}: {ours}"]
    if ours != theirs:
        said.append(
            f"NOT ALIKE: this llama-server has {theirs}; scripts/build_llama_server builds one that is"
        )
    return said


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _texts(args: argparse.Namespace, pair: Pair) -> Texts:
    prompts = read_prompts(args.prompts)[:: args.every]
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same id", "give each its own")
    with edgespec.load(str(pair.target.path), "none", context=args.context, method="none") as runtime:
        tokens = {prompt.name: prompt_tokens(runtime, prompt) for prompt in prompts}
        ends = frozenset(filter(runtime.vocabulary.is_end, range(runtime.target.vocab_size)))
    for name, each in tokens.items():
        if len(each) + args.max_tokens > args.context:
            raise OptionError(
                f"prompt {name} has {len(each)} tokens; with {args.max_tokens} of a reply they do not fit",
                "use a larger --context or a smaller --max-tokens",
            )
    return Texts(prompts, tokens, ends)


def _needed_bytes(pair: Pair) -> int:
    """What must be free before one more configuration is loaded."""
    models = [each.path for each in (pair.target, pair.draft) if each]
    files = [file for path in models for file in (path.rglob("*") if path.is_dir() else [path])]
    return int(1.5 * sum(file.stat().st_size for file in files)) + 2**30


def measure(
    args: argparse.Namespace, setup: Setup, texts: Texts, needed_bytes: int, measured: list[Measured]
) -> None:
    """Every prompt by every configuration, added to `measured`. One that fails is left out from then on."""
    working = list(setup.makers)
    passes = list(product(map(float, args.temperatures.split(",")), range(args.repeats)))
    began, done = monotonic(), 0
    for temperature, repeat in passes:
        with closing(Pool(setup.makers, needed_bytes)) as pool:
            for number, prompt in enumerate(texts.prompts):
                asked = Asked(args.max_tokens, temperature, 1 + number, *setup.filters)
                for configuration in in_turn(working, number, repeat):
                    try:
                        run = pool.ask(configuration, texts.tokens[prompt.name], asked)
                    except EdgespecError as error:
                        print(f"{configuration} is left out: {error}", file=sys.stderr)
                        working.remove(configuration)
                        continue
                    ended = bool(run.tokens) and run.tokens[-1] in texts.ends
                    one = Measured(
                        configuration, prompt.name, prompt.category, temperature, repeat, run, ended
                    )
                    measured.append(one)
                if not working:
                    raise EdgespecError("no configuration is left to be measured", "see the lines above")
                _save(args, setup, measured)
                done += 1
                prompts = len(passes) * len(texts.prompts)
                minutes = (monotonic() - began) / done * (prompts - done) / 60
                print(f"{done} of {prompts} prompts, about {minutes:.0f} min left", file=sys.stderr)


def in_turn(configurations: Sequence[Configuration], number: int, repeat: int) -> list[Configuration]:
    """The order for a prompt: another one begins each time, and every second time it runs backwards."""
    at = (number + repeat) // 2 % len(configurations)
    rotated = [*configurations[at:], *configurations[:at]]
    return rotated if (number + repeat) % 2 == 0 else rotated[::-1]


def _save(args: argparse.Namespace, setup: Setup, measured: Sequence[Measured]) -> None:
    if args.json:
        content = {
            "versions": list(setup.versions),
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "configurations": {str(each): flags for each, flags in setup.flags.items()},
            "measured": [each.to_json() for each in measured],
        }
        with replace_when_written(args.json) as path:
            path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
