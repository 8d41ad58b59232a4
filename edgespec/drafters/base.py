"""What every drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from edgespec.backends.base import LanguageModel
from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError

__all__ = ["Drafter", "check_rollback"]


class Drafter(ABC):
    """Guesses tokens. Whatever it proposes, the reply stays the same; only the speed changes.

    A round is `propose`, the target's pass, `observe`, the target's commit, `commit`. A round may begin
    without `propose`, and a proposal may be cut or joined with others before it is verified.
    extra_weight_bytes, extra_kv_bytes: what it keeps in memory beside the target.
    rests: it has something to do in `rest`.
    lookup: it looks guesses up, which costs nothing; any part of them may be verified without the rest.
    """

    name: str
    rests: bool = False
    lookup: bool = False
    extra_weight_bytes: int = 0
    extra_kv_bytes: int = 0

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
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters it is put together from. Rests go to these, not to the whole."""
        return (self,)

    def note(self) -> str:
        """One line on what it has learnt, or why it does not draft; empty when there is nothing to say."""
        return ""

    def rest(self, wanted: Callable[[], bool]) -> None:  # noqa: B027
        """No reply is being made: improve while `wanted()` stays true.

        It runs in a thread that ends soon. `wanted` is asked before every step, and a step is short: a
        reply that begins waits for it. The target may be used, its memory is left as it is.
        """

    def interrupt(self, wanted: bool) -> None:  # noqa: B027
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
