"""Find the heads to load for a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.backends.base import Progress
from edgespec.backends.memory_check import BLOCK_TOKENS
from edgespec.catalog import MetadataCache, Resolved
from edgespec.catalog.head_reference import resolve_head
from edgespec.catalog.heads import HeadOption, choose_heads, describe_choice, head_options, named_head
from edgespec.errors import EdgespecError, OptionError
from edgespec.method_names import HEADS

__all__ = ["FindHead", "FoundHeads", "find_heads"]

FindHead: TypeAlias = Callable[[str], Resolved]


class FoundHeads(NamedTuple):
    """The heads for a target.

    Attributes:
        chosen: The heads to draft with.
        why_none: The reason why there are none.
        notice: Notice for the user about the choice.
        suggestion: The end of a sentence that suggests a published head. Empty if there is none.
    """

    chosen: tuple[HeadOption, ...] = ()
    why_none: str = ""
    notice: str = ""
    suggestion: str = ""


def find_heads(
    target: Resolved,
    drafting: DraftingOptions,
    metadata: MetadataCache,
    find_head: FindHead | None,
    progress: Progress | None,
) -> FoundHeads:
    """Find the heads for a target: the one that the user named, or those in its files and beside it.

    Args:
        target: The target.
        drafting: The methods that replies can use, and `--head`.
        metadata: Used to read the metadata of heads.
        find_head: Finds a head by reference. The default downloads missing files, and converts them to the
            target's format.
        progress: Called during downloads. Returning False cancels them.

    Raises:
        OptionError: The target's format supports no heads.
        CapabilityError: The head that the user named cannot draft for the target.
        EdgespecError: Any error raised by `resolve_head`.
    """
    if drafting.head == "none":
        return FoundHeads(why_none="--head none was given")
    if drafting.head != "auto":
        if target.file_format.estimate_head is None:
            raise OptionError(
                f"a head needs a GGUF model, but {target.name} is not one",
                "omit --head, or use a GGUF version of the model",
            )
        found = (find_head or partial(resolve_head, progress=progress))(drafting.head)
        return FoundHeads((named_head(found, target, metadata, convert=find_head is None),))
    named, automatic = drafting.named_drafters & {*HEADS}, "auto" in drafting.methods
    if not named and not automatic:
        return FoundHeads()
    options = [_checked_estimate(option, target) for option in head_options(target, metadata)]
    chosen = choose_heads(options, named, automatic)
    published = next((each for each in options if each.head is None and not each.problem), None)
    suggestion = f", or a head with --head {published.name} ({published.expectation})" if published else ""
    why_none = f"no head was found in the files of {target.name} or beside them{suggestion}"
    return FoundHeads(chosen, "" if chosen else why_none, describe_choice(chosen, options), suggestion)


def _checked_estimate(option: HeadOption, target: Resolved) -> HeadOption:
    """Return the head, marked as unusable if its memory cannot be estimated because it is damaged."""
    estimate = target.file_format.estimate_head
    if estimate is not None and option.head is not None and option.is_usable:
        try:
            estimate(option.head, target.path, BLOCK_TOKENS)
        except EdgespecError as error:
            return replace(option, problem=error.what)
    return option
