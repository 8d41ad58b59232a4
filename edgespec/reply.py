"""What a reply consists of: pieces while it is written, a Reply when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from edgespec.engine.loop import FinishReason
from edgespec.engine.stats import Stats

__all__ = ["MethodReport", "Reply", "TextChunk"]


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text as it comes. `accepted`: the drafter guessed these tokens; otherwise they are the target's own."""

    text: str
    token_count: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class MethodReport:
    """Which method was asked for, which one runs, and why.

    note: what its drafters say of themselves after a reply: what they cost, why one is silent. gain: over
    plain decoding, as a share of its speed, with one standard error; None where nobody keeps account.
    `line` has all of it but the note.
    """

    requested: str
    effective: str
    reason: str
    note: str = ""
    gain: float | None = None
    gain_uncertainty: float | None = None

    @property
    def line(self) -> str:
        """What runs, what that gains and why, in one line for a person."""
        name = "plain decoding" if self.effective == "none" else self.effective
        if self.requested != self.effective:
            name += f" (asked for {self.requested})"
        gain, error = self._percents
        if self.effective == "none":
            tried = f"; trying cost {-gain}% ± {error}% of its speed" if -gain > error else ""
            return f"{name}: {self.reason}{tried}"
        speed = f"{self.gain_text} against plain decoding; " if self.gain_text else ""
        return f"{name}: {speed}{self.reason}"

    @property
    def gain_text(self) -> str:
        """The gain with its uncertainty, such as +62% ± 8%; empty where nobody keeps account."""
        gain, error = self._percents
        return "" if self.gain is None else f"{gain:+d}% ± {error}%"

    @property
    def short(self) -> str:
        """What runs, and what that gains, in two words."""
        if self.effective == "none":
            return "plain"
        return self.effective if self.gain is None else f"{self.effective} {self._percents[0]:+d}%"

    @property
    def _percents(self) -> tuple[int, int]:
        """The gain and its uncertainty, in whole percents; nothing is known better than to one."""
        return round(100 * (self.gain or 0.0)), max(1, round(100 * (self.gain_uncertainty or 0.0)))


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply.

    `tokens`: every emitted token, the one that ended the reply included. `target`, `draft`: their names.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    target: str
    draft: str | None
    method: MethodReport
    stats: Stats

    def to_json(self) -> dict[str, object]:
        """The reply as the contract for scripts has it."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "target": self.target,
            "draft": self.draft,
            "method": asdict(self.method),
            "stats": self.stats.to_json(),
        }
