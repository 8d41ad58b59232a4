#!/usr/bin/env python3
"""Compare automatic with fixed numbers of CPU threads while another program uses a core.

    scripts/bench_busy.py                                              # the demo pair
    scripts/bench_busy.py --target big-target.gguf --draft big-draft.gguf --loads idle,busy,alternating

The other program computes on one core: never (`idle`), always (`busy`), or for 5 of every 10 seconds
(`alternating`). Every repeat runs all combinations of a method and a number of threads on the same prompt, in
an order that changes from repeat to repeat. An alternating load restarts with each reply. In every other
repeat, it starts with the busy half. Times exclude prefill.

tokens/s    median over the repeats
x best      median ratio of its speed to that of the fastest fixed number of threads in the same repeat
x all       the same for one fixed thread per core, which is the default of llama.cpp's programs
equal       replies with the same tokens as the others
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from statistics import median
from threading import Event, Thread

import edgespec
from edgespec.system.cores import usable_cores

_PROMPTS = (
    "Write a Python function that reads a CSV file and returns the sum of a column.",
    "Explain how photosynthesis works, in simple words.",
    "List ten tips for learning a foreign language.",
    "Write a shell script that backs up a folder every night.",
)
_ALTERNATING_SECONDS = 5.0


@contextmanager
def other_program(load: str, starts_busy: bool = True) -> Iterator[None]:
    """Keep one core busy, as `load` says.

    Args:
        load: `idle`, `busy` or `alternating`.
        starts_busy: Whether an alternating load starts with the 5 seconds in which the core is busy.
    """
    if load == "idle":
        yield
        return
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    done = Event()

    def alternate() -> None:
        is_running = starts_busy
        while True:
            os.kill(program.pid, signal.SIGCONT if is_running else signal.SIGSTOP)
            if done.wait(_ALTERNATING_SECONDS):
                return
            is_running = not is_running

    thread = Thread(target=alternate, daemon=True)
    if load == "alternating":
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
        program.kill()
        program.wait()


def main() -> None:
    args = _arguments()
    counts: list[int | None] = [None, *range(1, usable_cores() + 1)]
    methods = args.methods.split(",")
    speeds: dict[tuple[str, str, int | None], list[float]] = defaultdict(list)
    equal: dict[tuple[str, str, int | None], int] = defaultdict(int)
    with ExitStack() as stack:
        runtimes = {
            threads: stack.enter_context(
                edgespec.load(
                    args.target, args.draft, threads=threads, method="none", methods=methods, context=1024
                )
            )
            for threads in counts
        }
        for load, repeat in product(args.loads.split(","), range(args.repeats)):
            cases = [(method, threads) for method in methods for threads in counts]
            first = repeat % len(cases)
            replies = {}
            for method, threads in cases[first:] + cases[:first]:
                runtime = runtimes[threads]
                runtime.clear_cache()
                with other_program(load, starts_busy=repeat % 2 == 0):
                    replies[method, threads] = runtime.generate(
                        _PROMPTS[repeat % len(_PROMPTS)],
                        method=method,
                        max_tokens=args.max_tokens,
                        temperature=0.0,
                    )
            expected = replies[methods[0], 1].tokens
            for (method, threads), reply in replies.items():
                speeds[load, method, threads].append(reply.stats.tokens_per_second or 0.0)
                equal[load, method, threads] += reply.tokens == expected
            print(f"{load}, repeat {repeat + 1} of {args.repeats}", file=sys.stderr, flush=True)
    _print(speeds, equal, counts)


def _print(
    speeds: dict[tuple[str, str, int | None], list[float]],
    equal: dict[tuple[str, str, int | None], int],
    counts: list[int | None],
) -> None:
    print(
        f"{'load':<12} {'method':<14} {'threads':<8} {'tokens/s':>8} {'x best':>7} {'x all':>6} {'equal':>6}"
    )
    for (load, method, threads), found in speeds.items():
        fixed = [speeds[load, method, count] for count in counts if count]
        best = median(speed / max(column) for speed, *column in zip(found, *fixed, strict=True))
        all_cores = median(speed / most for speed, most in zip(found, fixed[-1], strict=True))
        same = f"{equal[load, method, threads]}/{len(found)}"
        print(
            f"{load:<12} {method:<14} {threads or 'auto':<8} {median(found):>8.2f} {best:>7.2f}"
            f" {all_cores:>6.2f} {same:>6}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo", help="the target model")
    parser.add_argument("--draft", default="demo-draft", help="the draft model, or none")
    parser.add_argument("--methods", default="none,auto", help="methods to compare")
    parser.add_argument("--loads", default="idle,busy,alternating", help="loads of the other program")
    parser.add_argument("--repeats", type=int, default=4, help="replies per combination")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of a reply")
    return parser.parse_args()


if __name__ == "__main__":
    main()
