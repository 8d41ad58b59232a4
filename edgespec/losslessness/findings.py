"""Collect the results of `verify` for one method."""

from __future__ import annotations

from edgespec.losslessness.report import MethodResult
from edgespec.losslessness.statistics import holm
from edgespec.reply import Reply

__all__ = ["MethodFindings"]

# A statistical test fails if its p-value after Holm's correction is below this value.
_SIGNIFICANCE = 0.001


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
