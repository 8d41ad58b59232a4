"""A benchmark report: the results, and the settings that produced them.

The report compares the methods with plain decoding, and `auto` with the best method for each prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np

from edgespec.api.runtime import Runtime
from edgespec.bench.constants import BOOTSTRAP_DRAWS, CONFIDENCE_LEVEL
from edgespec.bench.runs import AUTO, CONTROL, PLAIN, BenchPlan, BenchRun, Ending, Measurement, MethodConfig
from edgespec.decode.reply import MethodReport
from edgespec.engine.stats import Stats
from edgespec.methods.costs.curve import CostCurve
from edgespec.model.model_facts import Exactness

__all__ = [
    "PHASES",
    "BenchReport",
    "MethodFigures",
    "OracleComparison",
    "figures",
    "geometric_mean",
    "interval",
    "make_report",
    "oracle",
    "oracle_comparisons",
    "typical",
    "worst",
]

# Speed-ups over plain decoding, with one sequence per prompt and one value per repeat.
Ratios = Sequence[Sequence[float]]


def typical(ratios: Sequence[float]) -> float:
    """Return the median. For an even number of values, use the geometric mean of the middle two."""
    return float(np.exp(np.median(np.log(ratios))))


def geometric_mean(ratios: Ratios) -> float:
    """Return the geometric mean of the prompts' median speed-ups."""
    return float(np.exp(np.mean(np.log([typical(each) for each in ratios]))))


def worst(ratios: Ratios) -> float:
    """Return the lowest median speed-up of any prompt."""
    return min(typical(each) for each in ratios)


def interval(ratios: Ratios, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the geometric mean, or None if there is only one reply.

    Uses a percentile bootstrap (Efron 1979) over prompts and repeats. With few prompts, the interval is too
    narrow.

    Args:
        ratios: Speed-ups over plain decoding by prompt and repeat.
        seed: Random seed for the bootstrap, fixed so that reports are reproducible.
    """
    if sum(len(each) for each in ratios) < 2:
        return None
    random = np.random.default_rng(seed)
    logs = [np.log(each) for each in ratios]
    drawn = [each[random.integers(0, len(each), (BOOTSTRAP_DRAWS, len(each)))] for each in logs]
    medians = np.stack([np.median(each, axis=1) for each in drawn], axis=1)
    picks = random.integers(0, len(logs), medians.shape)
    means = np.take_along_axis(medians, picks, axis=1).mean(axis=1)
    low, high = np.exp(np.quantile(means, ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2)))
    return float(low), float(high)


def oracle(fixed: Sequence[Ratios]) -> float:
    """Return the geometric mean speed-up of using the best fixed method for each prompt.

    This is an upper bound, because the best method is chosen in hindsight.

    Args:
        fixed: The speed-ups of each fixed method, with the same prompts in the same order.
    """
    best = [max(typical(each) for each in prompt) for prompt in zip(*fixed, strict=True)]
    return float(np.exp(np.mean(np.log(best))))


# Phases of a reply whose durations are reported.
PHASES = ("draft", "verify", "sampling", "rollback", "overhead", "prefill")


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """Results of one method at one temperature, over all prompts in one category.

    Attributes:
        category: Category of the prompts, or None for all prompts.
        effective: Methods that actually ran, as reported by the replies.
        note: The last message from the drafters, or why no drafter ran.
        speed_up: Decoding speed relative to plain decoding, excluding prefill: the median over the
            repeats of each prompt, then the geometric mean over prompts. None if plain decoding was not
            measured.
        low, high: 95 % confidence interval of `speed_up`. None if there is only one reply.
        worst: Lowest speed-up of any prompt.
        whole_speed_up: Like `speed_up`, but including prefill.
        tokens_per_second: Decoding speed, excluding prefill. Geometric mean over replies.
        ttft_seconds, tpot_seconds: Median time to first token, and median time per output token.
        acceptance: Accepted tokens divided by drafted tokens. None if nothing was drafted.
        acceptance_by_depth: Fraction of the drafted tokens at each depth that were accepted.
        seconds: Total duration of each phase over all replies.
        compared: Number of replies that must match plain decoding token for token.
        identical: Number of `compared` replies that do match.
    """

    temperature: float
    category: str | None
    config: MethodConfig
    effective: tuple[str, ...]
    note: str
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
    decoded_tokens: int
    drafted_tokens: int
    seconds: dict[str, float]
    draft_weight_bytes: int
    draft_kv_bytes: int
    draft_other_bytes: int
    compared: int
    identical: int

    def milliseconds_per_token(self, phase: str) -> float:
        """Return the mean time of a phase per decoded token, in milliseconds."""
        return 1e3 * self.seconds[phase] / max(1, self.decoded_tokens)


@dataclass(frozen=True, slots=True)
class OracleComparison:
    """Compares `auto` with the best single method, and with the best method for each prompt.

    Attributes:
        category: Category of the prompts. None for all prompts.
        best: The method with the highest speed-up over the category's prompts. It can be plain decoding, but
            not a method that drafted nothing.
        best_speed_up: Speed-up of `best` over plain decoding.
        oracle_speed_up: Speed-up if every prompt used its own best method.
        auto_speed_up: Speed-up of `auto`. None if `auto` was not measured.
        share_of_best, share_of_oracle: `auto_speed_up` divided by `best_speed_up` and by `oracle_speed_up`.
    """

    temperature: float
    category: str | None
    prompts: int
    best: MethodConfig
    best_speed_up: float
    oracle_speed_up: float
    auto_speed_up: float | None
    share_of_best: float | None
    share_of_oracle: float | None


def figures(
    rows: Sequence[Measurement], configs: Sequence[MethodConfig], *, equal_tokens: Callable[[float], bool]
) -> list[MethodFigures]:
    """Compute the results by temperature, category and method. The first category contains all prompts.

    Args:
        rows: Measured replies.
        configs: Method configurations, in the order of the results.
        equal_tokens: Returns whether replies at a given temperature must match plain decoding token for
            token.
    """
    plain = {_pairing_key(row): row for row in rows if row.config == PLAIN}
    return [
        _figures(temperature, category, config, same_config, plain, equal_tokens(temperature))
        for temperature, category, group in _groups(rows)
        for config, same_config in _by_config(group, configs).items()
    ]


def oracle_comparisons(
    rows: Sequence[Measurement], configs: Sequence[MethodConfig]
) -> list[OracleComparison]:
    """Compare `auto` with the best fixed methods, for each temperature and category.

    Includes only prompts that every method answered, so that all methods are compared on the same prompts.
    """
    plain = {_pairing_key(row): row for row in rows if row.config == PLAIN}
    comparisons = []
    for temperature, category, group in _groups(rows):
        by_config = _by_config(group, configs)
        ratios = {config: _ratios(by_config.get(config, ()), plain, _speed) for config in configs}
        prompts = [name for name in ratios[PLAIN] if all(name in found for found in ratios.values())]
        if prompts:
            # A method that drafted nothing is effectively plain decoding, so it can only be fastest by
            # chance.
            silent = {config for config in configs if not _has_drafted(by_config.get(config, ()))}
            kept = {config: [found[name] for name in prompts] for config, found in ratios.items()}
            comparisons.append(_oracle_comparison(temperature, category, len(prompts), kept, silent))
    return comparisons


def _oracle_comparison(
    temperature: float,
    category: str | None,
    prompts: int,
    configs: Mapping[MethodConfig, Ratios],
    silent: set[MethodConfig],
) -> OracleComparison:
    excluded = {AUTO, CONTROL, *silent} - {PLAIN}
    fixed = {config: ratios for config, ratios in configs.items() if config not in excluded}
    means = {config: geometric_mean(ratios) for config, ratios in fixed.items()}
    best = max(means, key=lambda config: means[config])
    reached = oracle(list(fixed.values()))
    auto = geometric_mean(configs[AUTO]) if AUTO in configs else None
    shares = (None, None) if auto is None else (auto / means[best], auto / reached)
    return OracleComparison(temperature, category, prompts, best, means[best], reached, auto, *shares)


def _has_drafted(rows: Iterable[Measurement]) -> bool:
    return any(row.reply.stats.drafted_tokens for row in rows)


def _groups(rows: Sequence[Measurement]) -> Iterable[tuple[float, str | None, list[Measurement]]]:
    for temperature in dict.fromkeys(row.temperature for row in rows):
        of_all = [row for row in rows if row.temperature == temperature]
        for category in (None, *sorted({row.category for row in of_all})):
            group = [row for row in of_all if category is None or row.category == category]
            if any(row.config == PLAIN for row in group):
                yield temperature, category, group


def _by_config(
    rows: Iterable[Measurement], configs: Sequence[MethodConfig]
) -> dict[MethodConfig, list[Measurement]]:
    found: dict[MethodConfig, list[Measurement]] = {config: [] for config in configs}
    for row in rows:
        found[row.config].append(row)
    return {config: same_config for config, same_config in found.items() if same_config}


def _pairing_key(row: Measurement) -> tuple[str, float, int]:
    return row.prompt, row.temperature, row.repeat


def _speed(row: Measurement) -> float:
    # A one-token reply has no decoding speed if the last prefill pass produced the token.
    return row.reply.stats.tokens_per_second or _whole_speed(row)


def _whole_speed(row: Measurement) -> float:
    return len(row.reply.tokens) / row.seconds


def _ratios(
    rows: Iterable[Measurement],
    plain: Mapping[tuple[str, float, int], Measurement],
    speed: Callable[[Measurement], float],
) -> dict[str, list[float]]:
    """Return the speed of each reply relative to plain decoding, grouped by prompt."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        other = plain.get(_pairing_key(row))
        if other is not None:
            found[row.prompt].append(speed(row) / speed(other))
    return dict(found)


def _figures(
    temperature: float,
    category: str | None,
    config: MethodConfig,
    rows: Sequence[Measurement],
    plain: Mapping[tuple[str, float, int], Measurement],
    equal: bool,
) -> MethodFigures:
    ratios = list(_ratios(rows, plain, _speed).values())
    whole = list(_ratios(rows, plain, _whole_speed).values())
    bounds = interval(ratios) if ratios and config != PLAIN else None
    stats = [row.reply.stats for row in rows]
    decoded, drafted = _sum(stats, "decoded_tokens"), _sum(stats, "drafted_tokens")
    pairs = [(row, plain[_pairing_key(row)]) for row in rows if _pairing_key(row) in plain and equal]
    return MethodFigures(
        temperature=temperature,
        category=category,
        config=config,
        effective=tuple(dict.fromkeys(row.reply.method.effective for row in rows)),
        note=_note(rows[-1].reply.method),
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
        tokens_per_pass=decoded / max(1, _sum(stats, "target_passes")),
        acceptance=_sum(stats, "accepted_tokens") / drafted if drafted else None,
        acceptance_by_depth=_by_depth(stats),
        decoded_tokens=int(decoded),
        drafted_tokens=int(drafted),
        seconds={phase: _sum(stats, f"{phase}_seconds") for phase in PHASES},
        draft_weight_bytes=max(each.draft_weight_bytes for each in stats),
        draft_kv_bytes=max(each.draft_kv_bytes for each in stats),
        draft_other_bytes=max(each.draft_other_bytes for each in stats),
        compared=len(pairs),
        identical=sum(row.reply.tokens == other.reply.tokens for row, other in pairs),
    )


def _note(method: MethodReport) -> str:
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


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of a benchmark run and the settings used to measure them.

    Attributes:
        planned: Number of planned replies. `rows` contains the measured ones.
        ending: Why the run ended.
        error: The error message, if the run failed.
        curve: Measured duration of verify passes, by number of tokens in the pass.
        peak_memory_bytes: Peak memory of the process during the whole run.
        figures: Speed, acceptance and memory of each method, by temperature and prompt category.
        oracle_comparisons: Comparisons of `auto` with the best fixed methods.
        exactness: Whether replies are identical to plain decoding.
    """

    target: str
    target_quantisation: str
    draft: str | None
    acceptance: str
    max_tokens: int
    repeats: int
    seed: int
    planned: int
    ending: Ending
    error: str
    curve: CostCurve
    peak_memory_bytes: int
    figures: tuple[MethodFigures, ...]
    oracle_comparisons: tuple[OracleComparison, ...]
    rows: tuple[Measurement, ...]
    exactness: Exactness | None = None

    @property
    def differing(self) -> int:
        """Return the number of replies that should match plain decoding but do not."""
        return sum(each.compared - each.identical for each in self.figures if each.category is None)

    def to_json(self, *, rows: bool = False) -> dict[str, object]:
        """Return the report as a JSON object, with one entry per reply if `rows` is set."""
        summary = asdict(replace(self, rows=()))
        del summary["rows"]
        summary["planned_replies"] = summary.pop("planned")
        summary |= {
            "exactness": self.exactness.to_json() if self.exactness else None,
            "replies": len(self.rows),
            "differing_replies": self.differing,
        }
        return summary | ({"rows": [row.to_json() for row in self.rows]} if rows else {})


def make_report(runtime: Runtime, plan: BenchPlan, bench_run: BenchRun) -> BenchReport:
    """Create the report for a complete or partial benchmark run."""
    rows = bench_run.rows

    def equal_tokens(temperature: float) -> bool:
        return plan.acceptance == "invariant" or temperature == 0

    return BenchReport(
        target=runtime.target.name,
        target_quantisation=runtime.target.quantisation,
        draft=runtime.draft.name if runtime.draft else None,
        acceptance=plan.acceptance,
        max_tokens=plan.max_tokens,
        repeats=plan.repeats,
        seed=plan.seed,
        planned=plan.replies,
        ending=bench_run.ending,
        error=bench_run.error,
        curve=bench_run.curve,
        peak_memory_bytes=max((row.reply.stats.peak_memory_bytes for row in rows), default=0),
        figures=tuple(figures(rows, plan.configs, equal_tokens=equal_tokens)),
        oracle_comparisons=tuple(oracle_comparisons(rows, plan.configs)),
        rows=rows,
        exactness=runtime.exactness_for(acceptance=plan.acceptance),
    )
