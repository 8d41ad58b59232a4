#!/usr/bin/env python3
"""Several replies at once: all their tokens per second with each method, against plain decoding of as many.

    scripts/bench_load.py                                             # the demo pair
    scripts/bench_load.py --target big-target.gguf --draft big-draft.gguf --every 3 --repeats 2

A program that answers several people loads a runtime for each, and gives each a thread. So does this: as many
runtimes as replies at once take prompts from one list until it is empty. Every method works through the same
list, right after one another, in an order that changes from list to list. No reply finds its prompt in a
cache, and reading prompts counts.

goodput: tokens of all replies per second, from the first request until a runtime finds no prompt left; from
then on fewer would be at work. x none: that over the goodput of plain decoding with as many at once, as a
geometric mean over the lists; the 95 % interval is a bootstrap over lists and repeats. drafted: share of the
rounds that verified a guess; width: rows of a pass, on average. equal: replies whose tokens are those of
plain decoding alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import geometric_mean
from threading import Barrier
from time import monotonic
from time import perf_counter as now

import edgespec
from edgespec.bench import statistics
from edgespec.errors import EdgespecError, OptionError
from edgespec.files import replace_when_written
from edgespec.losslessness import Prompt, prompt_tokens, read_prompts
from scripts.peers.configurations import parse

PLAIN = "none"
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Told:
    """What every reply is told."""

    max_tokens: int
    temperature: float
    method: str
    draft_length: int | None


@dataclass(frozen=True)
class Answer:
    """One reply. moments: seconds since the first request, and tokens that came out then. drafting_rounds:
    those that verified a guess."""

    prompt: str
    tokens: tuple[int, ...]
    moments: tuple[tuple[float, int], ...]
    rounds: int
    drafting_rounds: int
    drafted_tokens: int


@dataclass(frozen=True)
class Measured:
    """One list of prompts by one method. full_seconds: while as many replies as `at_once` were being made."""

    prompts: int
    repeat: int
    at_once: int
    method: str
    full_seconds: float
    answers: tuple[Answer, ...]

    @property
    def goodput(self) -> float:
        """Tokens of all replies per second."""
        full = self.full_seconds
        tokens = sum(count for each in self.answers for moment, count in each.moments if moment <= full)
        return tokens / full


def main() -> None:
    args = _arguments()
    try:
        lists = _lists(args)
        methods = {name: parse(name) for name in dict.fromkeys([PLAIN, *args.methods.split(",")])}
        with ExitStack() as open_runtimes:
            runtimes = [open_runtimes.enter_context(_load(args, methods)) for _ in range(max(args.at_once))]
            print(f"{runtimes[0].target.description}, {len(runtimes)} runtimes")
            measured: list[Measured] = []
            _save(args, measured)  # a place that cannot be written to is told now
            try:
                for one in measure(args, runtimes, lists, methods):
                    measured.append(one)
                    _save(args, measured)
            except KeyboardInterrupt:
                print("interrupted; what was measured until now:", file=sys.stderr)
    except (EdgespecError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(report(measured))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--methods", default="model:4,suffix,auto", help="beside none")
    parser.add_argument("--at-once", type=_counts, default=[1, 2, 4], help="replies at once, such as 1,2,4")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, help="of each runtime; by default as many as if it were alone")
    parser.add_argument("--prompts", type=Path, help="JSONL; by default those that come with edgespec")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--list", type=int, default=12, help="about so many prompts in one measurement")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every number here, after each measurement")
    return parser.parse_args()


def _counts(text: str) -> list[int]:
    counts = [int(number) for number in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("at least one reply is made at once")
    return counts


def _lists(args: argparse.Namespace) -> list[list[Prompt]]:
    """The prompts of each measurement. Raises OptionError."""
    prompts = read_prompts(args.prompts)[:: args.every]
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise OptionError("two prompts have the same id", "give each its own")
    count = max(1, round(len(prompts) / args.list))
    # Prompts of a kind stand next to one another, and every list is to have some of each.
    lists = [prompts[first::count] for first in range(count)]
    if len(lists[-1]) < max(args.at_once):
        raise OptionError(
            f"a list of {len(lists[-1])} prompts cannot keep {max(args.at_once)} replies going",
            "use a larger --list or more prompts, or fewer --at-once",
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
) -> Iterator[Measured]:
    """Every list by every method, with so many replies at once."""
    tokens = [{each.name: prompt_tokens(runtimes[0], each) for each in some} for some in lists]
    for runtime, (method, length) in product(runtimes, methods.values()):
        for name, prompt in list(tokens[0].items())[:1]:
            _answer(runtime, name, prompt, Told(_WARM_UP_TOKENS, 0.0, method, length))
    began, done, all_of_it = monotonic(), 0, args.repeats * len(lists) * len(args.at_once) * len(methods)
    for repeat, (number, some) in product(range(args.repeats), enumerate(tokens)):
        for count in args.at_once:
            for name in in_turn(list(methods), repeat * len(lists) + number):
                told = Told(args.max_tokens, args.temperature, *methods[name])
                full_seconds, answers = serve(runtimes[:count], some, told)
                yield Measured(number, repeat, count, name, full_seconds, answers)
                done += 1
                minutes = (monotonic() - began) / done * (all_of_it - done) / 60
                print(f"{done} of {all_of_it}, about {minutes:.0f} min left", file=sys.stderr)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a list's methods: another begins each time, and every second time it runs backwards."""
    at = number // 2 % len(names)
    rotated = [*names[at:], *names[:at]]
    return rotated if number % 2 == 0 else rotated[::-1]


def serve(
    runtimes: Sequence[edgespec.Runtime], prompts: Mapping[str, Sequence[int]], told: Told
) -> tuple[float, tuple[Answer, ...]]:
    """All prompts, by runtimes that each take the next one; until when all of these were busy, in seconds."""
    waiting: SimpleQueue[str] = SimpleQueue()
    for name in prompts:
        waiting.put(name)
    ready = Barrier(len(runtimes) + 1)

    def work(runtime: edgespec.Runtime) -> tuple[float, list[Answer]]:
        answers: list[Answer] = []
        ready.wait()
        while True:
            try:
                name = waiting.get_nowait()
            except Empty:
                return now(), answers
            answers.append(_answer(runtime, name, prompts[name], told))

    with ThreadPoolExecutor(len(runtimes)) as pool:
        working = [pool.submit(work, runtime) for runtime in runtimes]
        ready.wait()
        started = now()
        ends, answers = zip(*(each.result() for each in working), strict=True)
    return min(ends) - started, tuple(_since(started, each) for some in answers for each in some)


def _since(started: float, answer: Answer) -> Answer:
    moments = tuple((moment - started, count) for moment, count in answer.moments)
    return Answer(**{**vars(answer), "moments": moments})


def _answer(runtime: edgespec.Runtime, name: str, prompt: Sequence[int], told: Told) -> Answer:
    """One reply, by the clock; its moments are not counted from anything yet."""
    runtime.clear_cache()
    stream = runtime.stream_tokens(prompt, seed=1, **_options(told))
    moments: list[tuple[float, int]] = []
    drafted = drafting_rounds = 0
    for piece in stream:
        moments.append((now(), piece.token_count))
        # The first piece of a round tells whether it drafted.
        drafting_rounds += stream.stats.drafted_tokens > drafted
        drafted = stream.stats.drafted_tokens
    stats = stream.reply.stats
    return Answer(
        name, stream.reply.tokens, tuple(moments), stats.target_passes, drafting_rounds, stats.drafted_tokens
    )


def _options(told: Told) -> dict[str, object]:
    return {name: value for name, value in asdict(told).items() if value is not None}


def report(measured: Sequence[Measured]) -> str:
    """A table for each number of replies at once."""
    lines = []
    for count in dict.fromkeys(each.at_once for each in measured):
        lines.append(f"{count} at once" if count > 1 else "one at a time")
        lines.append(
            f"  {'method':12}{'goodput':>9}{'x none':>9}{'95 %':>16}{'drafted':>9}{'width':>7}{'equal':>9}"
        )
        some = [each for each in measured if each.at_once == count]
        methods = dict.fromkeys(each.method for each in some)
        lines += [_row(measured, [each for each in some if each.method == method]) for method in methods]
    return "\n".join(lines)


def _row(measured: Sequence[Measured], rows: Sequence[Measured]) -> str:
    answers = [answer for each in rows for answer in each.answers]
    rounds = sum(each.rounds for each in answers)
    drafting = sum(each.drafting_rounds for each in answers) / rounds
    width = 1 + sum(each.drafted_tokens for each in answers) / rounds
    plain = {answer.prompt: answer.tokens for answer in _plain_alone(measured)}
    equal = [plain[each.prompt] == each.tokens for each in answers if each.prompt in plain]
    goodput = geometric_mean(each.goodput for each in rows)
    ratios = _ratios(measured, rows)
    ratio, between = "", ""
    if ratios and rows[0].method != PLAIN:
        ratio = f"{statistics.geometric_mean(ratios):.3f}"
        interval = statistics.interval(ratios)
        between = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
    return (
        f"  {rows[0].method:12}{goodput:9.2f}{ratio:>9}{between:>16}{drafting:9.0%}{width:7.2f}"
        f"{f'{sum(equal)}/{len(equal)}':>9}"
    )


def _plain_alone(measured: Iterable[Measured]) -> Iterator[Answer]:
    """The plain replies with the fewest at once."""
    plain = [each for each in measured if each.method == PLAIN]
    fewest = min((each.at_once for each in plain), default=0)
    return (answer for each in plain if each.at_once == fewest for answer in each.answers)


def _ratios(measured: Sequence[Measured], rows: Sequence[Measured]) -> list[list[float]]:
    """For each list, by its repeats: the goodput over that of plain decoding with as many at once."""
    plain = {
        (each.prompts, each.repeat, each.at_once): each.goodput for each in measured if each.method == PLAIN
    }
    ratios: dict[int, list[float]] = {}
    for each in rows:
        if base := plain.get((each.prompts, each.repeat, each.at_once)):
            ratios.setdefault(each.prompts, []).append(each.goodput / base)
    return list(ratios.values())


def _save(args: argparse.Namespace, measured: Sequence[Measured]) -> None:
    if args.json:
        content = {
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "measured": [asdict(each) | {"goodput": each.goodput} for each in measured],
        }
        with replace_when_written(args.json) as path:
            path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
