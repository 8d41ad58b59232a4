"""The report that `verify` returns, and how the results of a method are collected."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from edgespec.decode.reply import Reply
from edgespec.losslessness.replay import Reason, Verdict
from edgespec.losslessness.statistics import holm

__all__ = ["Divergence", "MethodFindings", "MethodResult", "VerifyReport"]

# A statistical test fails if its p-value after Holm's correction is below this value.
_SIGNIFICANCE = 0.001


@dataclass(frozen=True, slots=True)
class Divergence:
    """A reply that differs from plain decoding, or a fault that did not change any tokens.

    Attributes:
        prompt: Name of the prompt.
        temperature: Temperature of both replies.
        draft_length: Draft length of the method.
        position: Index of the first token that differs. If both replies are equal, index of the first token
            that is wrong or has wrong logits.
        plain_token: Token from plain decoding. None if its reply had ended.
        other_token: Token from the method. None if its reply had ended.
        verdict: `rounding` or `fault`. See `judge`.
        reason: Why the reply is wrong. None for `rounding`.
        largest_difference: Largest difference between the logits of the method's passes and those of
            single-token passes over the same tokens. With concurrent replies, this includes the difference
            between the logits of a reply alone and together with others. None if it was not measured.
        leak: Largest difference in logits caused by the text of other replies. Unless it is 0, the reply read
            another reply's cached keys and values. None if replies were generated one at a time.
    """

    prompt: str
    temperature: float
    draft_length: int
    position: int
    plain_token: int | None
    other_token: int | None
    verdict: Verdict
    reason: Reason | None = None
    largest_difference: float | None = None
    leak: float | None = None


@dataclass(slots=True)
class MethodResult:
    """The results of one drafting method.

    Every prompt is counted once, by its worst reply: identical + rounding + faults == prompts.

    Attributes:
        replies: Number of replies that were compared, or sampled in rejection mode.
        tokens: Number of tokens in these replies.
        target_passes: Number of target passes for these replies, excluding passes over the prompt.
        shared_passes: Number of target passes that also processed tokens of other replies.
        identical: Number of prompts whose replies are all identical to plain decoding.
        rounding: Number of prompts with replies that differ only because passes of different widths round
            differently.
        faults: Number of prompts with a reply that is wrong for another reason, or with a failed test.
        largest_difference: The largest `largest_difference` of the divergences. None if none was measured.
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
    rounding: int = 0
    faults: int = 0
    largest_difference: float | None = None
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
        wrong |= {d.prompt for d in result.divergences if d.verdict == "fault"}
        rounded = {d.prompt for d in result.divergences} - wrong
        result.faults, result.rounding = len(wrong), len(rounded)
        result.identical = result.prompts - len(wrong) - len(rounded)
        differences = [d.largest_difference for d in result.divergences if d.largest_difference is not None]
        result.largest_difference = max(differences, default=None)
        result.smallest_corrected_p_value = min(corrected, default=None)
        return result


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`: one entry per method, and the names of the target and the draft model.

    Attributes:
        parallel: Number of replies generated concurrently with each method.
        heads: Names of the loaded heads.
        exact: Whether edgespec promised when loading that all passes agree bit for bit. If so, replies that
            differ by rounding break the promise. See `Capabilities.exact`.
    """

    target: str
    draft: str | None
    acceptance: str
    methods: dict[str, MethodResult]
    parallel: int = 1
    heads: tuple[str, ...] = ()
    exact: bool = False

    @property
    def faults(self) -> int:
        return sum(result.faults for result in self.methods.values())

    @property
    def rounding(self) -> int:
        return sum(result.rounding for result in self.methods.values())

    @property
    def broken_promises(self) -> int:
        """Number of prompts whose replies differ by rounding although edgespec promised bit-exactness."""
        return self.rounding if self.exact else 0

    @property
    def nothing_drafted(self) -> tuple[str, ...]:
        """Names of speculative methods that drafted no tokens and were therefore not tested."""
        return tuple(
            name for name, result in self.methods.items() if name != "none" and not result.drafted_tokens
        )

    @property
    def nothing_shared(self) -> tuple[str, ...]:
        """Names of methods whose replies shared no target pass, although they were generated concurrently."""
        return tuple(
            name for name, result in self.methods.items() if self.parallel > 1 and not result.shared_passes
        )

    def to_json(self) -> dict[str, object]:
        """Return the report as the JSON object that `verify --json` prints."""
        return asdict(self) | {
            "broken_promises": self.broken_promises,
            "nothing_drafted": list(self.nothing_drafted),
            "nothing_shared": list(self.nothing_shared),
        }
