"""The report that `verify` returns, and the classes that collect each method's results.

The goodness of fit of sampled tokens is tested with a G-test, simulated p-values and Holm's correction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.decode.reply import Reply
from edgespec.engine.sampling import Distribution
from edgespec.losslessness.replay import Reason, Verdict

__all__ = ["Divergence", "MethodFindings", "MethodResult", "Sample", "VerifyReport", "holm", "p_value"]

# A statistical test fails if its p-value after Holm's correction is below this value.
_SIGNIFICANCE = 0.001
# Counts of tokens sampled after the same prefix, and the distribution that they should follow.
Sample = tuple[Counter[int], Distribution]

# Number of simulated trials in the first batch, maximum number in total, and number in each further batch.
_FIRST_TRIALS, _MAX_TRIALS, _BATCH_TRIALS = 2_000, 100_000, 10_000
# Compute p-values below this with more simulated trials, so that they stay precise after Holm's correction.
_SUSPICIOUS_P_VALUE = 0.02


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
            between the reply's logits when generated alone and together with others. None if it was not
            measured.
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
    """Collects one method's results, and the prompt and p-value of each statistical test."""

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
        exact: Whether edgespec promised when loading the target that all passes agree bit for bit. If so, a
            reply that differs by rounding breaks this promise. See `Capabilities.exact`.
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
        """Number of prompts whose replies differ by rounding even though edgespec promised bit-exactness."""
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
        """Return the report as a JSON-compatible dict, as printed by `verify --json`."""
        return asdict(self) | {
            "broken_promises": self.broken_promises,
            "nothing_drafted": list(self.nothing_drafted),
            "nothing_shared": list(self.nothing_shared),
        }


def p_value(samples: Iterable[Sample]) -> float | None:
    """Test whether all samples follow their expected distributions, and return the p-value.

    The test statistic is the sum of the samples' G statistics. Tokens with an expected count below 1 share
    one bin. The p-value is simulated, because the expected counts are too small for the chi-square
    approximation. Returns None if there is nothing to compare.
    """
    binned = [pair for sample in samples if len((pair := _binned(*sample))[0]) > 1]
    if not binned:
        return None
    observed = float(sum(_statistic(counts, probs) for counts, probs in binned))
    random = np.random.default_rng(0)
    beyond, trials = 0, 0
    while trials < _FIRST_TRIALS or (trials < _MAX_TRIALS and beyond < _SUSPICIOUS_P_VALUE * trials):
        size = _FIRST_TRIALS if trials == 0 else _BATCH_TRIALS
        simulated = np.zeros(size)
        for counts, probs in binned:
            simulated += _statistic(random.multinomial(int(counts.sum()), probs, size), probs)
        beyond += int((simulated >= observed - 1e-9).sum())
        trials += size
    return (beyond + 1) / (trials + 1)


def _binned(counts: Counter[int], expected: Distribution) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    total = counts.total()
    frequent = expected.probs * total >= 1
    tokens, probs = expected.tokens[frequent], expected.probs[frequent]
    numbers = [counts[int(token)] for token in tokens]
    rest_prob, rest_count = max(0.0, 1.0 - float(probs.sum())), total - sum(numbers)
    if rest_prob * total > 1e-9 or rest_count:
        numbers, probs = [*numbers, rest_count], np.append(probs, rest_prob)
    return np.array(numbers, np.int64), probs / probs.sum()


def _statistic(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> NDArray[np.float64]:
    expected = counts.sum(axis=-1, keepdims=True) * probs
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(counts > 0, counts * np.log(counts / expected), 0.0)
    statistic: NDArray[np.float64] = 2 * terms.sum(axis=-1)
    return statistic


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple testing (Holm 1979), in the given order."""
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected
