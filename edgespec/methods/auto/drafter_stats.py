"""Track the acceptance rate, costs and retries of one drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.acceptance_stats import AcceptanceStats
from edgespec.methods.auto.constants import ASSUMED_PREFILL_COST, MEASURED_ROUNDS, PREFILL_ROUNDS
from edgespec.methods.auto.retry_schedule import RetrySchedule
from edgespec.methods.base import Drafter
from edgespec.methods.running_stats import RunningMean

__all__ = ["DrafterStats"]


class DrafterStats:
    """A drafter together with its acceptance statistics, costs and retry schedule.

    Attributes:
        acceptance: Acceptance statistics for the current kind of text, such as code.
        retries: Retry schedule for the current kind of text.
        empty_draft_levels: The requested draft length if the drafter chose to draft nothing, otherwise 0.
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

        A new kind starts with the statistics of the previous kind.
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
