#!/usr/bin/env python3
"""Compare the throughput of each method with that of plain decoding, for concurrent replies.

    scripts/bench_load.py                                             # the demo pair
    scripts/bench_load.py --target big-target.gguf --draft big-draft.gguf --every 3 --repeats 2

A server with several users needs one runtime and one thread per concurrent reply. This script loads that
many runtimes and lets them take prompts from a shared list until it is empty. Every method runs on the same
lists, and the order of the methods changes from list to list. The prefix cache is cleared before each reply,
and the times include prefill.

goodput     total tokens per second until the first runtime finds the list empty. After that, fewer replies
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import geometric_mean
from threading import Barrier
from time import monotonic
from time import perf_counter as now
from typing import Any

import edgespec
from edgespec.bench import statistics
from edgespec.errors import EdgespecError, OptionError
from edgespec.files import replace_when_written
from edgespec.losslessness import Prompt, prompt_tokens, read_prompts
from scripts.peers.configurations import parse, rotated_order

PLAIN = "none"
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class ReplyOptions:
    """The options of all replies in a measurement."""

    max_tokens: int
    temperature: float
    method: str
    draft_length: int | None


@dataclass(frozen=True)
class TimedReply:
    """A reply with the arrival times of its tokens.

    Attributes:
        prompt: Name of the prompt.
        tokens: Tokens of the reply.
        arrivals: For each chunk, the seconds since the first request and the number of tokens.
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
        method: The method, such as `suffix`, or `model:4` with a draft length.
        full_seconds: Seconds until the first runtime found the list empty.
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


def main() -> None:
    args = _arguments()
    try:
        lists = _prompt_lists(args)
        methods = {name: parse(name) for name in dict.fromkeys([PLAIN, *args.methods.split(",")])}
        with ExitStack() as open_runtimes:
            runtimes = [
                open_runtimes.enter_context(_load(args, methods)) for _ in range(max(args.concurrency))
            ]
            print(f"{runtimes[0].target.description}, {len(runtimes)} runtimes")
            measurements: list[Measurement] = []
            _save(args, measurements)  # Fail early if the file cannot be written.
            try:
                for measurement in measure(args, runtimes, lists, methods):
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
    parser.add_argument(
        "--threads", type=int, help="threads per runtime (default: chosen as for a single runtime)"
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
        context=args.context,
        threads=args.threads,
        methods=[method for method, _ in methods.values()],
    )


def measure(
    args: argparse.Namespace,
    runtimes: Sequence[edgespec.Runtime],
    lists: Sequence[Sequence[Prompt]],
    methods: Mapping[str, tuple[str, int | None]],
) -> Iterator[Measurement]:
    """Measure every method on every list, for each number of concurrent replies."""
    tokens = [{prompt.name: prompt_tokens(runtimes[0], prompt) for prompt in prompts} for prompts in lists]
    first_name, first_prompt = next(iter(tokens[0].items()))
    for runtime, (method, length) in product(runtimes, methods.values()):
        _reply(runtime, first_name, first_prompt, ReplyOptions(_WARM_UP_TOKENS, 0.0, method, length))
    started, done = monotonic(), 0
    total = args.repeats * len(lists) * len(args.concurrency) * len(methods)
    for repeat, (index, prompts) in product(range(args.repeats), enumerate(tokens)):
        for count in args.concurrency:
            for name in rotated_order(list(methods), repeat * len(lists) + index):
                options = ReplyOptions(args.max_tokens, args.temperature, *methods[name])
                full_seconds, replies = serve(runtimes[:count], prompts, options)
                yield Measurement(index, repeat, count, name, full_seconds, replies)
                done += 1
                minutes = (monotonic() - started) / done * (total - done) / 60
                print(f"{done} of {total} measurements, about {minutes:.0f} min left", file=sys.stderr)


def serve(
    runtimes: Sequence[edgespec.Runtime], prompts: Mapping[str, Sequence[int]], options: ReplyOptions
) -> tuple[float, tuple[TimedReply, ...]]:
    """Answer all prompts, with one thread per runtime.

    Returns:
        The seconds until the first runtime found no prompts left, and all replies.
    """
    queue: SimpleQueue[str] = SimpleQueue()
    for name in prompts:
        queue.put(name)
    ready = Barrier(len(runtimes) + 1)

    def work(runtime: edgespec.Runtime) -> tuple[float, list[TimedReply]]:
        replies: list[TimedReply] = []
        ready.wait()
        while True:
            try:
                name = queue.get_nowait()
            except Empty:
                return now(), replies
            replies.append(_reply(runtime, name, prompts[name], options))

    with ThreadPoolExecutor(len(runtimes)) as pool:
        futures = [pool.submit(work, runtime) for runtime in runtimes]
        ready.wait()
        started = now()
        ends, replies = zip(*(future.result() for future in futures), strict=True)
    return min(ends) - started, tuple(_relative_to(started, reply) for each in replies for reply in each)


def _relative_to(started: float, reply: TimedReply) -> TimedReply:
    return replace(reply, arrivals=tuple((seconds - started, count) for seconds, count in reply.arrivals))


def _reply(runtime: edgespec.Runtime, name: str, prompt: Sequence[int], options: ReplyOptions) -> TimedReply:
    """Generate one reply. Its arrival times are absolute, as returned by `perf_counter`."""
    runtime.clear_cache()
    set_options: dict[str, Any] = {key: value for key, value in vars(options).items() if value is not None}
    stream = runtime.stream_tokens(prompt, seed=1, **set_options)
    arrivals: list[tuple[float, int]] = []
    drafted = drafting_rounds = 0
    for chunk in stream:
        arrivals.append((now(), chunk.token_count))
        # The number of drafted tokens increases only once per round, so this counts the rounds with a draft.
        drafting_rounds += stream.stats.drafted_tokens > drafted
        drafted = stream.stats.drafted_tokens
    stats = stream.reply.stats
    return TimedReply(
        name, stream.reply.tokens, tuple(arrivals), stats.target_passes, drafting_rounds, stats.drafted_tokens
    )


def report(measurements: Sequence[Measurement]) -> str:
    """Return one table for each number of concurrent replies."""
    lines = []
    for count in dict.fromkeys(each.concurrency for each in measurements):
        lines.append(f"{count} replies at once" if count > 1 else "one reply at a time")
        lines.append(
            f"  {'method':12}{'goodput':>9}{'x none':>9}{'95 %':>16}{'drafted':>9}{'width':>7}{'equal':>9}"
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
    drafting = sum(reply.drafting_rounds for reply in replies) / rounds
    width = 1 + sum(reply.drafted_tokens for reply in replies) / rounds
    plain = {reply.prompt: reply.tokens for reply in _plain_replies(measurements)}
    equal = [plain[reply.prompt] == reply.tokens for reply in replies if reply.prompt in plain]
    goodput = geometric_mean(each.goodput for each in of_method)
    ratios = _ratios(measurements, of_method)
    ratio, interval_text = "", ""
    if ratios and of_method[0].method != PLAIN:
        ratio = f"{statistics.geometric_mean(ratios):.3f}"
        interval = statistics.interval(ratios)
        interval_text = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    return (
        f"  {of_method[0].method:12}{goodput:9.2f}{ratio:>9}{interval_text:>16}{drafting:9.0%}{width:7.2f}"
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
