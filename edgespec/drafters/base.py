"""What every drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LanguageModel, ModelFacts
from edgespec.drafters.tree_growth import TreeGrowth
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["BudgetedDrafter", "Drafter", "MemoryUse", "check_rollback"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a drafter, without the target's own.

    Attributes:
        weight_bytes: Weights of the draft model.
        cache_bytes: KV cache of the draft model.
        other_bytes: Token buffers, lookup indexes and the state of online training.
    """

    weight_bytes: int = 0
    cache_bytes: int = 0
    other_bytes: int = 0

    @classmethod
    def of(cls, model: ModelFacts) -> MemoryUse:
        """Return the memory of a draft model."""
        return cls(model.weight_bytes, model.kv_bytes)

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.other_bytes + other.other_bytes,
        )


class Drafter(ABC):
    """Guesses tokens. Whatever it proposes, the reply stays the same; only the speed changes.

    A round is `propose`, the target's pass, `observe`, the target's commit, `commit`. A round may begin
    without `propose`, and a proposal may be cut or joined with others before it is verified.
    has_idle_work: `run_idle_work` has something to do.

    Attributes:
        is_lookup: Drafts are looked up without running a model. Any part of such a draft may be verified
            without the rest.
        chooses_length: The drafter chooses the draft length itself, up to the limit given to `propose`.
    """

    name: str
    is_lookup: bool = False
    chooses_length: bool = False
    has_idle_work: bool = False

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """A reply begins after `tokens` (all of the prompt). What is already known is not computed again."""

    @abstractmethod
    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        """A tree of up to `draft_length` levels whose root is the last token; the root alone when no guess.

        `sampler` stands after the last token; it is left as it was found.
        """

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:  # noqa: B027
        """See what the target said of the tree it verified, before that is gone; row i is node i's.

        `sampler` stands after the last token; it is left as it was found.
        """

    @abstractmethod
    def commit(self, tokens: tuple[int, ...]) -> None:
        """These tokens were emitted after the last proposal (or without one)."""

    @property
    def memory_use(self) -> MemoryUse:
        """Memory that this drafter holds now."""
        return MemoryUse()

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters it is put together from. Rests go to these, not to the whole."""
        return (self,)

    def warm_up(self) -> None:  # noqa: B027
        """Do slow one-time work now, such as loading an index, so that no reply waits for it."""

    def note(self) -> str:
        """One line on what it has learnt, or why it does not draft; empty when there is nothing to say."""
        return ""

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:  # noqa: B027
        """Improve the drafter between replies, until `should_continue()` returns False.

        Called from the idle thread. `should_continue` is called before every step, and steps are short
        because a new reply waits for the running step. The target may run, but its cache must not change.
        """

    def reset(self) -> None:  # noqa: B027
        """Give up what is held of the last text, but not what was learnt: the next reply reads its own."""

    def interrupt(self, enabled: bool) -> None:  # noqa: B027
        """Stop a running proposal with CancelledError, from any thread; False allows new ones."""

    def close(self) -> None:  # noqa: B027
        """Free everything the drafter owns."""


class BudgetedDrafter(Drafter):
    """A drafter that runs a model, whose work can be budgeted before it is done.

    The controller of `auto` limits how many tokens the model prefills, and forces short drafts to find out
    whether drafting saves time by now.
    """

    @property
    @abstractmethod
    def pending_tokens(self) -> int:
        """Tokens that the model must prefill before its next draft."""

    @property
    def full_pending_tokens(self) -> int:
        """Tokens to prefill so that the model sees the whole sequence.

        More than `pending_tokens` after a `prefill` that was cut short.
        """
        return self.pending_tokens

    @abstractmethod
    def prefill(self, max_tokens: int) -> None:
        """Prefill the pending tokens, or only the end of the sequence if there are more than `max_tokens`."""

    def force_draft(self) -> None:
        """Make a short draft in the next round even where none is expected to save time."""

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return what was learned about acceptance and cost, as named arrays for a later run."""
        return {}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the arrays of `saved_statistics`.

        Raises:
            KeyError: An array is missing.
            ValueError: An array holds impossible values.
        """

    def with_growth(self, make_growth: Callable[[Capabilities], TreeGrowth]) -> BudgetedDrafter:
        """Return a drafter that shares this one's model and cache but grows its trees by another rule.

        Only one of the two may be used in a reply. Drafters that grow no tree return themselves.

        Args:
            make_growth: Returns the rule for a draft model with the given capabilities.
        """
        return self


def check_rollback(model: LanguageModel) -> None:
    """Raises CapabilityError where a model cannot take back what it drafted."""
    if not model.facts.capabilities.rollback:
        raise CapabilityError(
            f"{model.facts.name} cannot be a draft: {model.facts.capabilities.reason}",
            "choose a draft whose cache can be rolled back, or --draft none",
        )
