"""What speculation can bring on this machine: what passes cost, and what each drafter really does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from edgespec.costs.curve import CostCurve
from edgespec.errors import CancelledError
from edgespec.losslessness import Prompt, prompt_tokens
from edgespec.reply import Reply
from edgespec.runtime import Runtime

__all__ = ["DrafterFound", "PassCost", "Tuning", "break_even", "tune"]

# Less than this above plain decoding is within what a machine varies by itself.
_WORTH = 1.05
_DRAFT_LENGTH = 4
_LONGEST = 16


@dataclass(frozen=True, slots=True)
class PassCost:
    """A pass of `width` rows: its seconds, and v, the same in plain steps.

    limit: tokens per plain step when every guess is right and costs nothing. break_even: how often, in
    [0, 1], a free guess has to be right for the pass to pay; None where it never does.
    """

    width: int
    seconds: float
    v: float
    limit: float
    break_even: float | None


@dataclass(frozen=True, slots=True)
class DrafterFound:
    """What one drafter did on the prompts.

    speed_up: over plain decoding, measured at a draft length of 4. acceptance: how often a guess was right
    after right ones, in [0, 1]. c: what a drafted token cost, in plain steps. best_length, expected: the
    draft length that these figures make best, and the speed-up to expect of it on text where it guesses as
    often. drafted: tokens; with few of them the figures say little.
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
    """What was found. limit: the most any free guesses can bring here. verdict: in one line.

    auto: what method `auto` brought over plain decoding; None where the load was for another method. It has
    learnt from these replies, and a later load goes on from there.
    notice: why what passes cost is not kept for later loads; empty where it is.
    """

    target: str
    draft: str | None
    target_step_seconds: float
    passes: tuple[PassCost, ...]
    drafters: tuple[DrafterFound, ...]
    limit: float
    auto: float | None
    verdict: str
    notice: str

    def to_json(self) -> dict[str, object]:
        """All of it by name."""
        return asdict(self)


def tune(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 48,
    progress: Callable[[str, float], bool] | None = None,
) -> Tuning:
    """Measure what passes cost, keep that for later loads, and try each drafter on the prompts.

    Greedy replies, plain and drafted ones in turn, so that what the machine does meanwhile meets all alike.
    progress: called with (what, fraction); False cancels. Raises CancelledError, and what generating raises.
    """
    curve = runtime.measure_costs(progress)
    tries_auto = runtime.method.requested == "auto" and runtime.target.capabilities.rollback
    ways = ["none", *runtime.drafters, *(["auto"] if tries_auto else [])]
    replies: dict[str, list[Reply]] = {way: [] for way in ways}
    for i, prompt in enumerate(prompts):
        for j, way in enumerate(ways):
            if progress and not progress(f"trying {way}", (i * len(ways) + j) / (len(ways) * len(prompts))):
                raise _cancelled(runtime)
            replies[way].append(_reply(runtime, prompt, way, max_tokens))
    drafters = tuple(_found(way, replies[way], replies["none"], curve) for way in runtime.drafters)
    passes = tuple(
        _pass(width, seconds, curve) for width, seconds in zip(curve.widths, curve.seconds, strict=True)
    )
    limit = max(each.limit for each in passes)
    auto = _speed_up(replies["auto"], replies["none"]) if tries_auto else None
    able = runtime.target.capabilities
    return Tuning(
        runtime.target.name,
        runtime.draft.name if runtime.draft else None,
        curve.target_step_seconds,
        passes,
        drafters,
        limit,
        auto,
        _verdict(limit, drafters) if able.rollback else f"speculation cannot be used here: {able.reason}",
        runtime.costs_notice,
    )


def break_even(v: float, width: int) -> float | None:
    """How often, in [0, 1], guesses that cost nothing must be right for a pass of `width` rows to pay.

    The least a with 1 + a + ... + a^(width - 1) >= v; None where there is none.
    """
    if v > width:
        return None
    if v <= 1.0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _tokens(middle, width - 1) >= v else (middle, high)
    return high


def _tokens(agreement: float, length: int) -> float:
    """The tokens to expect of a pass with a chain of guesses, each right so often after right ones."""
    return sum(agreement**i for i in range(length + 1))


def _pass(width: int, seconds: float, curve: CostCurve) -> PassCost:
    v = curve.v(width)
    return PassCost(width, seconds, v, width / v, break_even(v, width))


def _reply(runtime: Runtime, prompt: Prompt, method: str, max_tokens: int) -> Reply:
    options: dict[str, Any] = {"method": method, "draft_length": None if method == "auto" else _DRAFT_LENGTH}
    options |= {"max_tokens": max_tokens, "temperature": 0.0, "seed": 1}
    stream = runtime.stream_tokens(prompt_tokens(runtime, prompt), **options)
    for _ in stream:
        pass
    if stream.reply.finish_reason == "cancelled":
        raise _cancelled(runtime)
    return stream.reply


def _cancelled(runtime: Runtime) -> CancelledError:
    return CancelledError("tuning was cancelled", runtime.costs_notice or "what passes cost is kept")


def _found(name: str, replies: Sequence[Reply], plain: Sequence[Reply], curve: CostCurve) -> DrafterFound:
    drafted, rounds = _sum(replies, "drafted_tokens"), _sum(replies, "target_passes")
    step_seconds = _sum(plain, "decode_seconds") / _sum(plain, "generated_tokens")
    token_seconds = _sum(replies, "draft_seconds") / drafted if drafted else 0.0
    # Sampling, rollback and the engine itself: what a round takes beside drafts and passes.
    other = sum(_sum(replies, f"{phase}_seconds") for phase in ("sampling", "rollback", "overhead")) / rounds
    acceptance = _acceptance(replies)
    # Rounds with a guess: a tree has several at the first depth.
    share = sum(
        min(*each.stats.drafted_per_position[:1], each.stats.target_passes)
        for each in replies
        if each.stats.drafted_per_position
    )
    # Tokens of a tree for each of its depths; a chain has one.
    breadth = max(1.0, drafted / (share * _DRAFT_LENGTH)) if share else 1.0

    def speed_up(length: int) -> float:
        """S(k), where rounds without a guess, as lookups have them, are plain ones."""
        drafts, tokens = share / rounds, round(breadth * length)
        pass_seconds = curve.v(tokens + 1) * curve.target_step_seconds
        seconds = drafts * (tokens * token_seconds + pass_seconds + other) + (1.0 - drafts) * step_seconds
        return (drafts * _tokens(acceptance, length) + 1.0 - drafts) * step_seconds / seconds

    best = max(range(1, _LONGEST + 1), key=speed_up)
    return DrafterFound(
        name,
        _speed_up(replies, plain),
        acceptance,
        token_seconds / curve.target_step_seconds,
        best,
        speed_up(best),
        int(drafted),
    )


def _speed_up(replies: Sequence[Reply], plain: Sequence[Reply]) -> float:
    """Over plain decoding of the same prompts."""
    return geometric_mean(
        (one.stats.tpot_seconds or 1.0) / (each.stats.tpot_seconds or 1.0)
        for one, each in zip(plain, replies, strict=True)
    )


def _sum(replies: Sequence[Reply], name: str) -> float:
    return float(sum(getattr(reply.stats, name) for reply in replies))


def _acceptance(replies: Sequence[Reply]) -> float:
    """How often a guess was right, of those that were judged: guesses after a wrong one were not."""
    hits = judged = 0
    for reply in replies:
        drafted, accepted = reply.stats.drafted_per_position, reply.stats.accepted_per_position
        hits += sum(accepted)
        # Of a tree's guesses at one depth one at most is right: they are judged together.
        judged += sum(
            min(pair) for pair in zip(drafted, [reply.stats.target_passes, *accepted], strict=False)
        )
    return hits / judged if judged else 0.0


def _verdict(limit: float, drafters: Sequence[DrafterFound]) -> str:
    if limit < _WORTH:
        return (
            "speculation cannot pay here: a pass of several tokens costs as much as those tokens one by one,"
            " so --method none is the fastest"
        )
    if drafters and not any(found.drafted for found in drafters):
        return "nothing was drafted in replies as short as these: a larger -n tells more"
    best = max((found for found in drafters if found.drafted), key=lambda found: found.expected, default=None)
    most = f"guesses that are all right and free would bring {limit:.2f}x"
    if best is None or best.expected < _WORTH:
        return f"no drafter at hand pays here ({most}): --method none is the fastest"
    return (
        f"{best.name} pays here: --method {best.name} --draft-length {best.best_length} should bring"
        f" {best.expected:.2f}x on text like this ({most})"
    )
