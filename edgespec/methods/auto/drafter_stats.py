"""Track the acceptance rate, draft costs and retries of one drafter.

Acceptance rates differ between code, numbers and prose, so each kind of text has its own statistics.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.backoff import RetrySchedule
from edgespec.methods.auto.constants import (
    ASSUMED_PREFILL_COST,
    CODE_SHARE,
    DIGIT_SHARE,
    INSPECTED_CHARACTERS,
    LONG_TERM_PRIOR_WEIGHT,
    LOOKUP_PRIOR,
    MAX_PROB_SUM,
    MEASURED_ROUNDS,
    MIN_DOCUMENT_CHARACTERS,
    MODEL_PRIOR,
    PREFILL_ROUNDS,
    STREAKS,
)
from edgespec.methods.base import Drafter
from edgespec.methods.constants import PRIOR_WEIGHT, WEIGHT_AFTER_PAUSE
from edgespec.methods.running_stats import AcceptanceCounts, RunningMean

__all__ = ["TEXT_KINDS", "AcceptanceStats", "DrafterStats", "text_kind"]

TEXT_KINDS = ("talk", "document", "code", "numbers")
_CODE_BEGIN = re.compile(r"\s*(?:```|def |class |import |from \w+ import|#include|return\b|\}|@\w+)|\s{4,}\S")
_CODE_END = re.compile(r"[{};]\s*$")


class DrafterStats:
    """A drafter together with its acceptance statistics, costs and retry schedule.

    Attributes:
        acceptance: Acceptance statistics for the current kind of text, such as code.
        retries: Retry schedule for the current kind of text.
        empty_draft_levels: The requested draft length if the drafter chose not to draft, otherwise 0.
        has_prefilled: Whether the drafter has prefilled tokens in this reply.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.is_lookup = drafter.is_lookup
        self.acceptance = AcceptanceStats(drafter.is_lookup)
        self.retries = RetrySchedule()
        self.empty_draft_levels = 0
        self.has_prefilled = False
        self._acceptance_by_kind: dict[str, AcceptanceStats] = {}
        self._retries_by_kind: dict[str, RetrySchedule] = {}
        self._prefill_token_seconds = RunningMean()
        if drafter.prefill_token_seconds:
            self._prefill_token_seconds.add(drafter.prefill_token_seconds)

    def begin(self, tokens: Sequence[int]) -> None:
        self.has_prefilled = False
        self.drafter.begin(tokens)

    @property
    def is_measured(self) -> bool:
        return self.acceptance.draft_seconds.count >= MEASURED_ROUNDS

    def record_draft(self, tree: TokenTree, draft_length: int, seconds: float) -> None:
        self.acceptance.record_draft(tree, seconds)
        chose_none = self.drafter.chooses_length and not tree.drafted
        self.empty_draft_levels = draft_length if chose_none else 0

    def record_prefill(self, tokens: int, seconds: float) -> None:
        self._prefill_token_seconds.add(seconds / max(tokens, 1))
        self.has_prefilled = True

    def select_text_kind(self, kind: str) -> None:
        """Switch to the statistics for a kind of text, such as code.

        A kind that has no statistics yet starts with those of the previous kind.
        """
        if kind not in self._acceptance_by_kind:
            acceptance = AcceptanceStats(self.is_lookup)
            acceptance.restore_statistics(self.acceptance.saved_statistics())
            acceptance.limit_weight()
            self._acceptance_by_kind[kind] = acceptance
        self.acceptance = self._acceptance_by_kind[kind]
        self.retries = self._retries_by_kind.setdefault(kind, RetrySchedule())

    def draft_cost(self, target_step_seconds: float, levels: int | None = None) -> float:
        """Return the duration of a draft, relative to a single-token target pass.

        Args:
            target_step_seconds: Duration of a single-token target pass.
            levels: Depth of the draft. Defaults to the average depth.
        """
        acceptance = self.acceptance
        seconds = acceptance.draft_seconds.value if levels is None else levels * acceptance.level_seconds
        prefill_seconds = self.drafter.pending_tokens * self.prefill_token_seconds(target_step_seconds)
        return (seconds + prefill_seconds / PREFILL_ROUNDS) / target_step_seconds

    def prefill_token_seconds(self, target_step_seconds: float) -> float:
        if self._prefill_token_seconds.count:
            return self._prefill_token_seconds.value
        return ASSUMED_PREFILL_COST * target_step_seconds

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        parts: dict[str, Mapping[str, NDArray[Any]]] = {
            f"record.{kind}": stats.saved_statistics() for kind, stats in self._acceptance_by_kind.items()
        }
        parts["own"] = self.drafter.saved_statistics()
        parts["asking"] = {"reading": self._prefill_token_seconds.saved()}
        parts["wait"] = {kind: retries.saved() for kind, retries in self._retries_by_kind.items()}
        name = self.drafter.name
        return {f"{name}.{part}.{key}": v for part, values in parts.items() for key, v in values.items()}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        own = _with_prefix(saved, f"{self.drafter.name}.")
        self.drafter.restore_statistics(_with_prefix(own, "own."))
        self._prefill_token_seconds.restore(own["asking.reading"])
        for kind, interval in _with_prefix(own, "wait.").items():
            self._retries_by_kind[kind] = RetrySchedule()
            self._retries_by_kind[kind].restore(interval)
        for kind in {name.split(".")[1] for name in own if name.startswith("record.")}:
            acceptance = AcceptanceStats(self.is_lookup)
            acceptance.restore_statistics(_with_prefix(own, f"record.{kind}."))
            self._acceptance_by_kind[kind] = acceptance


def _with_prefix(saved: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}


class AcceptanceStats:
    """One drafter's acceptance rates by depth and rank, and the duration and size of its drafts.

    For lookup drafters, acceptance rates also depend on how many tokens have just been accepted in a row.

    The ids of rejected tokens are not recorded, to keep rejection sampling unbiased.

    Attributes:
        draft_seconds: Mean duration of non-empty drafts, in seconds.
        levels: Mean depth of non-empty drafts.
        rows: Mean number of drafted tokens in non-empty drafts.
        was_empty: Whether the last draft was empty.
    """

    _LOOKUP_PRIOR, _MODEL_PRIOR = np.array(LOOKUP_PRIOR), np.array(MODEL_PRIOR)

    def __init__(self, is_lookup: bool) -> None:
        prior = (self._LOOKUP_PRIOR if is_lookup else self._MODEL_PRIOR)[:, None] * PRIOR_WEIGHT
        accepted = np.repeat(prior, 2, axis=1)
        self._counts = AcceptanceCounts(accepted, np.full(accepted.shape, PRIOR_WEIGHT))
        self._has_streaks = len(accepted) > 1
        self._streak = 0
        self.draft_seconds, self.levels, self.rows = RunningMean(), RunningMean(), RunningMean()
        self.was_empty = False

    @property
    def _streak_class(self) -> int:
        return bisect_right(STREAKS, self._streak) if self._has_streaks else 0

    def _probs(self, *, long_term: bool = False) -> NDArray[np.float64]:
        counts = self._counts
        probs = (
            counts.long_term_rates(LONG_TERM_PRIOR_WEIGHT) if long_term else counts.accepted / counts.drafted
        )
        at_streak: NDArray[np.float64] = probs[self._streak_class]
        return at_streak

    def record_draft(self, tree: TokenTree, seconds: float) -> None:
        self.was_empty = not tree.drafted
        if tree.drafted:
            self.draft_seconds.add(seconds)
            self.levels.add(max(tree.depths))
            self.rows.add(tree.drafted)

    def node_probs(self, tree: TokenTree) -> list[float]:
        """Return each node's acceptance probability, given that its parent is accepted. The root's is 1."""
        probs = self._probs()
        return [1.0, *(float(probs[category]) for category in _categories(tree)[1:])]

    @property
    def level_seconds(self) -> float:
        return self.draft_seconds.value / max(self.levels.value, 1.0)

    @property
    def level_rows(self) -> float:
        return self.rows.value / max(self.levels.value, 1.0)

    def reach_probs(self, levels: int, *, long_term: bool = False) -> list[float]:
        """Return, for each level of the next draft, the probability that any token at that level is accepted.

        If `long_term` is set, the result depends less on the most recent drafts.
        """
        probs = self._probs(long_term=long_term)
        is_chain = self.rows.value <= self.levels.value
        level_probs = probs[:, 0] if is_chain else np.minimum(probs.sum(axis=1), MAX_PROB_SUM)
        return list(accumulate((float(level_probs[min(level, 1)]) for level in range(levels)), mul))

    def record_outcome(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Record which nodes of a draft tree were accepted, given the emitted tokens."""
        streak = self._streak_class
        categories = _categories(tree)
        path = tree.walk(tokens)
        self._streak += len(path) - 1
        for node, accepted in zip_longest(path[: len(tokens)], path[1:]):
            children = tree.children(node)
            for child in children:
                self._counts.record((streak, *categories[child]), child == accepted)
            if children and accepted is None:
                self._streak = 0
        if not tree.drafted:
            self._streak = 0

    def saved_statistics(self) -> dict[str, NDArray[np.float64]]:
        """Return the acceptance and timing statistics as named arrays, to be saved for later runs."""
        return {name: part.saved() for name, part in self._parts.items()}

    def restore_statistics(self, saved: Mapping[str, NDArray[np.float64]]) -> None:
        """Restore statistics from `saved_statistics`. Raises KeyError or ValueError if they are damaged."""
        for name, part in self._parts.items():
            part.restore(saved[name])

    @property
    def _parts(self) -> dict[str, AcceptanceCounts | RunningMean]:
        means = {"seconds": self.draft_seconds, "levels": self.levels, "rows": self.rows}
        return {"tally": self._counts, **means}

    def limit_weight(self) -> None:
        """Reduce the weight of earlier results when a drafter resumes after a long pause."""
        self._counts.limit_weight(WEIGHT_AFTER_PAUSE)


def _categories(tree: TokenTree) -> list[tuple[int, int]]:
    ranks = [0] * tree.width
    categories = [(0, 0)]
    for parent in tree.parents[1:]:
        categories.append((min(parent, 1), min(ranks[parent], 2)))
        ranks[parent] += 1
    return categories


def text_kind(text: str) -> str:
    """Classify a prompt by its last 2,000 characters as one of `TEXT_KINDS`, such as `code`."""
    text = text[-INSPECTED_CHARACTERS:]
    lines = [line for line in text.splitlines() if line.strip()]
    code_lines = sum(bool(_CODE_BEGIN.match(line) or _CODE_END.search(line)) for line in lines)
    if "```" in text or code_lines > CODE_SHARE * max(len(lines), 4):
        return "code"
    if sum(map(str.isdigit, text)) > DIGIT_SHARE * max(len(text), 40):
        return "numbers"
    return "document" if len(text) > MIN_DOCUMENT_CHARACTERS else "talk"
