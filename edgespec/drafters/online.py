"""Draft with a model that learns from its own mistakes between replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from edgespec.backends.base import Capabilities
from edgespec.drafters.base import BudgetedDrafter, MemoryUse
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.online_training import OnlineTrainer
from edgespec.drafters.tree_growth import TreeGrowth
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["OnlineDrafter"]


class OnlineDrafter(BudgetedDrafter):
    """Drafts with a `ModelDrafter` and reports the outcome of each draft to the model's trainer.

    Implements online speculative decoding (OSD, arXiv 2310.07177).
    """

    has_idle_work = True

    def __init__(self, drafter: ModelDrafter, trainer: OnlineTrainer) -> None:
        self.name = drafter.name
        self.chooses_length = drafter.chooses_length
        self.trainer = trainer
        self._drafter = drafter
        self._proposed: TokenTree | None = None
        self._verified: tuple[TokenTree, Logits] | None = None

    def with_growth(self, make_growth: Callable[[Capabilities], TreeGrowth]) -> OnlineDrafter:
        return OnlineDrafter(self._drafter.with_growth(make_growth), self.trainer)

    @property
    def memory_use(self) -> MemoryUse:
        return self._drafter.memory_use + MemoryUse(other_bytes=self.trainer.size_bytes)

    @property
    def pending_tokens(self) -> int:
        return self._drafter.pending_tokens

    @property
    def full_pending_tokens(self) -> int:
        return self._drafter.full_pending_tokens

    def prefill(self, max_tokens: int) -> None:
        self._drafter.prefill(max_tokens)

    def warm_up(self) -> None:
        self._drafter.warm_up()

    def force_draft(self) -> None:
        self._drafter.force_draft()

    def begin(self, tokens: Sequence[int]) -> None:
        self.trainer.begin(tokens)
        self._proposed = self._verified = None
        self._drafter.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        self._proposed = self._drafter.propose(sampler, acceptance, draft_length)
        return self._proposed

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        self._verified = (tree, logits)
        self._drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        """See `Drafter.commit`. The target's logits are still valid here. Its next pass overwrites them."""
        if self._proposed and self._verified:
            self.trainer.record_round(self._proposed, *self._verified, tokens)
        self._proposed = self._verified = None
        self._drafter.commit(tokens)
        self.trainer.extend(tokens)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        return self._drafter.saved_statistics()

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        self._drafter.restore_statistics(saved)

    def note(self) -> str:
        return self.trainer.note()

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:
        self.trainer.run_idle_work(should_continue)

    def reset(self) -> None:
        self._drafter.reset()

    def interrupt(self, enabled: bool) -> None:
        self._drafter.interrupt(enabled)

    def close(self) -> None:
        self._drafter.close()
