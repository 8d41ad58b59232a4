"""Estimate the speed-up of draft models, in order to rank them without running them.

The estimates are based on model sizes, or on acceptance rates measured in earlier runs. Only token counts are
saved, keyed by a hash of both models' files. Prompts and replies are never saved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from edgespec.errors import ModelFileError
from edgespec.store.constants import (
    COST_PER_ROW,
    HEAD_RATE,
    MAX_ASSUMED_RATE,
    MAX_DRAFTED,
    MAX_ESTIMATED_DRAFT_LENGTH,
    MIN_ASSUMED_RATE,
    MIN_DRAFTED,
    RATE_AT_EQUAL_SIZE,
    RATE_PER_DECADE,
    SAVE_EVERY_DRAFTED,
)
from edgespec.store.installed import InstalledModel, files_fingerprint
from edgespec.store.reference import Resolved
from edgespec.system.facts import Facts

_KIND = "acceptance"


def _assumed_pass_cost(width: int) -> float:
    return 1.0 + COST_PER_ROW * (width - 1)


def estimate_acceptance_rate(size_ratio: float, shared_token_fraction: float = 1.0) -> float:
    """Return the expected acceptance rate, from 0 to 1.

    Args:
        size_ratio: Parameters of the draft model divided by those of the target.
        shared_token_fraction: Fraction of the target's tokens that the draft model also has. No other
            tokens can be drafted.
    """
    rate = RATE_AT_EQUAL_SIZE + RATE_PER_DECADE * math.log10(max(size_ratio, 1e-9))
    return min(max(rate, MIN_ASSUMED_RATE), MAX_ASSUMED_RATE) * shared_token_fraction


def estimate_speedup(
    size_ratio: float,
    step_cost: float,
    shared_token_fraction: float = 1.0,
    acceptance_rate: float | None = None,
    pass_cost: Callable[[int], float] = _assumed_pass_cost,
) -> float:
    """Return the expected speed-up over plain decoding at the best draft length.

    Args:
        size_ratio: Parameters of the draft model divided by those of the target.
        step_cost: Time for one pass of the draft model, as a fraction of a single-token pass of the target.
            Because decoding is limited by memory bandwidth, this is the ratio of the bytes that the two
            models read per token.
        shared_token_fraction: Fraction of the target's tokens that the draft model also has.
        acceptance_rate: The measured acceptance rate. If None, it is estimated from the sizes.
        pass_cost: Returns the duration of a pass of a given width, relative to a single-token pass.
    """
    if acceptance_rate is None:
        acceptance_rate = estimate_acceptance_rate(size_ratio, shared_token_fraction)
    best, tokens = 0.0, 1.0
    for length in range(1, MAX_ESTIMATED_DRAFT_LENGTH + 1):
        tokens += acceptance_rate**length
        best = max(best, tokens / (length * step_cost + pass_cost(length + 1)))
    return best


def estimate_head_speedup(step_cost: float, *, one_pass: bool) -> float:
    """Return the expected speed-up of a head over plain decoding, with an assumed acceptance rate.

    Args:
        step_cost: Time for one pass of the head, as a fraction of a single-token pass of the target.
        one_pass: Whether the head drafts all tokens in one pass.
    """
    if one_pass:
        return estimate_speedup(
            0.0,
            0.0,
            acceptance_rate=HEAD_RATE,
            pass_cost=lambda width: step_cost + _assumed_pass_cost(width),
        )
    return estimate_speedup(0.0, step_cost, acceptance_rate=HEAD_RATE)


LocalModel: TypeAlias = Resolved | InstalledModel


def measured_acceptance_rate(target: LocalModel, draft: LocalModel) -> float | None:
    """Return a model pair's measured acceptance rate (0 to 1), or None if too few tokens were drafted."""
    try:
        drafted, accepted = _counts(_key(target, draft))
    except ModelFileError:
        return None
    return accepted / drafted if drafted >= MIN_DRAFTED else None


def add_acceptance(target: LocalModel, draft: LocalModel, drafted: int, accepted: int) -> None:
    """Add one reply's drafted and accepted token counts to a model pair's saved counts.

    Raises:
        ModelFileError: A model file no longer exists.
    """
    key = _key(target, draft)
    before = _counts(key)
    drafted, accepted = before[0] + drafted, before[1] + accepted
    if drafted > MAX_DRAFTED:
        drafted, accepted = drafted // 2, accepted // 2
    Facts().put(_KIND, {key: [drafted, accepted]})


def _counts(key: str) -> tuple[int, int]:
    """Return the saved drafted and accepted token counts."""
    match Facts().get(_KIND, key):
        case [int(drafted), int(accepted)] if 0 <= accepted <= drafted:
            return drafted, accepted
    return 0, 0


class AcceptanceRecorder:
    """Counts a loaded model pair's drafted and accepted tokens, and saves the counts. Never raises.

    Only the first token of each draft is counted, because the acceptance of later tokens depends on the draft
    length.
    """

    def __init__(self, target: LocalModel, draft: LocalModel) -> None:
        self._pair = target, draft
        self._drafted = self._accepted = 0

    def count(self, drafted: int, accepted: int) -> None:
        """Add the number of drafts in a reply, and the number whose first token was accepted."""
        self._drafted, self._accepted = self._drafted + drafted, self._accepted + accepted
        if self._drafted >= SAVE_EVERY_DRAFTED:
            self.save()

    def save(self) -> None:
        """Save the counts collected since the last save."""
        if self._drafted:
            with suppress(ModelFileError):
                add_acceptance(*self._pair, self._drafted, self._accepted)
        self._drafted = self._accepted = 0


def _key(target: LocalModel, draft: LocalModel) -> str:
    """Return a hash that changes when a file of either model changes. Raises ModelFileError."""
    models = (target, draft)
    fingerprints = [(str(each.path), files_fingerprint(each.path, each.format)) for each in models]
    return hashlib.sha256(repr(fingerprints).encode()).hexdigest()[:32]
