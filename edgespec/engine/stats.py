"""What was counted and timed in one reply. Rates are derived, never stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Literal

__all__ = ["Phase", "RoundTimer", "Stats"]

Phase = Literal["draft", "verify", "sampling", "rollback", "overhead"]


@dataclass(slots=True)
class Stats:
    """Counts and times of one reply, updated once a round.

    Seconds are wall-clock. `overhead_seconds` is the engine's own time in the rounds: everything but
    draft, verify, sampling and rollback. `growth_seconds` went into making the context larger, before and
    between the rounds, and is no part of them nor of `prefill_seconds`. `ttft_seconds` runs from the request
    to the first token.
    `target_step_seconds` is the last known cost of a plain step of this target (0: unknown).
    `ledger_credit_seconds` is what guessing has gained so far, less what it cost; `worst_case_loss` the most
    that this reply may lose, as a share of its plain time. Both are None where no ledger is kept.
    `draft_weight_bytes`, `draft_kv_bytes` and `draft_other_bytes` are what drafting keeps in memory beside
    the target: a model, its keys and values, and what guesses are looked up in or learnt with.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rollback_seconds: float = 0.0
    sampling_seconds: float = 0.0
    overhead_seconds: float = 0.0
    prefill_seconds: float = 0.0
    growth_seconds: float = 0.0
    ttft_seconds: float | None = None
    target_step_seconds: float = 0.0
    ledger_credit_seconds: float | None = None
    worst_case_loss: float | None = None
    draft_weight_bytes: int = 0
    draft_kv_bytes: int = 0
    draft_other_bytes: int = 0
    peak_memory_bytes: int = 0

    def count_round(self, drafted_at_depth: list[int], accepted: int, emitted: int) -> None:
        """Count one round. `drafted_at_depth[d]` is the number of drafted tokens at depth d + 1."""
        self.target_passes += 1
        self.generated_tokens += emitted
        self.accepted_tokens += accepted
        missing = len(drafted_at_depth) - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for depth, drafted in enumerate(drafted_at_depth):
            self.drafted_tokens += drafted
            self.drafted_per_position[depth] += drafted
            self.accepted_per_position[depth] += depth < accepted

    @property
    def decode_seconds(self) -> float:
        """The time of all rounds, without prefill."""
        return (
            self.draft_seconds
            + self.verify_seconds
            + self.rollback_seconds
            + self.sampling_seconds
            + self.overhead_seconds
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None when nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def tokens_per_target_pass(self) -> float | None:
        """Emitted tokens / target passes."""
        return self.generated_tokens / self.target_passes if self.target_passes else None

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token, prefill not counted."""
        return self.decode_seconds / self.generated_tokens if self.generated_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second, prefill not counted."""
        return self.generated_tokens / self.decode_seconds if self.generated_tokens else None

    @property
    def speedup_estimate(self) -> float | None:
        """How many times faster than plain decoding, by the last known cost of a plain step."""
        if not self.generated_tokens or not self.target_step_seconds:
            return None
        return self.generated_tokens * self.target_step_seconds / self.decode_seconds

    @property
    def plain_seconds_estimate(self) -> float | None:
        """What plain decoding would have taken for these tokens, by the last known cost of a plain step."""
        return self.generated_tokens * self.target_step_seconds or None

    def to_json(self) -> dict[str, object]:
        """Every count, time and rate by name."""
        counted = asdict(self)
        del counted["target_step_seconds"]
        return counted | {
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_target_pass": self.tokens_per_target_pass,
            "tpot_seconds": self.tpot_seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup_estimate": self.speedup_estimate,
            "plain_seconds_estimate": self.plain_seconds_estimate,
        }


class RoundTimer:
    """Shares the seconds of a round out among its phases. Only what is booked counts.

    now: seconds, from any moment on.
    """

    __slots__ = ("_at", "_now", "_seconds")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._seconds: dict[Phase, float] = {}
        self.start()

    def start(self) -> None:
        """A round begins; one that was not booked is forgotten."""
        self._seconds = {"draft": 0.0, "verify": 0.0, "sampling": 0.0, "rollback": 0.0, "overhead": 0.0}
        self._at = self._now()

    def lap(self, phase: Phase) -> None:
        """What has passed since the last lap was this phase."""
        moment = self._now()
        self._seconds[phase] += moment - self._at
        self._at = moment

    def book(self, stats: Stats, overlapped_seconds: float, waited_seconds: float) -> None:
        """The round is over: its times go to the stats.

        Part of the pass runs in other phases: `overlapped_seconds` while the draft was
        made, and `waited_seconds` in which sampling waited for it.
        """
        seconds = self._seconds
        stats.draft_seconds += seconds["draft"] - overlapped_seconds
        stats.verify_seconds += seconds["verify"] + overlapped_seconds + waited_seconds
        stats.sampling_seconds += seconds["sampling"] - waited_seconds
        stats.rollback_seconds += seconds["rollback"]
        stats.overhead_seconds += seconds["overhead"]
