"""The types of a reply: text chunks during generation, and a `Reply` when it is finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from edgespec.engine.loop import FinishReason
from edgespec.engine.stats import Stats

__all__ = ["MethodReport", "Reply", "TextChunk"]


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A part of a reply's text.

    Attributes:
        text: The text. It may be empty while the bytes of a character are incomplete.
        token_count: Number of tokens in the chunk.
        accepted: Whether these are accepted draft tokens, not tokens that the target generated itself.
    """

    text: str
    token_count: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class MethodReport:
    """The drafting method of a reply, and its measured speed-up.

    Attributes:
        requested: The method in the options, such as `auto`.
        effective: The drafters that are in use, joined by `+`, or `none`.
        reason: The reason for the choice.
        note: Costs and problems of the drafters, known after a reply.
        gain: The speed-up over plain decoding, minus 1. So 0.6 means 1.6 times as fast. None if not measured.
        gain_uncertainty: Standard error of the gain.
    """

    requested: str
    effective: str
    reason: str
    note: str = ""
    gain: float | None = None
    gain_uncertainty: float | None = None

    @property
    def summary(self) -> str:
        """The method, its speed-up and the reason, in one line."""
        name = "plain decoding" if self.effective == "none" else self.effective
        if self.requested != self.effective:
            name += f" (method {self.requested})"
        if self.effective == "none":
            slower = f"; trying drafts cost {self.loss_text} of its speed" if self.loss_text else ""
            return f"{name}: {self.reason}{slower}"
        speed_up = f"speed-up {self.speed_up_text}; " if self.speed_up_text else ""
        return f"{name}: {speed_up}{self.reason}"

    @property
    def speed_up_text(self) -> str:
        """The speed-up with its standard error, such as `1.62x ± 0.08`. Empty if it is not measured."""
        return "" if self.gain is None else f"{1 + self.gain:.2f}x ± {self._gain_error:.2f}"

    @property
    def loss_text(self) -> str:
        """The slowdown, such as `13% ± 3%`. Empty if it is within two standard errors of zero."""
        loss, error = -(self.gain or 0.0), self._gain_error
        return f"{loss:.0%} ± {error:.0%}" if loss > 2.0 * error else ""

    @property
    def _gain_error(self) -> float:
        # No measurement is assumed to be more precise than one percent.
        return max(0.01, self.gain_uncertainty or 0.0)


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply.

    Attributes:
        tokens: All generated tokens, including the one that ended the reply.
        finish_reason: `stop`, `length` or `cancelled`.
        seed: Random seed. Generating with the same seed gives the same reply.
        target: Name of the target.
        draft: Name of the draft model, or None.
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
        """Return the reply as the object that `generate --json` prints."""
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
