"""Loading, options and progress reporting shared by the commands that run a model, such as `bench`.

Ctrl-C cancels loading.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import KindType
from edgespec.cli.screen import ProgressLine, is_terminal, note, warn
from edgespec.errors import OptionError
from edgespec.options.option import Integer, ListOf, MethodName, Number
from edgespec.options.settings import MAX_DRAFT_LENGTH

if TYPE_CHECKING:
    from edgespec import Runtime

__all__ = [
    "RepliesProgress",
    "counted",
    "draft_lengths_option",
    "duration_text",
    "loaded",
    "max_tokens_option",
    "methods_option",
    "prompts_option",
    "reject_remember",
    "seed_option",
    "temperatures_option",
    "with_progress",
]

_Result = TypeVar("_Result")

_MAX_SEED = (1 << 63) - 1
_BAR_CELLS = 20
# If stderr is not a terminal, print the remaining time only if it is at least this many seconds.
_MIN_REPORTED_SECONDS = 10.0


def with_progress(work: Callable[[ProgressLine], _Result]) -> _Result:
    """Run `work` like `interruptible`, but pass it a progress line, which also forwards stop requests."""

    def run(stop: Stop) -> _Result:
        with ProgressLine(stop) as progress:
            return work(progress)

    return interruptible(run)


@contextmanager
def loaded(stop: Stop, **options: Any) -> Iterator[Runtime]:
    """Load a runtime, print its model files, and close it at the end of the `with` block.

    A stop request cancels loading, and later the current reply.
    """
    import edgespec
    from edgespec.errors import CancelledError

    with ProgressLine(stop) as progress:
        runtime = edgespec.load(**options, progress=progress)
    with runtime:
        if stop.requested:
            raise CancelledError(f"loading {runtime.target.name} was cancelled")
        note(_file_line("model", options["target"], runtime.target.path))
        if runtime.draft is not None:
            reference = options.get("draft") or "none"
            reference = runtime.draft.name if reference == "auto" else reference
            note(_file_line("draft model", reference, runtime.draft.path))
        for head in runtime.heads:
            note(_file_line("head", head.name, head.path or head.name))
        note(runtime.target.notice.replace(" · ", "\n"))
        if runtime.plan and runtime.plan.unused_experts and not is_terminal(sys.stderr):
            warn(runtime.plan.unused_experts)
        stop.on_request(runtime.cancel)
        yield runtime


def _file_line(role: str, reference: str, path: str) -> str:
    return f"{role}: {path}" if reference == path else f"{role}: {reference} -> {path}"


_shown = partial(click.option, show_default=True)
methods_option = partial(click.option, "--methods", type=KindType(ListOf(MethodName())), metavar="A,B")
prompts_option = partial(click.option, "--prompts", type=click.Path(path_type=Path), metavar="FILE")
temperatures_option = partial(
    _shown, "--temperatures", type=KindType(ListOf(Number(0.0, 100.0))), metavar="T,T"
)
draft_lengths_option = partial(
    _shown, "--draft-lengths", type=KindType(ListOf(Integer(1, MAX_DRAFT_LENGTH))), metavar="K,K"
)
max_tokens_option = partial(_shown, "-n", "--max-tokens", type=KindType(Integer(1)), metavar="N")
seed_option = partial(_shown, "--seed", type=KindType(Integer(0, _MAX_SEED)), metavar="N", default=1)


def reject_remember(options: dict[str, Any]) -> None:
    """Raise OptionError if `--remember` is given on the command line."""
    if options["remember"]:
        raise OptionError(
            "--remember cannot be used for measurements, because the suffix method would draft from earlier"
            " replies to the same prompts",
            "remove --remember",
            option="remember",
            code="option_conflict",
        )


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, such as `1 prompt` and `2 prompts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Format a duration, such as `2 h 5 min`, `12 min`, `2 min 5 s` or `5 s`."""
    minutes, rest = divmod(round(seconds), 60)
    if 10 <= minutes < 60:
        return f"{round(seconds / 60)} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


class RepliesProgress(ProgressLine):
    """A progress bar that shows the current reply and the estimated time remaining.

    If stderr is not a terminal, the remaining time is printed once, after the first reply.
    """

    def __init__(self, stop: Stop, max_seconds: float | None = None) -> None:
        super().__init__(stop)
        self._ends = monotonic() + max_seconds if max_seconds else inf
        self._current = ""
        self._step_began = 0.0
        self._first: tuple[float, float] | None = None

    def __call__(self, description: str, fraction: float) -> bool:
        left = self._seconds_left(description, fraction)
        if not is_terminal(sys.stderr):
            return super().__call__("measuring", fraction)
        bar = f"[{'#' * round(_BAR_CELLS * fraction):-<{_BAR_CELLS}}]"
        rest = f"about {duration_text(left)} left, " if left >= 1 else ""
        return super().__call__(f"{bar} {rest}{description}", fraction)

    def _seconds_left(self, description: str, fraction: float) -> float:
        """Return the estimated time remaining in seconds, or 0 until the first reply has finished."""
        now = monotonic()
        if not fraction:
            if description != self._current:
                self._current, self._step_began = description, now
            return 0.0
        is_first = self._first is None
        done, since = self._first = self._first or (fraction, now)
        if fraction > done:
            seconds = (now - since) * (1 - fraction) / (fraction - done)
        else:
            seconds = (since - self._step_began) * (1 - fraction) / fraction
        left = min(seconds, self._ends - now)
        if is_first and not is_terminal(sys.stderr) and left >= _MIN_REPORTED_SECONDS:
            click.echo(f"about {duration_text(left)} left", err=True)
        return left
