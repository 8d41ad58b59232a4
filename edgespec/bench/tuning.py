"""Measure the cost of verify passes, try every drafter, and recommend a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import geometric_mean
from typing import Any

from edgespec.api.runtime import Runtime
from edgespec.bench.constants import MAX_BUSY_SHARE, MIN_SPEED_UP, TRIED_DRAFT_LENGTH
from edgespec.decode.reply import Reply
from edgespec.errors import CancelledError
from edgespec.loading.recommendation import cost_text, draft_advice
from edgespec.losslessness.cases import Prompt, prompt_tokens
from edgespec.methods.constants import MAX_DRAFT_LENGTH
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.costs.target_costs import fastest_threads
from edgespec.system.cores import usable_cores

__all__ = ["DrafterResult", "PassCost", "Tuning", "break_even", "tune"]


@dataclass(frozen=True, slots=True)
class PassCost:
    """Duration of a verify pass, and the highest speed-up that it allows.

    Attributes:
        width: Number of tokens in the pass.
        seconds: Duration of the pass in seconds.
        v: Duration of the pass relative to a single-token pass.
        limit: Speed-up over plain decoding if every draft token is accepted and drafting costs nothing.
        break_even: Acceptance rate (0 to 1) above which drafting makes decoding faster, assuming that
            drafting costs nothing. None if there is no such rate.
    """

    width: int
    seconds: float
    v: float
    limit: float
    break_even: float | None


@dataclass(frozen=True, slots=True)
class DrafterResult:
    """Measured performance of a drafter.

    Attributes:
        speed_up: Speed-up over plain decoding at a draft length of 4.
        acceptance: Fraction of draft tokens that were accepted, counting only tokens whose predecessors
            were all accepted.
        c: Time to draft one token, relative to a single-token target pass.
        best_length: Draft length with the highest expected speed-up.
        expected: Expected speed-up at `best_length`.
        drafted: Number of drafted tokens. If it is small, the other values are unreliable.
    """

    name: str
    speed_up: float
    acceptance: float
    c: float
    best_length: int
    expected: float
    drafted: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of `edgespec tune`.

    Attributes:
        thread_seconds: Duration of a single-token pass in seconds, keyed by the CPU thread counts compared.
            Empty if none were compared.
        threads: Fastest CPU thread count, or 0 if none were compared.
        passes: Durations of verify passes, by number of tokens in the pass.
        drafters: Performance of each drafter.
        limit: Highest possible speed-up on this machine, if every draft token is accepted and drafting costs
            nothing.
        auto: Speed-up of method `auto`. None if the models were loaded with another method.
        verdict: The recommendation. If no method helps, also why, and which model would be faster with a
            draft model.
        notice: Why the pass durations could not be saved, or empty if they were.
        was_cpu_busy: Whether other programs used the CPU during the measurements.
    """

    target: str
    draft: str | None
    target_step_seconds: float
    thread_seconds: Mapping[int, float]
    threads: int
    passes: tuple[PassCost, ...]
    drafters: tuple[DrafterResult, ...]
    limit: float
    auto: float | None
    verdict: str
    notice: str
    was_cpu_busy: bool = False

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def tune(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 48,
    progress: Callable[[str, float], bool] | None = None,
) -> Tuning:
    """Measure and save the duration of verify passes, then try each drafter on the prompts.

    Replies use greedy decoding. Each prompt is answered with every method before the next prompt, so
    that a gradual slowdown of the machine affects all methods equally.

    Args:
        runtime: The loaded models to measure.
        prompts: Prompts to answer with every method.
        max_tokens: Maximum reply length in tokens.
        progress: Called with a description and the completed fraction. Returning False cancels tuning.

    Raises:
        CancelledError: The tuning was cancelled.
    """
    curve = runtime.measure_costs(progress)
    threads = runtime.thread_seconds
    capabilities = runtime.target.capabilities
    tries_auto = runtime.method.requested == "auto" and capabilities.rollback
    configs = ["none", *runtime.drafters, *(["auto"] if tries_auto else [])]
    replies: dict[str, list[Reply]] = {config: [] for config in configs}
    for done, (prompt, config) in enumerate(product(prompts, configs)):
        if progress and not progress(f"trying {config}", done / (len(configs) * len(prompts))):
            raise _cancelled(runtime)
        replies[config].append(_reply(runtime, prompt, config, max_tokens))
    plain = replies["none"]
    drafters = tuple(_drafter_result(name, replies[name], plain, curve) for name in runtime.drafters)
    passes = tuple(_pass_cost(*measured, curve) for measured in zip(curve.widths, curve.seconds, strict=True))
    limit = max(each.limit for each in passes)
    auto = _speed_up(replies["auto"], plain) if tries_auto else None
    return Tuning(
        target=runtime.target.name,
        draft=runtime.draft.name if runtime.draft else None,
        target_step_seconds=curve.target_step_seconds,
        thread_seconds=threads,
        threads=fastest_threads(threads, usable_cores()) if threads else 0,
        passes=passes,
        drafters=drafters,
        limit=limit,
        auto=auto,
        verdict=_verdict(limit, drafters, auto, _why(curve, runtime))
        if capabilities.rollback
        else f"Drafting does not work with this model: {capabilities.reason}.",
        notice=runtime.costs_notice,
        was_cpu_busy=any(_is_disturbed(each) for each in replies.values()),
    )


def break_even(v: float, width: int) -> float | None:
    """Return the break-even acceptance rate, assuming that drafting takes no time.

    Args:
        v: Duration of a verify pass, relative to a single-token pass.
        width: Number of tokens in the verify pass.

    Returns:
        The lowest rate at which a pass emits `v` tokens on average, or None if there is none. This is
        the smallest a in [0, 1] for which 1 + a + ... + a^(width - 1) >= v.
    """
    if v > width:
        return None
    if v <= 1.0:
        return 0.0
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if _expected_tokens(middle, width - 1) >= v else (middle, high)
    return high


def _expected_tokens(acceptance: float, length: int) -> float:
    return sum(acceptance**i for i in range(length + 1))


def _is_disturbed(replies: Sequence[Reply]) -> bool:
    return _sum(replies, "busy_passes") > MAX_BUSY_SHARE * _sum(replies, "target_passes")


def _pass_cost(width: int, seconds: float, curve: CostCurve) -> PassCost:
    v = curve.v(width)
    return PassCost(width, seconds, v, width / v, break_even(v, width))


def _reply(runtime: Runtime, prompt: Prompt, method: str, max_tokens: int) -> Reply:
    options: dict[str, Any] = {
        "method": method,
        "draft_length": None if method == "auto" else TRIED_DRAFT_LENGTH,
    }
    options |= {"max_tokens": max_tokens, "temperature": 0.0, "seed": 1}
    stream = runtime.stream_tokens(prompt_tokens(runtime, prompt), **options)
    for _ in stream:
        pass
    if stream.reply.finish_reason == "cancelled":
        raise _cancelled(runtime)
    return stream.reply


def _cancelled(runtime: Runtime) -> CancelledError:
    return CancelledError(
        "tuning was cancelled",
        runtime.costs_notice or "later replies will use the saved measurements",
    )


def _drafter_result(
    name: str, replies: Sequence[Reply], plain: Sequence[Reply], curve: CostCurve
) -> DrafterResult:
    drafted, rounds = _sum(replies, "drafted_tokens"), _sum(replies, "target_passes")
    step_seconds = _sum(plain, "decode_seconds") / max(1, _sum(plain, "decoded_tokens"))
    token_seconds = _sum(replies, "draft_seconds") / drafted if drafted else 0.0
    other = sum(_sum(replies, f"{phase}_seconds") for phase in ("sampling", "rollback", "overhead")) / rounds
    acceptance = _acceptance(replies)
    share = sum(
        min(*each.stats.drafted_per_position[:1], each.stats.target_passes)
        for each in replies
        if each.stats.drafted_per_position
    )
    breadth = max(1.0, drafted / (share * TRIED_DRAFT_LENGTH)) if share else 1.0

    def speed_up(length: int) -> float:
        drafts, tokens = share / rounds, round(breadth * length)
        pass_seconds = curve.v(tokens + 1) * curve.target_step_seconds
        seconds = drafts * (tokens * token_seconds + pass_seconds + other) + (1.0 - drafts) * step_seconds
        return (drafts * _expected_tokens(acceptance, length) + 1.0 - drafts) * step_seconds / seconds

    best = max(range(1, MAX_DRAFT_LENGTH + 1), key=speed_up)
    return DrafterResult(
        name,
        _speed_up(replies, plain),
        acceptance,
        token_seconds / curve.target_step_seconds,
        best,
        speed_up(best),
        int(drafted),
    )


def _speed_up(replies: Sequence[Reply], plain: Sequence[Reply]) -> float:
    return geometric_mean(
        (one.stats.tpot_seconds or 1.0) / (each.stats.tpot_seconds or 1.0)
        for one, each in zip(plain, replies, strict=True)
    )


def _sum(replies: Sequence[Reply], name: str) -> float:
    return float(sum(getattr(reply.stats, name) for reply in replies))


def _acceptance(replies: Sequence[Reply]) -> float:
    hits = judged = 0
    for reply in replies:
        drafted, accepted = reply.stats.drafted_per_position, reply.stats.accepted_per_position
        hits += sum(accepted)
        # Count one token per level of a draft tree, because at most one token per level can be accepted.
        judged += sum(
            min(pair) for pair in zip(drafted, [reply.stats.target_passes, *accepted], strict=False)
        )
    return hits / judged if judged else 0.0


def _why(curve: CostCurve, runtime: Runtime) -> str:
    """Return a sentence on why drafting may not help with this model, and which model it would help."""
    budget_bytes = runtime.plan.budget_bytes("memory") if runtime.plan else None
    advice = draft_advice(budget_bytes) or "`edgespec recommend` shows which models it would help"
    return f"On this machine, {cost_text(curve.v(2))}; {advice}."


def _verdict(
    limit: float, drafters: Sequence[DrafterResult], auto: float | None = None, why: str = ""
) -> str:
    if limit < MIN_SPEED_UP:
        verdict = (
            "Drafting cannot help on this machine: checking several tokens at once takes as long as"
            " generating them one by one. Use --method none."
        )
        return f"{verdict} {why}".rstrip()
    tried = [result for result in drafters if result.drafted]
    if drafters and not tried:
        return "The replies were too short to try any method. Use a larger --max-tokens."
    best = max(tried, key=lambda result: result.expected, default=None)
    ceiling = f"at most {limit:.2f}x is possible on this machine"
    expected = best.expected if best is not None else 1.0
    if auto is not None and auto >= max(expected, MIN_SPEED_UP):
        return f"Keep the default: no single method is expected to be faster ({ceiling})."
    if best is None or expected < MIN_SPEED_UP:
        verdict = f"No available method makes replies faster here ({ceiling}). Use --method none."
        return f"{verdict} {why}".rstrip()
    return (
        f"Use --method {best.name} --draft-length {best.best_length}. Expect a speed-up of"
        f" {best.expected:.2f}x on similar text ({ceiling})."
    )
