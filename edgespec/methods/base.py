"""The base class of drafters, and the context in which a method creates its drafter."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.draft_cache import HeadCache
from edgespec.methods.tree_growth import TreeGrowth
from edgespec.model.base import LanguageModel, Progress, SelfDraft
from edgespec.model.model_facts import Capabilities, ModelFacts
from edgespec.model.registry import FileFormat
from edgespec.options.load_options import LoadArguments
from edgespec.store.heads import HeadOption
from edgespec.store.reference import Resolved

__all__ = [
    "Drafter",
    "DrafterContext",
    "DrafterMemory",
    "ForcedDraft",
    "LoadedHead",
    "MissingDrafter",
    "check_rollback",
    "why_no_view",
]


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """Memory used by a drafter: draft model weights, KV cache, and other data such as lookup indexes."""

    weight_bytes: int = 0
    cache_bytes: int = 0
    other_bytes: int = 0

    @classmethod
    def of(cls, model: ModelFacts) -> DrafterMemory:
        """Return the memory used by a draft model."""
        return cls(model.weight_bytes, model.kv_bytes)

    def __add__(self, other: DrafterMemory) -> DrafterMemory:
        return DrafterMemory(
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.other_bytes + other.other_bytes,
        )


class Drafter(ABC):
    """Proposes tokens for the target to verify. Drafts affect only the speed of a reply.

    In each draft-and-verify round, the caller calls `propose`, the target's `verify`, `observe`, the target's
    `commit`, and finally the drafter's `commit`. `propose` may be skipped. Before a draft is verified, the
    caller may shorten it or merge it with other drafts.

    The `auto` controller limits how many tokens a drafter's model prefills, and occasionally forces a short
    draft to find out whether drafting saves time.

    Attributes:
        name: Name of the method in options and reports. Must match `Method.name`.
        is_lookup: Whether drafts are looked up without running a model. Any part of such a draft can be
            verified on its own.
        chooses_length: Whether the drafter chooses the draft length itself, up to the limit passed to
            `propose`.
        has_idle_work: Whether the drafter implements `run_idle_work`.
        pass_seconds: Duration of a single-token pass of the drafter's model, measured by `warm_up`. 0 if
            unknown.
        prefill_token_seconds: Time to prefill one token, measured by `warm_up`. 0 if unknown.
        drafts_forced: Whether the drafts of `propose_with_forced` include the tokens that a constraint
            determines.
    """

    name: str
    is_lookup: bool = False
    chooses_length: bool = False
    has_idle_work: bool = False
    pass_seconds = 0.0
    prefill_token_seconds = 0.0
    drafts_forced = False

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Begin a reply to the prompt `tokens`, reusing work for any prefix shared with the last sequence."""

    @abstractmethod
    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        """Return a draft tree rooted at the last token. If nothing is drafted, it contains only the root.

        Args:
            sampler: The target's sampler after the last token. The call leaves its state unchanged.
            acceptance: The acceptance rule. Drafters that return draft probabilities also use it to sample
                tokens.
            draft_length: Maximum depth of the tree. Leading tokens that a constraint determines do not count.
        """

    def propose_with_forced(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> ForcedDraft:
        """Draft like `propose`, but also add all tokens that a constraint determines.

        Instead of drafting these tokens one by one, the model runs them in a single pass with the token
        before them. Leading forced tokens do not count towards `draft_length`. Drafters without
        `drafts_forced` add none.
        """
        return ForcedDraft(self.propose(sampler, acceptance, draft_length))

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:  # noqa: B027
        """Observe the target's logits for the verified draft tree. They are valid only during this call.

        Row i of the logits belongs to node i of the tree. The call leaves the sampler's state unchanged.
        """

    @abstractmethod
    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append the emitted tokens to the drafter's copy of the sequence."""

    @property
    def pending_tokens(self) -> int:
        """Number of tokens that the drafter's model must prefill before its next draft."""
        return 0

    @property
    def full_pending_tokens(self) -> int:
        """Number of tokens that the drafter's model must prefill to attend to the whole sequence.

        This is larger than `pending_tokens` if the last `prefill` skipped earlier parts of the sequence.
        """
        return self.pending_tokens

    def prefill(self, max_tokens: int) -> None:  # noqa: B027
        """Prefill the drafter's model with the missing tokens, or with only the most recent ones.

        Args:
            max_tokens: Maximum number of tokens to prefill.
        """

    def force_draft(self) -> None:  # noqa: B027
        """Make the next call to `propose` return a short draft, even if it is not expected to save time."""

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return acceptance and timing statistics as named arrays, to be saved for later runs."""
        return {}

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Restore the statistics returned by `saved_statistics`.

        Raises:
            KeyError: An array is missing.
            ValueError: An array contains invalid values.
        """

    def with_growth(self, make_growth: Callable[[Capabilities], TreeGrowth]) -> Drafter:
        """Return a drafter with a different `TreeGrowth` but the same model and KV cache.

        Do not use both drafters within one reply. Drafters without draft trees return themselves.
        """
        return self

    @property
    def memory_use(self) -> DrafterMemory:
        """Memory currently used by this drafter."""
        return DrafterMemory()

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that this one combines, or just itself if it is not a combination."""
        return (self,)

    def warm_up(self) -> None:  # noqa: B027
        """Perform slow one-time work, such as loading an index, so that it does not delay a reply."""

    def note(self) -> str:
        """Return a one-line status for the user, such as why drafting is off, or an empty string."""
        return ""

    def run_idle_work(self, should_continue: Callable[[], bool]) -> None:  # noqa: B027
        """Perform work that improves later drafts, such as training, until `should_continue()` returns False.

        Runs between replies on a background thread. Call `should_continue` before every step, and keep steps
        short, because a new reply waits for the current step. This method may run the target, but must leave
        its KV cache unchanged.
        """

    def reset(self) -> None:  # noqa: B027
        """Clear everything that depends on the current sequence. Trained weights and statistics are kept."""

    def interrupt(self, enabled: bool) -> None:  # noqa: B027
        """Abort a running `propose` with CancelledError, or allow drafting again if `enabled` is False.

        Can be called from any thread.
        """

    def close(self) -> None:  # noqa: B027
        """Release all resources held by the drafter."""


class ForcedDraft(NamedTuple):
    """A draft that includes tokens determined by a constraint.

    Attributes:
        tree: The draft tree.
        forced: The nodes whose tokens a constraint determines. They have no siblings.
    """

    tree: TokenTree
    forced: frozenset[int] = frozenset()


def check_rollback(model: LanguageModel) -> None:
    """Raise CapabilityError if a model does not support rollback, which a draft model requires."""
    if not model.facts.capabilities.rollback:
        raise CapabilityError(
            f"{model.facts.name} cannot be used as a draft model: {model.facts.capabilities.reason}",
            "choose another draft model, or use --draft none",
            code="rollback_not_supported",
        )


class MissingDrafter(NamedTuple):
    """The reason why a drafter is unavailable, and a hint for the user."""

    reason: str
    hint: str


class LoadedHead(NamedTuple):
    """A head that drafts for a loaded target.

    Attributes:
        name: Reference to the head, or a description if the head is part of the target's own files.
        path: The path of the head's files. Empty for a head in the target's own files.
        state: The head's state, which the prefix cache stores.
    """

    name: str
    path: str
    state: HeadCache


@dataclass(frozen=True, kw_only=True)
class DrafterContext:
    """A loaded target, with everything needed to create its drafters.

    Attributes:
        target: The target to draft for.
        files: The target's files.
        arguments: The checked arguments of `load`.
        named: The methods that the user named, excluding those that `auto` chooses.
        measured_curve: Returns the target's cost curve, which maps pass widths to durations. The first call
            measures it, which clears the target's KV cache.
        calibration_prompt: Returns the tokens of a prompt to use for measurements.
        useful_copy_type: Returns the quantisation type of a low-bit copy that would save time, or None if
            there is none. This can take a few seconds.
        window_tokens: Number of most recent tokens that a draft model attends to. See `DraftingOptions`.
        has_room_for_copy: Whether the memory plan leaves room for a copy of the target.
        substitutes: File of the low-bit copies that the planner chose of the blocks that the target streams.
            None if there are none.
        draft: The loaded draft model, or None.
        draft_drafter: The drafter that must be used with the draft model, or None for any.
        heads: The heads to draft with, at most one for each method.
        why_no_head: Why there is no head. Empty if there is one.
        head_advice: How to draft with a head that is used only if the user names it. Can be empty.
        progress: Reports the progress of slow operations. Can be None.
        loaded_heads: The heads of the drafters created so far. Methods append to this list.
        dropped_heads: Reasons why available heads are not used. Methods append to this list.
        notices: Other notices for the user about the drafters. Methods append to this list.
    """

    target: LanguageModel
    files: Resolved
    arguments: LoadArguments
    named: frozenset[str]
    measured_curve: Callable[[], CostCurve]
    calibration_prompt: Callable[[], list[int]]
    useful_copy_type: Callable[[], str | None]
    window_tokens: int | None = None
    has_room_for_copy: bool = True
    substitutes: Path | None = None
    draft: LanguageModel | None = None
    draft_drafter: Drafter | None = None
    heads: Sequence[HeadOption] = ()
    why_no_head: str = ""
    head_advice: str = ""
    progress: Progress | None = None
    loaded_heads: list[LoadedHead] = field(default_factory=list)
    dropped_heads: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def file_format(self) -> FileFormat:
        """File format of the target."""
        return self.files.file_format

    @property
    def reference(self) -> str:
        """The target's name, as used in suggested commands."""
        return shlex.quote(str(self.files.path)) if self.files.source == "path" else self.files.name


def why_no_view(target: LanguageModel, self_draft: SelfDraft) -> MissingDrafter:
    """Explain why a target does not support a kind of self-drafting."""
    reason, hint = f"{target.facts.name} cannot be its own draft model", ""
    try:
        target.self_draft(self_draft).close()
    except CapabilityError as error:
        reason, hint = error.what, error.next_step
    return MissingDrafter(reason, hint or "choose another method")
