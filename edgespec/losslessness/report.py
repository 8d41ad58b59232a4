"""What a proof found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

__all__ = ["Divergence", "MethodResult", "Report", "Verdict"]

Verdict = Literal["near_tie", "violation"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a reply left the plain one.

    position: of the token in the reply. gap: between the two contenders, in logits, temperature and noise
    included; None where one reply just ended. cross_width_error: the largest difference between the
    logits of single steps and of passes as wide as the method's, over the same tokens. A token is None
    where a reply had ended.
    """

    prompt: str
    temperature: float
    draft_length: int
    position: int
    gap: float | None
    cross_width_error: float | None
    plain_token: int | None
    other_token: int | None
    verdict: Verdict


@dataclass(slots=True)
class MethodResult:
    """What was found for one method.

    Every prompt counts once, by its worst reply: identical + near_tie + violations == prompts. `replies`
    is how many were compared or, in rejection mode, drawn; what was drafted and accepted is of all of them.
    `smallest_corrected_p_value` is Holm's, over all statistical tests of the method; None when none was
    made. note: what its drafters said of themselves after the last reply, or why there are none.
    """

    prompts: int = 0
    replies: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    identical: int = 0
    near_tie: int = 0
    violations: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    smallest_corrected_p_value: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The evidence for one pair, by method."""

    target: str
    draft: str | None
    acceptance: str
    methods: dict[str, MethodResult]

    @property
    def violations(self) -> int:
        """Prompts whose reply is not the plain one, rounding excused, over all methods."""
        return sum(result.violations for result in self.methods.values())

    @property
    def nothing_drafted(self) -> tuple[str, ...]:
        """Methods but `none` that drafted nothing in any reply: identical replies prove nothing of them."""
        return tuple(
            name for name, result in self.methods.items() if name != "none" and not result.drafted_tokens
        )

    def to_json(self) -> dict[str, object]:
        """The report as the contract for scripts has it."""
        return asdict(self) | {"nothing_drafted": list(self.nothing_drafted)}
