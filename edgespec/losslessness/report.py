"""The report that `verify` returns, and how the results of a method are collected."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from edgespec.losslessness.statistics import holm
from edgespec.reply import Reply

__all__ = ["Divergence", "MethodFindings", "MethodResult", "Verdict", "VerifyReport"]

Verdict = Literal["near_tie", "violation"]

# A statistical test fails if its p-value after Holm's correction is below this value.
_SIGNIFICANCE = 0.001


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a method's reply and the reply from plain decoding.

    Attributes:
        prompt: Name of the prompt.
        temperature: Temperature of both replies.
        draft_length: Draft length of the method.
        position: Index of the first token that differs.
        gap: Difference between the scores of the two tokens, in logits. None if one of the replies ended
            here, or a constraint forbids one of the tokens.
        cross_width_error: Largest difference between the logits of single-token passes and of passes as wide
            as the method's, over the same tokens. None if one of the replies ended here.
        sharing_error: Largest difference between the logits of the reply alone and together with other
            replies, over the same tokens. None if replies were generated one at a time, or one of them ended
            here.
        leak: Largest difference in logits caused by the text of other replies. Unless it is 0, the reply read
            another reply's cached keys and values. None in the same cases as `sharing_error`.
        plain_token: Token from plain decoding. None if its reply had ended.
        other_token: Token from the method. None if its reply had ended.
        verdict: `near_tie` if the rounding error explains the difference, otherwise `violation`.
    """

    prompt: str
    temperature: float
    draft_length: int
    position: int
    gap: float | None
    cross_width_error: float | None
    sharing_error: float | None
    leak: float | None
    plain_token: int | None
    other_token: int | None
    verdict: Verdict


@dataclass(slots=True)
class MethodResult:
    """The results of one drafting method.

    Every prompt counts once, by its worst reply: identical + near_tie + violations == prompts.

    Attributes:
        replies: Number of replies that were compared, or sampled in rejection mode.
        tokens: Number of tokens in these replies.
        target_passes: Number of target passes for these replies, excluding passes over the prompt.
        shared_passes: Number of target passes that also processed tokens of other replies.
        identical: Number of prompts whose replies are all identical to plain decoding.
        near_tie: Number of prompts whose replies differ, but only by differences that rounding can explain.
        violations: Number of prompts with a difference that rounding cannot explain, or a failed test.
        divergences: The first difference of each reply that differs.
        smallest_corrected_p_value: Smallest p-value of the method's statistical tests after Holm's
            correction. None if there were no tests.
        note: Message from the drafters about the last reply, or the reason why there was no drafter.
    """

    prompts: int = 0
    replies: int = 0
    tokens: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    shared_passes: int = 0
    identical: int = 0
    near_tie: int = 0
    violations: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    smallest_corrected_p_value: float | None = None
    note: str = ""


class MethodFindings:
    """The results of one method so far, and the prompt and p-value of each statistical test."""

    def __init__(self, prompts: int) -> None:
        self.result = MethodResult(prompts)
        self.tests: list[tuple[str, float]] = []

    def count(self, reply: Reply) -> None:
        result, method = self.result, reply.method
        result.replies += 1
        result.tokens += len(reply.tokens)
        result.target_passes += reply.stats.target_passes
        result.drafted_tokens += reply.stats.drafted_tokens
        result.accepted_tokens += reply.stats.accepted_tokens
        result.shared_passes += reply.stats.shared_passes
        result.note = method.note or (method.reason if method.effective == "none" else "")

    def finished_result(self) -> MethodResult:
        result, corrected = self.result, holm([p for _, p in self.tests])
        wrong = {name for (name, _), p in zip(self.tests, corrected, strict=True) if p < _SIGNIFICANCE}
        wrong |= {d.prompt for d in result.divergences if d.verdict == "violation"}
        near_ties = {d.prompt for d in result.divergences} - wrong
        result.violations, result.near_tie = len(wrong), len(near_ties)
        result.identical = result.prompts - len(wrong) - len(near_ties)
        result.smallest_corrected_p_value = min(corrected, default=None)
        return result


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`: one entry per method, and the names of the target and the draft model.

    Attributes:
        parallel: Number of replies that were generated at once with each method.
        heads: Names of the loaded heads.
    """

    target: str
    draft: str | None
    acceptance: str
    methods: dict[str, MethodResult]
    parallel: int = 1
    heads: tuple[str, ...] = ()

    @property
    def violations(self) -> int:
        return sum(result.violations for result in self.methods.values())

    @property
    def nothing_drafted(self) -> tuple[str, ...]:
        """Names of speculative methods that drafted no tokens and were therefore not tested."""
        return tuple(
            name for name, result in self.methods.items() if name != "none" and not result.drafted_tokens
        )

    @property
    def nothing_shared(self) -> tuple[str, ...]:
        """Names of methods whose replies shared no target pass, although they were generated at once."""
        return tuple(
            name for name, result in self.methods.items() if self.parallel > 1 and not result.shared_passes
        )

    def to_json(self) -> dict[str, object]:
        """Return the report as the object that `verify --json` prints."""
        return asdict(self) | {
            "nothing_drafted": list(self.nothing_drafted),
            "nothing_shared": list(self.nothing_shared),
        }
