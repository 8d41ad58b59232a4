"""What every drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edgespec.auto.loss_limit import ControllerReport
from edgespec.backends.base import Capabilities, LanguageModel, ModelFacts
from edgespec.drafters.tree_growth import TreeGrowth
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["Drafter", "Extra", "check_rollback"]


@dataclass(frozen=True, slots=True)
class Extra:
    """What a drafter keeps in memory beside the target, in bytes.

    weight_bytes: of a model. cache_bytes: its keys and values. other_bytes: texts and indexes that guesses
    are looked up in, and what learning takes.
    """

    weight_bytes: int = 0
    cache_bytes: int = 0
    other_bytes: int = 0

    @classmethod
    def of(cls, model: ModelFacts) -> Extra:
        """What a model takes."""
        return cls(model.weight_bytes, model.kv_bytes)

    def __add__(self, other: Extra) -> Extra:
        return Extra(
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.other_bytes + other.other_bytes,
        )


class Drafter(ABC):
    """Guesses tokens. Whatever it proposes, the reply stays the same; only the speed changes.

    A round is `propose`, the target's pass, `observe`, the target's commit, `commit`. A round may begin
    without `propose`, and a proposal may be cut or joined with others before it is verified.
    rests: it has something to do in `rest`. read_seconds: what reading took in the last proposal.
    lookup: it looks guesses up, which costs nothing; any part of them may be verified without the rest.
    adapts: it chooses itself how much to draft, by what pays.
    """

    name: str
    has_idle_work: bool = False
    read_seconds: float = 0.0
    lookup: bool = False
    adapts: bool = False

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

    def growing(self, growth_for: Callable[[Capabilities], TreeGrowth]) -> Drafter:
        """Another way to draft with the same model and cache, of which a reply uses one: as far as pays.

        growth_for: what decides that for a draft model able to do so much. Itself where no model drafts, or
        where it decides itself.
        """
        return self

    @property
    def extra(self) -> Extra:
        """What it keeps in memory now, beside the target."""
        return Extra()

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters it is put together from. Rests go to these, not to the whole."""
        return (self,)

    @property
    def unread(self) -> int:
        """Tokens of the text that it has to run before it can guess; `propose` runs them if need be."""
        return 0

    @property
    def unread_whole(self) -> int:
        """Tokens to run before it guesses from all of the text; more than `unread` where it sees its end."""
        return self.unread

    def read(self, at_most: int) -> None:  # noqa: B027
        """Run what is unread; where that is more than `at_most` tokens, see no more than the end."""

    def warm(self) -> None:  # noqa: B027
        """Before the first text: what is slow only once is done now, and not in a reply."""

    def dare(self) -> None:  # noqa: B027
        """Make a short guess in the next proposal even if it does not seem to pay."""

    @property
    def speaking(self) -> tuple[str, ...]:
        """Names of those whose guesses were in the last proposal that had any."""
        return (self.name,)

    def account(self) -> ControllerReport | None:
        """How the reply stands, where somebody keeps a ledger of it."""
        return None

    def kept(self) -> dict[str, NDArray[Any]]:
        """What it knows of what its guesses cost and are worth, by name, for another run."""
        return {}

    def restore(self, kept: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Go on from what was kept. Raises KeyError, ValueError for what makes no sense."""

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


def check_rollback(model: LanguageModel) -> None:
    """Raises CapabilityError where a model cannot take back what it drafted."""
    if not model.facts.capabilities.rollback:
        raise CapabilityError(
            f"{model.facts.name} cannot be a draft: {model.facts.capabilities.reason}",
            "choose a draft whose cache can be rolled back, or --draft none",
        )
