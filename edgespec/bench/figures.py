"""From replies to figures: each way against plain decoding of the same prompts, and against hindsight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from edgespec.bench.plan import AUTO, CONTROL, PLAIN, Way
from edgespec.bench.runs import Row
from edgespec.bench.statistics import Ratios, geometric_mean, interval, oracle, worst
from edgespec.engine.stats import Stats
from edgespec.reply import MethodReport

__all__ = ["PHASES", "Figures", "Hindsight", "figures", "hindsights"]

# Of a round; prefill is paid once a reply, drafts' prefill included.
PHASES = ("draft", "verify", "sampling", "rollback", "overhead", "prefill")


@dataclass(frozen=True, slots=True)
class Figures:
    """One way at one temperature on the prompts of one category; category None: on all prompts.

    speed_up: tokens per second over plain decoding's, prefill not counted: the geometric mean over prompts of
    what is typical for their repeats. low, high: its 95 % confidence interval; None for a single reply.
    worst: the least of them. whole_speed_up: the same for whole replies, prefill included. All of these
    are None where plain decoding of the same prompts was not measured.
    effective: what the method came to; said: what its drafters said of themselves last, or why none runs.
    tokens_per_second is a geometric mean, ttft_seconds and tpot_seconds
    are medians; acceptance_by_depth: of the guesses at each depth, the share that was accepted.
    seconds: in all replies, by phase. joules_per_token: of the whole processors, None where nobody tells.
    same: replies with exactly plain decoding's tokens, of the `compared`.
    """

    temperature: float
    category: str | None
    way: Way
    effective: tuple[str, ...]
    said: str
    prompts: int
    replies: int
    speed_up: float | None
    low: float | None
    high: float | None
    worst: float | None
    whole_speed_up: float | None
    tokens_per_second: float
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_pass: float
    acceptance: float | None
    acceptance_by_depth: tuple[float, ...]
    generated_tokens: int
    drafted_tokens: int
    seconds: dict[str, float]
    draft_weight_bytes: int
    draft_kv_bytes: int
    draft_other_bytes: int
    joules_per_token: float | None
    compared: int
    same: int


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The best fixed choices, plain decoding among them, and how near `auto` came to them.

    best, best_speed_up: the one way that was best on the category. oracle_speed_up: with the best way for
    each prompt; noise flatters it a little. The shares are of these speed-ups; None without `auto`.
    """

    temperature: float
    category: str | None
    prompts: int
    best: Way
    best_speed_up: float
    oracle_speed_up: float
    auto_speed_up: float | None
    share_of_best: float | None
    share_of_oracle: float | None


def figures(
    rows: Sequence[Row], ways: Sequence[Way], *, equal_tokens: Callable[[float], bool]
) -> list[Figures]:
    """The figures by temperature, category (all of them first) and way, in the order of `ways`.

    equal_tokens: whether replies at a temperature ought to be plain decoding's, token for token.
    """
    plain = {_moment(row): row for row in rows if row.way == PLAIN}
    return [
        _figures(temperature, category, way, same_way, plain, equal_tokens(temperature))
        for temperature, category, group in _groups(rows)
        for way, same_way in _by_way(group, ways).items()
    ]


def hindsights(rows: Sequence[Row], ways: Sequence[Way]) -> list[Hindsight]:
    """What hindsight says, by temperature and category, all categories first.

    Only prompts that were answered in every way count: they alone can be compared.
    """
    plain = {_moment(row): row for row in rows if row.way == PLAIN}
    told = []
    for temperature, category, group in _groups(rows):
        by_way = _by_way(group, ways)
        ratios = {way: _ratios(by_way.get(way, ()), plain, _speed) for way in ways}
        prompts = [name for name in ratios[PLAIN] if all(name in found for found in ratios.values())]
        if prompts:
            kept = {way: [found[name] for name in prompts] for way, found in ratios.items()}
            told.append(_hindsight(temperature, category, len(prompts), kept))
    return told


def _hindsight(
    temperature: float, category: str | None, prompts: int, ways: Mapping[Way, Ratios]
) -> Hindsight:
    fixed = {way: ratios for way, ratios in ways.items() if way not in (AUTO, CONTROL)}
    means = {way: geometric_mean(ratios) for way, ratios in fixed.items()}
    best = max(means, key=lambda way: means[way])
    reached = oracle(list(fixed.values()))
    auto = geometric_mean(ways[AUTO]) if AUTO in ways else None
    return Hindsight(
        temperature,
        category,
        prompts,
        best,
        means[best],
        reached,
        auto,
        None if auto is None else auto / means[best],
        None if auto is None else auto / reached,
    )


def _groups(rows: Sequence[Row]) -> Iterable[tuple[float, str | None, list[Row]]]:
    """The rows of each temperature, whole and by category, where plain decoding is among them."""
    for temperature in dict.fromkeys(row.temperature for row in rows):
        of_all = [row for row in rows if row.temperature == temperature]
        for category in (None, *sorted({row.category for row in of_all})):
            group = [row for row in of_all if category is None or row.category == category]
            if any(row.way == PLAIN for row in group):
                yield temperature, category, group


def _by_way(rows: Iterable[Row], ways: Sequence[Way]) -> dict[Way, list[Row]]:
    """The rows of each way that has any, in the order of `ways`."""
    found: dict[Way, list[Row]] = {way: [] for way in ways}
    for row in rows:
        found[row.way].append(row)
    return {way: same_way for way, same_way in found.items() if same_way}


def _moment(row: Row) -> tuple[str, float, int]:
    """What two rows share that may be compared: prompt, temperature, repeat."""
    return row.prompt, row.temperature, row.repeat


def _speed(row: Row) -> float:
    """Tokens per second, prefill not counted."""
    return row.reply.stats.tokens_per_second or 0.0


def _whole_speed(row: Row) -> float:
    """Tokens per second of the whole reply."""
    return len(row.reply.tokens) / row.seconds


def _ratios(
    rows: Iterable[Row], plain: Mapping[tuple[str, float, int], Row], speed: Callable[[Row], float]
) -> dict[str, list[float]]:
    """Of each prompt, the speed of its repeats over plain decoding's in the same round."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        other = plain.get(_moment(row))
        if other is not None:
            found[row.prompt].append(speed(row) / speed(other))
    return dict(found)


def _figures(
    temperature: float,
    category: str | None,
    way: Way,
    rows: Sequence[Row],
    plain: Mapping[tuple[str, float, int], Row],
    equal: bool,
) -> Figures:
    ratios = list(_ratios(rows, plain, _speed).values())
    whole = list(_ratios(rows, plain, _whole_speed).values())
    bounds = interval(ratios) if ratios and way != PLAIN else None
    stats = [row.reply.stats for row in rows]
    generated, drafted = _sum(stats, "generated_tokens"), _sum(stats, "drafted_tokens")
    pairs = [(row, plain[_moment(row)]) for row in rows if _moment(row) in plain and equal]
    joules = [row.joules for row in rows if row.joules is not None]
    return Figures(
        temperature=temperature,
        category=category,
        way=way,
        effective=tuple(dict.fromkeys(row.reply.method.effective for row in rows)),
        said=_said(rows[-1].reply.method),
        prompts=len({row.prompt for row in rows}),
        replies=len(rows),
        speed_up=geometric_mean(ratios) if ratios else None,
        low=bounds[0] if bounds else None,
        high=bounds[1] if bounds else None,
        worst=worst(ratios) if ratios else None,
        whole_speed_up=geometric_mean(whole) if whole else None,
        tokens_per_second=geometric_mean([[_speed(row)] for row in rows]),
        ttft_seconds=median(each.ttft_seconds or 0.0 for each in stats),
        tpot_seconds=median(each.tpot_seconds or 0.0 for each in stats),
        tokens_per_pass=generated / _sum(stats, "target_passes"),
        acceptance=_sum(stats, "accepted_tokens") / drafted if drafted else None,
        acceptance_by_depth=_by_depth(stats),
        generated_tokens=int(generated),
        drafted_tokens=int(drafted),
        seconds={phase: _sum(stats, f"{phase}_seconds") for phase in PHASES},
        draft_weight_bytes=max(each.draft_weight_bytes for each in stats),
        draft_kv_bytes=max(each.draft_kv_bytes for each in stats),
        draft_other_bytes=max(each.draft_other_bytes for each in stats),
        joules_per_token=sum(joules) / generated if len(joules) == len(rows) else None,
        compared=len(pairs),
        same=sum(row.reply.tokens == other.reply.tokens for row, other in pairs),
    )


def _said(method: MethodReport) -> str:
    return method.note or (method.reason if method.effective == PLAIN.method != method.requested else "")


def _sum(stats: Iterable[Stats], name: str) -> float:
    return float(sum(getattr(each, name) for each in stats))


def _by_depth(stats: Sequence[Stats]) -> tuple[float, ...]:
    deepest = max(len(each.drafted_per_position) for each in stats)
    shares = []
    for depth in range(deepest):
        reaching = [each for each in stats if depth < len(each.drafted_per_position)]
        drafted = sum(each.drafted_per_position[depth] for each in reaching)
        shares.append(sum(each.accepted_per_position[depth] for each in reaching) / drafted)
    return tuple(shares)
