#!/usr/bin/env python3
"""Compare the throughput of each method with that of plain decoding, for concurrent replies.

    scripts/bench_load.py                                             # the demo pair
    scripts/bench_load.py --target big-target.gguf --draft big-draft.gguf --every 3 --repeats 2
    scripts/bench_load.py ... --llama-server build/llama-server --grid none,draft:2,draft:4

This script loads one runtime with a slot for each concurrent reply. One client per reply takes prompts from
a shared list until it is empty. Every method runs on the same lists, and the order of the methods changes
from list to list. Nothing is cached between replies, and the times include prefill. With --llama-server, the
same clients also send the prompts to a llama-server with as many slots, once per configuration of --grid.

goodput     total tokens per second until the first client finds the list empty. After that, fewer replies
            run at once.
x none      goodput divided by that of plain decoding with the same number of concurrent replies: geometric
            mean over the lists, with a 95% confidence interval (bootstrap over lists and repeats)
drafted     share of rounds that verified a draft
width       mean number of tokens in a verify pass
equal       replies with the same tokens as plain decoding of one reply at a time
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import geometric_mean
from threading import Barrier
from time import monotonic
from time import perf_counter as now
from typing import Any

import edgespec
from edgespec.bench import figures
from edgespec.errors import EdgespecError, OptionError
from edgespec.losslessness.cases import Prompt, prompt_tokens, read_prompts
from edgespec.system.files import replace_when_written
from scripts.peers.configurations import parse, rotated_order, server_flags
from scripts.peers.llama_server import LlamaServer
from scripts.peers.replies import GenerationOptions

PLAIN = "none"
SERVER = "llama-server"


@dataclass(frozen=True)
class TimedReply:
    """A reply with the arrival times of its tokens.

    Attributes:
        prompt: Name of the prompt.
        tokens: Tokens of the reply.
        arrivals: For each chunk, the seconds since the first request and the number of tokens. For
            llama-server, which is not asked for a stream, they are spread evenly over the decoding time.
        rounds: Number of target passes.
        drafting_rounds: Number of target passes that verified a draft.
        drafted_tokens: Number of drafted tokens.
    """

    prompt: str
    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    rounds: int
    drafting_rounds: int
    drafted_tokens: int


@dataclass(frozen=True)
class Measurement:
    """The replies of one method to the prompts of one list.

    Attributes:
        prompt_list: Index of the list.
        repeat: Index of the repeat.
        concurrency: Number of concurrent replies.
        method: The method, such as `suffix`, or `model:4` with a draft length, or a configuration of
            llama-server, such as `llama-server draft:4`.
        full_seconds: Seconds until the first client found the list empty.
        replies: All replies.
    """

    prompt_list: int
    repeat: int
    concurrency: int
    method: str
    full_seconds: float
    replies: tuple[TimedReply, ...]

    @property
    def goodput(self) -> float:
        """Tokens per second of all replies together, until `full_seconds`."""
        arrivals = [arrival for reply in self.replies for arrival in reply.arrivals]
        return sum(count for seconds, count in arrivals if seconds <= self.full_seconds) / self.full_seconds


@dataclass(frozen=True)
class ReplyOptions:
    """The options of all replies in a measurement."""

    max_tokens: int
    temperature: float
    method: str
    draft_length: int | None


@dataclass(frozen=True)
class Contestant:
    """One configuration to measure.

    Attributes:
        reply: Generates the reply to a prompt, given its name and tokens. Called by several threads at once.
        clear_cache: Called before each measurement.
    """

    reply: Callable[[str, Sequence[int]], TimedReply]
    clear_cache: Callable[[], None] = lambda: None


def main() -> None:
    args = _arguments()
    try:
        lists = _prompt_lists(args)
        methods = {name: parse(name) for name in dict.fromkeys([PLAIN, *args.methods.split(",")])}
        with ExitStack() as undo:
            runtime = undo.enter_context(_load(args, methods))
            if runtime.parallel < max(args.concurrency):
                raise OptionError(runtime.target.notice, "choose another model, or use --concurrency 1")
            contestants = {
                name: Contestant(
                    partial(_reply, runtime, ReplyOptions(args.max_tokens, args.temperature, *method)),
                    runtime.clear_cache,
                )
                for name, method in methods.items()
            }
            if args.llama_server:
                contestants |= _servers(args, runtime, undo)
            print(f"{runtime.target.description}, {runtime.parallel} replies at once")
            measurements: list[Measurement] = []
            _save(args, measurements)  # Fail early if the file cannot be written.
            try:
                for measurement in measure(args, runtime, lists, contestants):
                    measurements.append(measurement)
                    _save(args, measurements)
            except KeyboardInterrupt:
                print("Interrupted. These are the results so far:", file=sys.stderr)
    except (EdgespecError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(report(measurements))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--head", default="auto", help="head for the target (default: %(default)s)")
    parser.add_argument(
        "--methods",
        default="model:4,suffix,auto",
        help="methods to compare with none, each with an optional draft length (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=_counts,
        default=[1, 2, 4],
        help="concurrent replies to run (default: 1,2,4)",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, help="number of CPU threads (default: chosen by each program)")
    parser.add_argument("--llama-server", type=Path, help="llama-server binary to compare with")
    parser.add_argument(
        "--grid",
        default="none,draft:2,draft:4",
        help="configurations of llama-server, as for bench_peers.py (default: %(default)s)",
    )
    parser.add_argument("--prompts", type=Path, help="JSONL file (default: edgespec's own prompts)")
    parser.add_argument("--every", type=int, default=1, help="use every nth prompt")
    parser.add_argument(
        "--list-size", type=int, default=12, help="approximate number of prompts per list (default: 12)"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all results to this file after each measurement")
    return parser.parse_args()


def _counts(text: str) -> list[int]:
    counts = [int(number) for number in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"every number must be at least 1, not {min(counts)}")
    return counts


def _prompt_lists(args: argparse.Namespace) -> list[list[Prompt]]:
    """Split the prompts into lists of about `--list-size` prompts.

    Raises:
        OptionError: Two prompts have the same id, or a list has fewer prompts than there are replies at once.
    """
    prompts = read_prompts(args.prompts)[:: args.every]
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same id", "give each prompt its own id")
    count = max(1, round(len(prompts) / args.list_size))
    # Neighbouring prompts have the same category. Slicing with a step spreads each category over all lists.
    lists = [prompts[first::count] for first in range(count)]
    if len(lists[-1]) < max(args.concurrency):
        raise OptionError(
            f"a list of {len(lists[-1])} prompts is too short for {max(args.concurrency)} replies at once",
            "use a larger --list-size or more prompts, or a smaller --concurrency",
        )
    return lists


def _load(args: argparse.Namespace, methods: Mapping[str, tuple[str, int | None]]) -> edgespec.Runtime:
    return edgespec.load(
        args.target,
        args.draft,
        head=args.head,
        context=args.context,
        threads=args.threads,
        parallel=max(args.concurrency),
        prefix_cache="none",
        methods=[method for method, _ in methods.values()],
    )


def _servers(args: argparse.Namespace, runtime: edgespec.Runtime, undo: ExitStack) -> dict[str, Contestant]:
    """Start llama-server in every configuration of `--grid`, with the same files as `runtime`."""
    slots = max(args.concurrency)
    draft = runtime.draft.path if runtime.draft else None
    sizes = ["--ctx-size", args.context * slots, "--parallel", slots, "--cache-ram", 0]
    threads = ["--threads", args.threads, "--threads-batch", args.threads] if args.threads else []
    common = ["--model", runtime.target.path, "--offline", *map(str, [*sizes, *threads])]
    # Filters are off, because the programs apply them in different orders.
    options = GenerationOptions(args.max_tokens, args.temperature, seed=1, top_k=0, top_p=1.0, min_p=0.0)
    contestants = {}
    for name in args.grid.split(","):
        server = LlamaServer(args.llama_server, [*common, *server_flags(name, draft)])
        undo.callback(server.stop)
        server.start()
        contestants[f"{SERVER} {name}"] = Contestant(partial(_server_reply, server, options))
    return contestants


def measure(
    args: argparse.Namespace,
    runtime: edgespec.Runtime,
    lists: Sequence[Sequence[Prompt]],
    contestants: Mapping[str, Contestant],
) -> Iterator[Measurement]:
    """Measure every contestant on every list, for each number of concurrent replies."""
    tokens = [{prompt.name: prompt_tokens(runtime, prompt) for prompt in prompts} for prompts in lists]
    warm_up = list(tokens[0].items())[: max(args.concurrency)]
    for contestant in contestants.values():
        serve(contestant, len(warm_up), dict(warm_up))
    started, done = monotonic(), 0
    total = args.repeats * len(lists) * len(args.concurrency) * len(contestants)
    for repeat, (index, prompts) in product(range(args.repeats), enumerate(tokens)):
        for count in args.concurrency:
            for name in rotated_order(list(contestants), repeat * len(lists) + index):
                full_seconds, replies = serve(contestants[name], count, prompts)
                yield Measurement(index, repeat, count, name, full_seconds, replies)
                done += 1
                minutes = (monotonic() - started) / done * (total - done) / 60
                print(f"{done} of {total} measurements, about {minutes:.0f} min left", file=sys.stderr)


def serve(
    contestant: Contestant, clients: int, prompts: Mapping[str, Sequence[int]]
) -> tuple[float, tuple[TimedReply, ...]]:
    """Answer all prompts, with one thread per client.

    Returns:
        The seconds until the first client found no prompts left, and all replies.
    """
    contestant.clear_cache()
    queue: SimpleQueue[str] = SimpleQueue()
    for name in prompts:
        queue.put(name)
    ready = Barrier(clients + 1)

    def work() -> tuple[float, list[TimedReply]]:
        replies: list[TimedReply] = []
        ready.wait()
        while True:
            try:
                name = queue.get_nowait()
            except Empty:
                return now(), replies
            replies.append(contestant.reply(name, prompts[name]))

    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(work) for _ in range(clients)]
        ready.wait()
        started = now()
        ends, replies = zip(*(future.result() for future in futures), strict=True)
    return min(ends) - started, tuple(_relative_to(started, reply) for each in replies for reply in each)


def _relative_to(started: float, reply: TimedReply) -> TimedReply:
    return replace(reply, arrivals=tuple((seconds - started, count) for seconds, count in reply.arrivals))


def _reply(runtime: edgespec.Runtime, options: ReplyOptions, name: str, prompt: Sequence[int]) -> TimedReply:
    """Generate one reply. Its arrival times are absolute `perf_counter` values."""
    set_options: dict[str, Any] = {key: value for key, value in vars(options).items() if value is not None}
    stream = runtime.stream_tokens(prompt, seed=1, **set_options)
    arrivals: list[tuple[float, int]] = []
    drafted = drafting_rounds = 0
    for chunk in stream:
        arrivals.append((now(), chunk.token_count))
        # The number of drafted tokens increases at most once per round, so this counts the rounds with a
        # draft.
        drafting_rounds += stream.stats.drafted_tokens > drafted
        drafted = stream.stats.drafted_tokens
    stats = stream.reply.stats
    return TimedReply(
        name, stream.reply.tokens, tuple(arrivals), stats.target_passes, drafting_rounds, stats.drafted_tokens
    )


def _server_reply(
    server: LlamaServer, options: GenerationOptions, name: str, prompt: Sequence[int]
) -> TimedReply:
    """Let llama-server generate one reply. Its arrival times are absolute, like those of `_reply`."""
    run = server.generate(prompt, options)
    ended, count = now(), len(run.tokens)
    per_token = run.seconds_per_token
    arrivals = tuple((ended - per_token * (count - 1 - i), 1) for i in range(count))
    return TimedReply(name, run.tokens, arrivals, run.passes, 0, 0)


def report(measurements: Sequence[Measurement]) -> str:
    """Return one table for each number of concurrent replies."""
    lines = []
    for count in dict.fromkeys(each.concurrency for each in measurements):
        lines.append(f"{count} replies at once" if count > 1 else "one reply at a time")
        lines.append(
            f"  {'method':24}{'goodput':>9}{'x none':>9}{'95 %':>16}{'drafted':>9}{'width':>7}{'equal':>9}"
        )
        selected = [each for each in measurements if each.concurrency == count]
        methods = dict.fromkeys(each.method for each in selected)
        lines += [
            _row(measurements, [each for each in selected if each.method == method]) for method in methods
        ]
    return "\n".join(lines)


def _row(measurements: Sequence[Measurement], of_method: Sequence[Measurement]) -> str:
    replies = [reply for each in of_method for reply in each.replies]
    rounds = sum(reply.rounds for reply in replies)
    drafting = f"{sum(reply.drafting_rounds for reply in replies) / rounds:.0%}"
    width = f"{1 + sum(reply.drafted_tokens for reply in replies) / rounds:.2f}"
    if of_method[0].method.startswith(SERVER):
        drafting = width = ""  # llama-server reports only accepted tokens.
    plain = {reply.prompt: reply.tokens for reply in _plain_replies(measurements)}
    equal = [plain[reply.prompt] == reply.tokens for reply in replies if reply.prompt in plain]
    goodput = geometric_mean(each.goodput for each in of_method)
    ratios = _ratios(measurements, of_method)
    ratio, interval_text = "", ""
    if ratios and of_method[0].method != PLAIN:
        ratio = f"{figures.geometric_mean(ratios):.3f}"
        interval = figures.interval(ratios)
        interval_text = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    return (
        f"  {of_method[0].method:24}{goodput:9.2f}{ratio:>9}{interval_text:>16}{drafting:>9}{width:>7}"
        f"{f'{sum(equal)}/{len(equal)}':>9}"
    )


def _plain_replies(measurements: Iterable[Measurement]) -> Iterator[TimedReply]:
    """Return the replies of plain decoding that were measured with the fewest concurrent replies."""
    plain = [each for each in measurements if each.method == PLAIN]
    fewest = min((each.concurrency for each in plain), default=0)
    return (reply for each in plain if each.concurrency == fewest for reply in each.replies)


def _ratios(measurements: Sequence[Measurement], of_method: Sequence[Measurement]) -> list[list[float]]:
    """Return the goodput divided by that of plain decoding, by list and repeat."""
    plain = {
        (each.prompt_list, each.repeat, each.concurrency): each.goodput
        for each in measurements
        if each.method == PLAIN
    }
    ratios: dict[int, list[float]] = {}
    for each in of_method:
        if base := plain.get((each.prompt_list, each.repeat, each.concurrency)):
            ratios.setdefault(each.prompt_list, []).append(each.goodput / base)
    return list(ratios.values())


def _save(args: argparse.Namespace, measurements: Sequence[Measurement]) -> None:
    if args.json:
        content = {
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "measurements": [asdict(each) | {"goodput": each.goodput} for each in measurements],
        }
        with replace_when_written(args.json) as path:
            path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
