"""The throughput of concurrent replies, and the table of `bench_load.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from edgespec.bench import figures

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
