"""Counts and timings for one reply. Rates are computed from them on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Literal, get_args

__all__ = ["Phase", "RoundTimer", "Stats"]

Phase = Literal["draft", "verify", "sampling", "rollback", "overhead"]


@dataclass(slots=True)
class Stats:
    """Counts and timings for one reply, updated once per round. Seconds are wall-clock time.

    Attributes:
        cached_prompt_tokens: Prompt tokens that were already in the KV cache.
        target_passes: Verify passes of the target, one per round.
        drafted_per_position: Drafted tokens by depth in the draft, from depth 1.
        accepted_per_position: Accepted tokens by depth in the draft, from depth 1.
        rollback_seconds: Time spent committing accepted tokens and removing rejected ones.
        sampling_seconds: Time spent sampling and accepting tokens.
        overhead_seconds: The rest of the decoding time.
        growth_seconds: Time spent enlarging the context. Not part of any other phase.
        ttft_seconds: Time from the request to the first token. None until the first token.
        target_step_seconds: Latest measured time of a single-token pass of the target. 0 if unknown.
        ledger_credit_seconds: Time that speculation has saved so far, which may be negative. None without a
            loss limit.
        worst_case_loss: Maximum time that this reply can lose, as a share of its plain decoding time. None
            without a loss limit.
        draft_other_bytes: Memory of drafters for other data, such as lookup tables and training state.
        peak_memory_bytes: Peak memory of the process.
        threads: Number of CPU threads of the target's last pass, or 0 if its library chooses it.
        busy_passes: Target passes with fewer CPU threads than usual, because other programs used the CPU.
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
    threads: int = 0
    busy_passes: int = 0

    def count_round(self, depths: Sequence[int], accepted: int, emitted: int) -> None:
        """Add the counts of one draft-and-verify round. `depths` holds the depth of each draft tree node."""
        self.target_passes += 1
        self.generated_tokens += emitted
        self.accepted_tokens += accepted
        self.drafted_tokens += len(depths) - 1
        missing = [0] * (max(depths) - len(self.drafted_per_position))
        self.drafted_per_position += missing
        self.accepted_per_position += missing
        for depth in depths[1:]:
            self.drafted_per_position[depth - 1] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def decode_seconds(self) -> float:
        drafting_and_verifying = self.draft_seconds + self.verify_seconds
        return drafting_and_verifying + self.rollback_seconds + self.sampling_seconds + self.overhead_seconds

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens divided by drafted tokens. None if nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def tokens_per_target_pass(self) -> float | None:
        """Emitted tokens divided by target passes. None before the first pass."""
        return self.generated_tokens / self.target_passes if self.target_passes else None

    @property
    def tpot_seconds(self) -> float | None:
        """Decoding time per output token in seconds, without prefill."""
        return self.decode_seconds / self.generated_tokens if self.generated_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second of decoding, without prefill."""
        return self.generated_tokens / self.decode_seconds if self.generated_tokens else None

    @property
    def speedup_estimate(self) -> float | None:
        """Estimated speed-up over plain decoding. None if it is unknown or nothing was drafted."""
        if not self.drafted_tokens or not self.generated_tokens or not self.target_step_seconds:
            return None
        return self.generated_tokens * self.target_step_seconds / self.decode_seconds

    @property
    def plain_seconds_estimate(self) -> float | None:
        """Estimated time that plain decoding would take for the same tokens, in seconds. None if unknown."""
        return self.generated_tokens * self.target_step_seconds or None

    def to_json(self) -> dict[str, object]:
        """Return all counts, times and rates of the reply by name."""
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
    """Measures how long each phase of a draft-and-verify round takes. `now` returns the time in seconds."""

    __slots__ = ("_lap_start", "_now", "_seconds")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self.start()

    def start(self) -> None:
        """Set all times to zero and start timing a draft-and-verify round."""
        self._seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._lap_start = self._now()

    def lap(self, phase: Phase) -> None:
        """Add the time since the previous call to the given phase of the round."""
        end = self._now()
        self._seconds[phase] += end - self._lap_start
        self._lap_start = end

    def finish(self, stats: Stats, overlapped_seconds: float, waited_seconds: float) -> None:
        """Add the measured times of the draft-and-verify round to `stats`.

        Args:
            stats: The statistics of the reply.
            overlapped_seconds: Part of the draft time during which the verify pass was already running.
            waited_seconds: Part of the sampling time spent waiting for the verify pass.
        """
        seconds = self._seconds
        stats.draft_seconds += seconds["draft"] - overlapped_seconds
        stats.verify_seconds += seconds["verify"] + overlapped_seconds + waited_seconds
        stats.sampling_seconds += seconds["sampling"] - waited_seconds
        stats.rollback_seconds += seconds["rollback"]
        stats.overhead_seconds += seconds["overhead"]
