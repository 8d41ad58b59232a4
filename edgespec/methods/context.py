"""Context for creating drafters, and the result if a method cannot draft."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import CapabilityError
from edgespec.methods.base import Drafter
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.draft_cache import HeadCache
from edgespec.model.base import LanguageModel, Progress, SelfDraft
from edgespec.model.registry import FileFormat
from edgespec.options.load_options import LoadArguments
from edgespec.store.heads import HeadOption
from edgespec.store.reference import Resolved

__all__ = ["DrafterContext", "LoadedHead", "MissingDrafter", "why_no_view"]


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
