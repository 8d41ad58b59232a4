#!/usr/bin/env python3
"""Measure the time that edgespec spends outside the model, per target pass, drafted token and row of a pass.

    scripts/bench_host.py                              # llama.cpp's logits, four vocabularies: two minutes
    scripts/bench_host.py --backend mlx --vocabularies 262144
    scripts/bench_host.py --against ../edgespec-before --repeats 9      # compare with another checkout

The real decoding loop runs with models whose passes take no time, because their logits are prepared. Each row
has a few dozen plausible tokens above a long tail of normally distributed logits. The probabilities of the
plausible tokens follow a power law, which is steep in some rows and flat in others. With 262,144 tokens, the
rows take up 8 MB, so that they fit in the shared cache but not in the core's own. The target and the draft
model have the same logits.

Each row of the table is one vocabulary and one setting. Times are milliseconds of processor time of the
decoding thread, which is pinned to one core. Other programs hardly affect them, and time spent waiting for
MLX's thread does not count. Each is the median of the repeats, with the lowest and highest in brackets.

- pass: a pass of plain decoding.
- cold pass: the same after 64 MB of other data has passed through the caches, as the weights of a real model
do.
  The logits, edgespec's code and its data are then fetched from memory, which takes longer than to compute.
- find, noise, accept, loop: the phases of a pass, as medians. `find` is the search for candidates in the row
  of logits, `noise` computes the Gumbel noise, `accept` is the rest of sampling (penalties, filters and the
  choice of the token), and `loop` is everything else, including the measurement of the phases.
- drafted token: drafting with a draft model in chains of 4, all of which are accepted, per drafted token.
- row, accepted and rejected: a pass over 8 tokens compared with one over a single token, per additional row.
  The draft takes no time. If it is accepted as a whole, 8 tokens are sampled. If it is rejected at its first
  token, only one is.

With MLX, the search and the noise run on the device, so `accept` is the time to launch them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from time import thread_time as now
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.acceptance import Invariant
from edgespec.engine.logits import HostLogits, Logits
from edgespec.engine.loop import Proposer, decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base_model import BaseModel
from edgespec.model.model_facts import Capabilities, ModelFacts

VOCABULARIES = (8_192, 49_152, 151_936, 262_144)
SETTINGS = {
    "T 0": SamplingParams(temperature=0.0),
    "T 0.8, filters": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05),
    "T 0.8, top-p": SamplingParams(temperature=0.8, top_k=0, top_p=0.9, min_p=0.0),
    "T 0.8, no filter": SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0),
}
MODES = ("plain", "drafted", "accepted", "rejected")
_ROWS = 8
_WIDTH = 8
_DRAFT_LENGTH = 4
_PLAUSIBLE_TOKENS = 48
_PROMPT = tuple(range(1, 33))
_OTHER_DATA = np.ones(1 << 24, np.float32)
_PHASES = ("find", "noise", "accept", "loop")
# The functions in which the engine computes noise. Another checkout may lack some of them.
_NOISE = ("logits.gumbel", "quick_choice.gumbel", "quick_choice.tokens_with_noise_above")


def prepared_rows(vocab_size: int) -> NDArray[np.float32]:
    """Return logits [rows, vocab] that look like those of a language model."""
    random = np.random.default_rng(vocab_size)
    rows = random.normal(0.0, 2.0, (_ROWS, vocab_size)).astype(np.float32)
    for row in rows:
        slope = random.uniform(0.7, 3.0)
        plausible = 18 - slope * np.log(np.arange(1, _PLAUSIBLE_TOKENS + 1))
        plausible += random.normal(0.0, 0.3, _PLAUSIBLE_TOKENS)
        row[random.choice(vocab_size, _PLAUSIBLE_TOKENS, replace=False)] = plausible
    # Repeat the rows, so that a wide pass starting at any of them is a slice, which needs no copy.
    return np.concatenate([rows, rows])


class Clock:
    """Adds up the processor time of the phases of sampling. A phase does not include nested phases."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("find", "noise", "accept", "draft", "model"), 0.0)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is added to a phase."""

        def call(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            started = now()
            try:
                return function(*args, **options)
            finally:
                seconds = now() - started
                self.seconds[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return call


class PreparedModel(BaseModel):
    """A language model with prepared logits, which depend only on the position."""

    def __init__(self, rows: NDArray[np.float32], backend: str) -> None:
        self._host_rows, self._device_rows = rows, None
        if backend == "mlx":
            import mlx.core as mx

            self._device_rows = mx.array(rows)
            mx.eval(self._device_rows)
        self.facts = ModelFacts(
            name="prepared", path="", architecture="prepared", description="prepared logits", parameters=0,
            file_bytes=0, weight_bytes=0, kv_bytes=0, quantisation="F32", trained_context_tokens=1 << 20,
            context_tokens=1 << 20, vocab_size=rows.shape[1], chat_template=False,
            capabilities=Capabilities(rollback=True, tree=True),
        )  # fmt: skip
        self.vocabulary: Any = EndlessVocabulary()
        self._length = 0
        self.clock: Clock | None = None
        self.other_data: NDArray[np.float32] | None = None

    @property
    def length(self) -> int:
        return self._length

    def prefill(self, tokens: Sequence[int], progress: object = None) -> None:  # noqa: ARG002
        self._length += len(tokens)

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        if self.clock and self.other_data is not None:
            self.clock.timed("model", self.other_data.__iadd__)(1)
        start = (self._length + first) % _ROWS
        end = start + tree.width - first
        if self._device_rows is None:
            rows = self._host_rows[start:end]
            if self.clock and self.other_data is None:
                return TimedLogits(rows, self.clock)
            return HostLogits(rows)
        from edgespec.backends.mlx.logits import DeviceLogits

        return DeviceLogits(self._device_rows[start:end], tree.depths[first:])

    def commit(self, path: tuple[int, ...]) -> None:
        self._length += 1 + len(path)

    def truncate(self, length: int) -> None:
        self._length = min(length, self._length)

    def remove_range(self, start: int, end: int) -> None:
        raise NotImplementedError

    def snapshot(self, start: int = 0, end: int | None = None) -> Any:
        raise NotImplementedError

    def restore(self, snapshot: Any) -> None:
        raise NotImplementedError

    def resize(self, context_tokens: int) -> None:
        raise NotImplementedError

    def interrupt(self, enabled: bool) -> None:
        pass

    def close(self) -> None:
        pass


class EndlessVocabulary:
    """The part of a vocabulary that a drafter needs. No token ends a reply."""

    def is_end(self, token: int) -> bool:  # noqa: ARG002
        return False


class Repeater:
    """Drafts the known reply at no cost, or a reply in which every token is wrong."""

    def __init__(self, reply: Sequence[int], *, is_right: bool) -> None:
        self._reply = [_PROMPT[-1], *reply]
        self._is_right, self._at = is_right, 0

    def propose(self, sampler: object, acceptance: object, draft_length: int) -> TokenTree:  # noqa: ARG002
        root, *drafted = self._reply[self._at : self._at + draft_length + 1]
        return TokenTree.chain(root, drafted if self._is_right else [token ^ 1 for token in drafted])

    def observe(self, tree: object, logits: object, sampler: object) -> None:
        pass

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._at += len(tokens)


class Run(NamedTuple):
    """A reply: its tokens, and the processor time, target passes and drafted tokens that it needed."""

    tokens: list[int]
    seconds: float
    passes: int
    drafted: int


def run(
    model: PreparedModel,
    params: SamplingParams,
    drafter: Proposer | None,
    length: int,
    passes: int,
    clock: Clock | None = None,
) -> Run:
    """Decode a reply. With a clock, measure the phases too, which takes a little time itself."""
    model.truncate(0)
    model.prefill(_PROMPT[:-1])
    model.clock = clock
    acceptance: Any = Invariant()
    sampler = Sampler(params, 1, _PROMPT)
    if clock:
        acceptance.accept = clock.timed("accept", acceptance.accept)
        for name in ("propose", "observe", "commit") if drafter else ():
            setattr(drafter, name, clock.timed("draft", getattr(drafter, name)))
    stats = Stats()
    steps = decode(
        model, drafter, acceptance, sampler, _PROMPT[-1], vocab_size=model.facts.vocab_size,
        max_width=_WIDTH, draft_length=length, max_tokens=1 << 20, is_stop=lambda _: False,
        is_cancelled=lambda: False, stats=stats,
    )  # fmt: skip
    tokens: list[int] = []
    started = now()
    for step in islice(steps, passes):
        tokens += step.tokens
    seconds = now() - started
    assert isinstance(steps, Generator)
    steps.close()
    return Run(tokens, seconds, stats.target_passes, stats.drafted_tokens)


class TimedLogits(HostLogits):
    """Logits on the host that measure the search for candidates."""

    def __init__(self, rows: NDArray[np.float32], clock: Clock) -> None:
        super().__init__(rows)
        self._clock = clock

    def top(self, row: int, count: int) -> Any:
        return self._clock.timed("find", super().top)(row, count)

    def above(self, row: int, margin: float) -> Any:
        return self._clock.timed("find", super().above)(row, margin)

    def at(self, row: int, tokens: NDArray[np.int64]) -> Any:
        return self._clock.timed("find", super().at)(row, tokens)


def measure(backend: str, vocab_size: int, params: SamplingParams, passes: int) -> dict[str, float]:
    """Measure one vocabulary and setting once. Return the times in milliseconds, keyed by name."""
    rows = prepared_rows(vocab_size)
    model, draft = PreparedModel(rows, backend), PreparedModel(rows, backend)
    known = run(model, params, None, 0, passes + 2 * _WIDTH).tokens

    def decoded(mode: str, clock: Clock | None = None) -> Run:
        if mode == "plain":
            return run(model, params, None, 0, passes, clock)
        if mode == "drafted":
            draft.truncate(0)
            drafter = ModelDrafter(draft, vocab_size)
            drafter.begin(_PROMPT)
            return run(model, params, drafter, _DRAFT_LENGTH, passes // _DRAFT_LENGTH, clock)
        repeater = Repeater(known, is_right=mode == "accepted")
        return run(model, params, repeater, _WIDTH - 1, passes // _WIDTH, clock)

    # The first of these also warms up.
    runs = {mode: decoded(mode) for mode in ("plain", *MODES)}
    if any(run.tokens != known[: len(run.tokens)] for run in runs.values()):
        raise SystemExit("error: a reply with drafts differs from plain decoding")
    clock, draft_clock = Clock(), Clock()
    with _timed_noise(clock):
        timed = decoded("plain", clock)
    drafted = decoded("drafted", draft_clock)
    model.other_data = _OTHER_DATA
    cold_clock = Clock()
    cold = run(model, params, None, 0, passes // 2, cold_clock)
    ms = {mode: 1e3 * each.seconds / each.passes for mode, each in runs.items()}
    phases = {name: 1e3 * clock.seconds[name] / timed.passes for name in ("find", "noise", "accept")}
    return {
        "pass": ms["plain"],
        "cold pass": 1e3 * (cold.seconds - cold_clock.seconds["model"]) / cold.passes,
        **phases,
        "loop": 1e3 * timed.seconds / timed.passes - sum(phases.values()),
        "drafted token": 1e3 * draft_clock.seconds["draft"] / drafted.drafted,
        "row, accepted": (ms["accepted"] - ms["plain"]) / (_WIDTH - 1),
        "row, rejected": (ms["rejected"] - ms["plain"]) / (_WIDTH - 1),
    }


@contextmanager
def _timed_noise(clock: Clock) -> Iterator[None]:
    with ExitStack() as stack:
        for place in _NOISE:
            module, _, name = place.rpartition(".")
            with suppress(ImportError, AttributeError):
                function = getattr(import_module(f"edgespec.engine.{module}"), name)
                stack.enter_context(patch(f"edgespec.engine.{place}", clock.timed("noise", function)))
        yield


def measure_all(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure every vocabulary and setting once, after a warm-up."""
    os.sched_setaffinity(0, {args.core})
    cases = [(size, name) for size in args.vocabularies for name in SETTINGS]
    measure(args.backend, cases[0][0], SETTINGS["T 0.8, filters"], args.passes)
    return {
        f"{size:,} {name}": measure(args.backend, size, SETTINGS[name], args.passes) for size, name in cases
    }


def measure_in(checkout: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure in a new process with the package of a checkout."""
    sizes = ",".join(map(str, args.vocabularies))
    command = [
        sys.executable, __file__, "--once", "--backend", args.backend, "--vocabularies", sizes,
        "--passes", str(args.passes), "--core", str(args.core),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    results: dict[str, dict[str, float]] = json.loads(done.stdout)
    return results


def print_table(results: Sequence[dict[str, dict[str, float]]], title: str) -> None:
    """Print the median, and mostly the lowest and highest value, of the repeats for each case and time."""
    print(f"\n{title}: milliseconds, median of {len(results)} repeats [lowest, highest]")
    names = list(next(iter(results[0].values())))
    print(f"{'':24}" + "".join(f"{name:>{_width(name)}}" for name in names))
    for case in results[0]:
        line = f"{case:24}"
        for name in names:
            values = [each[case][name] for each in results]
            cell = f"{statistics.median(values):.3f}"
            if name not in _PHASES:
                cell += f" [{min(values):.3f}, {max(values):.3f}]"
            line += f"{cell:>{_width(name)}}"
        print(line)


def _width(name: str) -> int:
    return 8 if name in _PHASES else 23


def print_ratios(
    before: Sequence[dict[str, dict[str, float]]], after: Sequence[dict[str, dict[str, float]]]
) -> None:
    """Print the time of this checkout divided by that of the other one, paired by repeat."""
    print("\nthis checkout / other checkout: median of the pairs [lowest, highest]")
    names = ("pass", "cold pass", "drafted token", "row, accepted")
    print(f"{'':24}" + "".join(f"{name:>20}" for name in names))
    for case in before[0]:
        line = f"{case:24}"
        for name in names:
            pairs = [a[case][name] / b[case][name] for b, a in zip(before, after, strict=True)]
            cell = f"{statistics.median(pairs):.2f} [{min(pairs):.2f}, {max(pairs):.2f}]"
            line += f"{cell:>20}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("llamacpp", "mlx"), default="llamacpp")
    parser.add_argument(
        "--vocabularies", type=lambda text: [int(each) for each in text.split(",")], default=VOCABULARIES
    )
    parser.add_argument("--passes", type=int, default=64, help="tokens per run")
    parser.add_argument("--repeats", type=int, default=5, help="processes per checkout")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to use")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--once", action="store_true", help="measure once and print JSON")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(measure_all(args)))
        return
    checkouts = {"this checkout": Path(__file__).resolve().parent.parent}
    if args.against:
        checkouts = {"other checkout": args.against.resolve(), **checkouts}
    results: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in checkouts}
    for repeat in range(args.repeats):
        # Alternate which checkout runs first, so that changes in the machine's speed affect both equally.
        for name in sorted(checkouts, reverse=repeat % 2 == 1):
            results[name].append(measure_in(checkouts[name], args))
    for name, measured in results.items():
        print_table(measured, name)
    if args.against:
        print_ratios(*results.values())
    if args.json:
        args.json.write_text(json.dumps([*results.values()], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
