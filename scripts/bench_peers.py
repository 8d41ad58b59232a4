#!/usr/bin/env python3
"""Compare the speed of edgespec with llama-server (GGUF) or mlx-lm (MLX) on the same files and prompts.

    scripts/build_llama_server ../llama
    scripts/bench_peers.py --llama-server ../llama/llama-server --target big.gguf --draft big-draft.gguf
    scripts/bench_peers.py --target demo-mlx --draft demo-mlx-draft --grid none,draft:2,draft:4

Each configuration runs in its own process. All configurations answer a prompt before the next prompt is used,
in an order that changes from prompt to prompt. While one runs, the others are suspended. New processes are
started for each temperature and repeat, so no prompt is in a prefix cache.

If a prompt has a JSON schema, all programs constrain the reply to it. Their texts can still differ, because
llama-server allows other whitespace.

decode      tokens per second after the first round, as measured by llama-server or this script
total       tokens per second including prefill, as measured by this script
equal       replies with the same tokens as plain decoding by the other program, and by the same program

Speeds are geometric means over the prompts. Ratios are relative to the configuration of the other program
that was fastest over all prompts. Choosing it in hindsight favours the other program. The 95% confidence
intervals of the ratios are bootstrapped over prompts.

The exit status is 130 after an interrupt, and 1 if a configuration was left out because it failed. In both
cases, the results so far are printed and saved.
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
from typing import Literal

import psutil

import edgespec
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.weight_layouts import AMX, choose_layouts
from edgespec.errors import EdgespecError, OptionError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import ModelPair, find_pair
from edgespec.losslessness.cases import Prompt, prompt_tokens, read_prompts
from edgespec.options.methods import head_names
from edgespec.system.files import replace_when_written
from scripts.bench_busy import other_program
from scripts.peers.configurations import GRID, Configuration, parse, rotated_order, server_flags
from scripts.peers.figures import MeasuredReply
from scripts.peers.llama_server import LlamaServer, binary_features, binary_version, enabled_features
from scripts.peers.pool import Peer, Pool
from scripts.peers.replies import GenerationOptions
from scripts.peers.tables import EDGESPEC, report
from scripts.peers.worker import EdgespecProgram, MlxLmProgram, Worker

TREES = "/trees"
MLX_GRID = "none,draft:1,draft:2,draft:3,draft:4,draft:6,draft:8"


@dataclass(frozen=True)
class Contestant:
    """One configuration to measure.

    Attributes:
        configuration: The program and its configuration.
        make: Creates the program.
        settings: Its flags or options, for the report.
    """

    configuration: Configuration
    make: Callable[[], Peer]
    settings: str


@dataclass(frozen=True)
class Setup:
    """The configurations to compare.

    Attributes:
        contestants: The configurations, in the order of the report.
        versions: Lines of the report with versions and common flags.
        filters: top_k, top_p and min_p of all programs.
    """

    contestants: Sequence[Contestant]
    versions: Sequence[str]
    filters: tuple[int, float, float]

    @property
    def configurations(self) -> list[Configuration]:
        return [contestant.configuration for contestant in self.contestants]


@dataclass(frozen=True)
class PromptSet:
    """The prompts, their tokens by name, and the tokens that end a reply."""

    prompts: Sequence[Prompt]
    tokens: Mapping[str, list[int]]
    end_tokens: frozenset[int]


def main() -> int:
    """Measure the configurations and print the report. Return 0 if there are results of all of them."""
    args, status = _arguments(), 0
    try:
        pair = find_pair(args.target, args.draft, DraftingOptions.of(), None)
        setup = _setup(args, pair)
        prompt_set = _prompt_set(args, pair)
        print("\n".join(setup.versions))
        for contestant in setup.contestants:
            print(f"  {contestant.configuration!s:40} {contestant.settings}")
        replies: list[MeasuredReply] = []
        _save(args, setup, replies)  # Fail early if the file cannot be written.
        # SIGTERM raises KeyboardInterrupt, so that all child processes are stopped.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            working = measure(args, setup, prompt_set, _needed_bytes(pair), replies)
            status = int(working != setup.configurations)
        except KeyboardInterrupt:
            print("Interrupted. These are the results so far:", file=sys.stderr)
            status = 130
        _save(args, setup, replies)
    except (EdgespecError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    for temperature in dict.fromkeys(reply.temperature for reply in replies):
        print(report(setup.configurations, [each for each in replies if each.temperature == temperature]))
    return status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo", help="a GGUF file or an MLX folder (default: demo)")
    parser.add_argument("--draft", default="auto", help="the draft model, or none (default: auto)")
    parser.add_argument(
        "--head", help="a GGUF head for the configurations mtp, eagle and dflash, and for auto"
    )
    parser.add_argument("--llama-server", type=Path, help="the llama-server binary, for a GGUF target")
    parser.add_argument(
        "--grid",
        help=f"configurations of the other program to run (llama-server: {GRID}; mlx-lm: {MLX_GRID})",
    )
    parser.add_argument(
        "--methods",
        default="none,model:2,model:4,model:8,suffix,auto",
        help="edgespec methods, each with an optional draft length, and with /trees for drafts that branch,"
        " such as eagle/trees (default: %(default)s)",
    )
    parser.add_argument("--acceptance", default="invariant")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--threads",
        type=lambda text: None if text == "auto" else int(text),
        default=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        help="CPU threads of all programs, or auto for each program's own choice (default: %(default)s)",
    )
    parser.add_argument(
        "--load",
        choices=("idle", "busy", "alternating"),
        default="idle",
        help="use of one core by another program, as in bench_busy.py (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-type", help="KV cache type for all GGUF programs, such as f16 (default: each program's own)"
    )
    parser.add_argument("--prompts", type=Path, help="JSONL file (default: edgespec's own prompts)")
    parser.add_argument("--every", type=int, default=1, help="use every nth prompt")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all results to this file after each prompt")
    return parser.parse_args()


def _setup(args: argparse.Namespace, pair: ModelPair) -> Setup:
    """Return the configurations to compare. For MLX models, `args.threads` is set to None."""
    defaults = edgespec.SamplingParams()
    filters = (defaults.top_k, defaults.top_p, defaults.min_p)
    versions = [f"edgespec {edgespec.__version__}"]
    target, draft = str(pair.target.path), str(pair.draft.path) if pair.draft else None
    contestants: list[Contestant] = []
    if pair.target.format == "mlx":
        versions += [f"{name} {_version(name)}" for name in ("mlx", "mlx-lm")]
        contestants += _mlx_lm_contestants(args, target, draft)
        filters = (0, 1.0, 0.0)  # Off, because the programs apply the filters in different orders.
        args.threads = None  # MLX does not let programs choose the number of threads.
    elif args.llama_server:
        versions += [f"llama-server {binary_version(args.llama_server)}", *_features(args.llama_server)]
        versions.append(f"llama-server {' '.join(_common_flags(args, target))}")
        contestants += _server_contestants(args, target, draft)
    else:
        versions.append("Only edgespec is measured. Give --llama-server to compare it with llama-server.")
    contestants += _edgespec_contestants(args, target, draft)
    return Setup(contestants, versions, filters)


def _mlx_lm_contestants(args: argparse.Namespace, target: str, draft: str | None) -> Iterator[Contestant]:
    for name in (args.grid or MLX_GRID).split(","):
        length = _mlx_lm_draft_length(name, draft)
        make = partial(Worker, MlxLmProgram(target, draft or "none", length))
        settings = f"--num-draft-tokens {length}" if length else ""
        yield Contestant(Configuration("mlx-lm", name), make, settings)


def _server_contestants(args: argparse.Namespace, target: str, draft: str | None) -> Iterator[Contestant]:
    default_grid = ",".join(name for name in GRID.split(",") if draft or "draft:" not in name)
    for name in (args.grid or default_grid).split(","):
        flags = server_flags(name, draft, args.head)
        make = partial(LlamaServer, args.llama_server, [*_common_flags(args, target), *flags])
        yield Contestant(Configuration("llama-server", name), make, " ".join(flags))


def _common_flags(args: argparse.Namespace, target: str) -> list[str]:
    """Return the flags of all llama-server configurations: one reply at a time and no prompt cache in RAM."""
    flags = ["--model", target, "--ctx-size", args.context, "--parallel", 1, "--cache-ram", 0, "--offline"]
    if args.threads:
        flags += ["--threads", args.threads, "--threads-batch", args.threads]
    if args.kv_type:
        flags += ["--cache-type-k", args.kv_type, "--cache-type-v", args.kv_type]
        flags += ["--spec-draft-type-k", args.kv_type, "--spec-draft-type-v", args.kv_type]
    return [*map(str, flags)]


def _edgespec_contestants(args: argparse.Namespace, target: str, draft: str | None) -> Iterator[Contestant]:
    for name in args.methods.split(","):
        method, length = parse(name.removesuffix(TREES))
        # Pass the draft model and the head only to methods that use them, because the others would load them
        # too.
        drafters = {*method.split("+")}
        used_draft = draft if drafters & {"auto", "model"} else None
        head = args.head or "none" if drafters & {"auto", *head_names()} else "auto"
        branches: Literal["auto"] | tuple[()] = "auto" if name.endswith(TREES) else ()
        kv_type = args.kv_type or "auto"
        program = EdgespecProgram(
            target,
            used_draft or "none",
            head,
            method,
            length,
            branches,
            args.acceptance,
            args.context,
            args.threads,
            kv_type,
        )
        settings = ", ".join(f"{key}={value}" for key, value in vars(program).items() if value)
        yield Contestant(Configuration(EDGESPEC, name), partial(Worker, program), settings)


def _mlx_lm_draft_length(name: str, draft: str | None) -> int | None:
    """Return the draft length of an mlx-lm configuration, or None for plain decoding. Raises OptionError."""
    kind, length = parse(name)
    if (kind == "draft" and length and draft) or name == "none":
        return length
    raise OptionError(
        f"{name!r} is not an mlx-lm configuration", "use none, or draft:LENGTH together with --draft"
    )


def _features(binary: Path) -> list[str]:
    """Return lines with the build features of llama-cpp-python, and with how llama-server's differ.

    llama-server may have more features, because it is compared with its own best kernels.
    """
    own = enabled_features(library().llama_print_system_info().decode())
    if choose_layouts():  # AMX does not work here.
        own = [feature for feature in own if not feature.startswith(AMX)]
    servers = binary_features(binary)
    lines = [f"llama-cpp-python {_version('llama-cpp-python')}: {' '.join(own)}"]
    if only_servers := [feature for feature in servers if feature not in own]:
        lines.append(f"llama-server also has: {' '.join(only_servers)}")
    if missing := [feature for feature in own if feature not in servers]:
        lines.append(
            f"warning: llama-server lacks {' '.join(missing)}, so the comparison is unfair to it. Build"
            " llama-server with scripts/build_llama_server."
        )
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _prompt_set(args: argparse.Namespace, pair: ModelPair) -> PromptSet:
    prompts = read_prompts(args.prompts)[:: args.every]
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same id", "give each prompt its own id")
    with edgespec.load(str(pair.target.path), "none", context=args.context, method="none") as runtime:
        tokens = {prompt.name: prompt_tokens(runtime, prompt) for prompt in prompts}
        end_tokens = frozenset(filter(runtime.vocabulary.is_end, range(runtime.target.vocab_size)))
    for name, prompt in tokens.items():
        if len(prompt) + args.max_tokens > args.context:
            raise OptionError(
                f"prompt {name} has {len(prompt)} tokens, which with --max-tokens {args.max_tokens} exceed"
                f" the context of {args.context} tokens",
                "use a larger --context or a smaller --max-tokens",
            )
    return PromptSet(prompts, tokens, end_tokens)


def _needed_bytes(pair: ModelPair) -> int:
    """Return the memory that must be available before another configuration is loaded."""
    models = [each.path for each in (pair.target, pair.draft) if each]
    files = [file for path in models for file in (path.rglob("*") if path.is_dir() else [path])]
    return int(1.5 * sum(file.stat().st_size for file in files)) + 2**30


def measure(
    args: argparse.Namespace,
    setup: Setup,
    prompt_set: PromptSet,
    needed_bytes: int,
    replies: list[MeasuredReply],
) -> Sequence[Configuration]:
    """Answer every prompt with every configuration and append the results to `replies`.

    A configuration that fails is left out from then on. Returns the others.
    """
    working = setup.configurations
    passes = list(product(map(float, args.temperatures.split(",")), range(args.repeats)))
    makers = {contestant.configuration: contestant.make for contestant in setup.contestants}
    started, done, total = monotonic(), 0, len(passes) * len(prompt_set.prompts)
    for temperature, repeat in passes:
        with closing(Pool(makers, needed_bytes)) as pool:
            for index, prompt in enumerate(prompt_set.prompts):
                options = GenerationOptions(
                    args.max_tokens, temperature, 1 + index, *setup.filters, schema=prompt.schema
                )
                for configuration in rotated_order(working, index + repeat):
                    try:
                        with other_program(args.load, starts_busy=index % 2 == 0):
                            run = pool.generate(configuration, prompt_set.tokens[prompt.name], options)
                    except EdgespecError as error:
                        print(f"{configuration} is left out: {error}", file=sys.stderr)
                        working.remove(configuration)
                        continue
                    ended = bool(run.tokens) and run.tokens[-1] in prompt_set.end_tokens
                    labels = (configuration, prompt.name, prompt.category, temperature, repeat)
                    replies.append(MeasuredReply(*labels, run, ended))
                if not working:
                    raise EdgespecError("all configurations failed", "see the errors above")
                _save(args, setup, replies)
                done += 1
                minutes = (monotonic() - started) / done * (total - done) / 60
                print(f"{done} of {total} prompts, about {minutes:.0f} min left", file=sys.stderr)
    return working


def _save(args: argparse.Namespace, setup: Setup, replies: Sequence[MeasuredReply]) -> None:
    if args.json:
        content = {
            "versions": list(setup.versions),
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "configurations": {str(each.configuration): each.settings for each in setup.contestants},
            "replies": [reply.to_json() for reply in replies],
        }
        with replace_when_written(args.json) as path:
            path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
