"""The interface of drafters."""

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
    """Proposes tokens for the target to verify. Drafts affect the speed of a reply, never its tokens.

    The order of calls in a round is `propose`, the target's `verify`, `observe`, the target's `commit`,
    `commit`. A round may omit `propose`. A draft may be cut, or merged with others, before it is verified.

    Attributes:
        name: Name of the method in options and reports.
        is_lookup: Drafts are looked up without running a model. Any part of such a draft may be verified
            without the rest.
        chooses_length: The drafter chooses the draft length itself, up to the limit given to `propose`.
        has_idle_work: `run_idle_work` does something.
    """

    name: str
    is_lookup: bool = False
    chooses_length: bool = False
    has_idle_work: bool = False

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Begin a reply. State of a common prefix with the last sequence is reused.

        Args:
            tokens: The whole prompt, including earlier turns of the chat.
        """

    @abstractmethod
    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        """Return a draft: a tree whose root is the last token, or the root alone without a draft.

        Args:
            sampler: The target's sampler after the last token. Its state is the same after the call.
            acceptance: Acceptance rule, which also draws the tokens of drafts with probabilities.
            draft_length: Largest depth of the tree.
        """

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:  # noqa: B027
        """Receive the target's logits before its next pass overwrites them.

        Args:
            tree: The tree that was verified.
            logits: The target's logits; row i belongs to node i.
            sampler: The target's sampler after the last token. Its state is the same after the call.
        """

    @abstractmethod
    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append the tokens that were emitted in this round."""

    @property
    def memory_use(self) -> MemoryUse:
        """Memory that this drafter holds now."""
        return MemoryUse()

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that this drafter combines, or itself. Idle work is run for each of them."""
        return (self,)

    def warm_up(self) -> None:  # noqa: B027
        """Do slow one-time work now, such as loading an index, so that no reply waits for it."""

    def note(self) -> str:
        """Return one line for the user on the drafter's state, or why it does not draft; may be empty."""
        return ""

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:  # noqa: B027
        """Improve the drafter between replies, until `should_continue()` returns False.

        Called from the idle thread. `should_continue` is called before every step, and steps are short
        because a new reply waits for the running step. The target may run, but its cache must not change.
        """

    def reset(self) -> None:  # noqa: B027
        """Drop all state of the last sequence, but keep trained weights and statistics."""

    def interrupt(self, enabled: bool) -> None:  # noqa: B027
        """Abort a running `propose` with CancelledError, or allow new calls. May be called from any thread.

        Args:
            enabled: True to abort, False to allow new calls.
        """

    def close(self) -> None:  # noqa: B027
        """Free all resources of the drafter."""


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
    """Check that a model can roll back, as a draft model must.

    Raises:
        CapabilityError: It cannot.
    """
    if not model.facts.capabilities.rollback:
        raise CapabilityError(
            f"{model.facts.name} cannot be a draft model: {model.facts.capabilities.reason}",
            "choose a draft model with rollback, or --draft none",
        )
