"""Choose which heads to load with a target model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

from edgespec.errors import EdgespecError, ModelFileError, OptionError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.model.base import Progress
from edgespec.model.memory_estimate import BLOCK_TOKENS
from edgespec.options.methods import head_names
from edgespec.store.heads import HeadOption, head_options, named_head, resolve_head
from edgespec.store.reference import Resolved
from edgespec.store.remote_header import resolve_head_metadata
from edgespec.system.files import format_bytes

__all__ = ["FindHead", "FoundHeads", "choose_heads", "describe_choice", "find_heads", "without_heads"]

FindHead: TypeAlias = Callable[[str], Resolved]


class FoundHeads(NamedTuple):
    """The heads for a target.

    Attributes:
        chosen: The heads to draft with.
        why_none: Why no head was chosen. Empty if `chosen` is not empty.
        notice: Message that tells the user which heads were chosen. Empty if there is nothing to report.
        suggestion: Clause that suggests a published head, to append to a message. Empty if there is none.
        advice: How to draft with a head that is used only if the user names it. Empty if there is none.
    """

    chosen: tuple[HeadOption, ...] = ()
    why_none: str = ""
    notice: str = ""
    suggestion: str = ""
    advice: str = ""


def find_heads(
    target: Resolved,
    drafting: DraftingOptions,
    find_head: FindHead | None,
    progress: Progress | None,
) -> FoundHeads:
    """Find the heads to draft with: the one that the user named, or those in or next to the target's files.

    Args:
        target: The model to draft for.
        drafting: The methods that replies can use, and the value of `--head`.
        find_head: Resolves a reference to a head. By default, missing heads are downloaded and converted to
            the target's format.
        progress: Called during downloads. Returning False cancels them.

    Raises:
        OptionError: The target's format supports no heads.
        CapabilityError: The head that the user named cannot draft for the target.
        EdgespecError: Any error raised by `resolve_head`.
    """
    if drafting.head == "none":
        return FoundHeads(why_none="--head none was given")
    if drafting.head != "auto":
        if not target.file_format.heads:
            raise OptionError(
                f"{target.name} does not support draft heads, because it is not a GGUF model",
                "use --head none, or a GGUF version of the model",
                option="head",
                code="option_not_supported",
            )
        if find_head is not None:
            return FoundHeads((named_head(find_head(drafting.head), target, convert=False),))
        # Check the metadata first, to avoid downloading the weights of a head that was made for a different
        # target.
        with TemporaryDirectory(prefix="edgespec-") as folder:
            header = resolve_head_metadata(drafting.head, Path(folder), progress)
            try:
                named_head(header, target, convert=False)
            except ModelFileError:
                # An EAGLE-1 head is recognisable only by its tensors, and PyTorch files have no header that
                # lists them.
                if not header.path.is_dir() or any(header.path.glob("*.safetensors")):
                    raise
        found = resolve_head(drafting.head, progress=progress)
        return FoundHeads((named_head(found, target),))
    named, automatic = drafting.named_drafters & {*head_names()}, "auto" in drafting.methods
    if not named and not automatic:
        return FoundHeads()
    options = [_checked_estimate(option, target) for option in head_options(target)]
    chosen = choose_heads(options, named, automatic=automatic)
    if chosen:
        return FoundHeads(chosen, notice=describe_choice(chosen, options))
    wanted = [each for each in options if not each.problem and (automatic or each.method in named)]
    published = next((each for each in wanted if each.head is None), None)
    suggestion = (
        f", or a draft head with --head {published.name} ({published.expectation})" if published else ""
    )
    places = f"in the files of {target.name}, next to them or in the Hugging Face cache"
    advice = ""
    if wanted:
        download = f" (a download of {format_bytes(wanted[0].size_bytes)})" if wanted[0] is published else ""
        advice = f"use --head {wanted[0].name}{download}"
    return FoundHeads(
        why_none=f"no draft head was found {places}",
        notice=describe_choice((), options),
        suggestion=suggestion,
        advice=advice,
    )


def without_heads(found: FoundHeads, why: str) -> FoundHeads:
    """Return a result without heads. Raises OptionError if the user named a head.

    Args:
        found: The result with the heads.
        why: Why the heads cannot be used.
    """
    if any(head.source == "named" for head in found.chosen):
        raise OptionError(
            f"cannot use a draft head: {why}",
            "use --head none, or a method other than layerskip",
            option="head",
            code="option_not_supported",
        )
    return FoundHeads(why_none=why)


def choose_heads(
    options: Sequence[HeadOption], named_methods: Collection[str], *, automatic: bool
) -> tuple[HeadOption, ...]:
    """Return the first usable head for each drafting method.

    Args:
        options: The heads for the target, most preferred first.
        named_methods: The methods that the user named. Heads for other methods are skipped.
        automatic: Whether the user allowed `auto`, which can use heads of any method.
    """
    chosen: dict[str, HeadOption] = {}
    for option in options:
        if option.is_usable and (automatic or option.method in named_methods):
            chosen.setdefault(option.method, option)
    return tuple(chosen.values())


def describe_choice(chosen: Sequence[HeadOption], options: Sequence[HeadOption]) -> str:
    """Return a one-line message about the chosen heads, or about an unusable head next to the target.

    Returns an empty string if there is nothing to report.
    """
    if not chosen:
        blocked = next((each for each in options if each.source == "beside" and each.problem), None)
        return f"not using the draft head {blocked.name}: {blocked.problem}" if blocked else ""
    start = "using the draft head" + ("s " if len(chosen) > 1 else " ")
    start += " and ".join(option.name for option in chosen)
    others = [option.name for option in options if option.is_usable and option not in chosen]
    if not others:
        return start
    count = (
        f"{len(others)} other heads also work with this model"
        if len(others) > 1
        else "another head also works with this model"
    )
    return f"{start}; {count}: {', '.join(others)} (choose with --head)"


def _checked_estimate(option: HeadOption, target: Resolved) -> HeadOption:
    """Mark a head as unusable if its memory cannot be estimated, for example because it is damaged."""
    if option.head is not None and option.is_usable:
        try:
            target.file_format.estimate_head(option.head, target.path, BLOCK_TOKENS)
        except EdgespecError as error:
            return replace(option, problem=error.what)
    return option
