"""Which models can draft for a target, by their tokens, and which of them is worth taking.

A choice is made from sizes and tokens alone, in a fixed order, and never downloads anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.backends.model_info import ModelInfo
from edgespec.backends.registry import backend_of, same_backend
from edgespec.catalog.acceptance_history import AcceptanceHistory
from edgespec.catalog.aliases import preferred_draft
from edgespec.catalog.catalogue import ModelEntry, ModelFormat, load_catalogue, recommended_drafts
from edgespec.catalog.installed import InstalledModel, InstalledModels, find_installed, read_model_info
from edgespec.catalog.metadata_cache import MetadataCache
from edgespec.catalog.reference import Resolved, resolve
from edgespec.catalog.speedup_estimate import estimate_speedup
from edgespec.errors import EdgespecError, ModelFileError, ModelNotFoundError
from edgespec.files import format_bytes

__all__ = ["DraftChoice", "DraftOption", "choose_draft", "draft_options"]

By = Literal["catalogue", "tokens"]

# A draft that reads more than this share of the target's bytes for a guess cannot bring much.
_MOST_COST = 0.5
# Of fewer tokens than this a draft shares, it can only be used through its text.
_LEAST_SHARED = 0.5
# `auto` does not take a draft of other tokens, of which the loader would say to expect less.
_AUTO_SHARED = 0.9
# What the expectation is not fine enough to tell apart: then the catalogue's order decides.
_ALIKE = 0.97
_USUAL_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class DraftOption:
    """A model that can draft for a target.

    path: None where it is not on this machine. by: who says so, the catalogue or its tokens.
    shared_share: of the target's tokens, those it has; None where its file is not here to be looked into.
    size_bytes: of its files. needed_bytes: with its cache at the usual context. speedup: what may be expected
    (see `estimate_speedup`). architecture: empty where only the catalogue tells. acceptance: of its guesses
    for this target, where enough were made here; None where it is assumed.
    """

    reference: str
    path: Path | None
    format: ModelFormat
    by: By
    shared_share: float | None
    parameters: int
    size_bytes: int
    needed_bytes: int
    speedup: float
    architecture: str = ""
    acceptance: float | None = None

    @property
    def why(self) -> str:
        """What may be expected, and how that is known, in words."""
        gain = f"about {self.speedup:.1f}x plain decoding may be expected"
        if self.acceptance is None:
            return f"by its size {gain}, assumed"
        return f"with {self.acceptance:.0%} of its guesses accepted {gain}, measured"

    @property
    def tokens(self) -> str:
        """How its tokens relate to the target's, in words."""
        if self.shared_share is None:
            return "the same tokens, by the catalogue"
        if self.shared_share == 1.0:
            return "the same tokens"
        return f"{min(99.9, 100 * self.shared_share):.3g} % of its tokens"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The draft that `auto` takes, or None. why: in words. usual: the one a person would have named."""

    draft: Resolved | None
    why: str
    usual: bool = True


def draft_options(target: Resolved, shelf: InstalledModels) -> list[DraftOption]:
    """What can draft for a target, best first: on this machine, then what the catalogue could fetch."""
    try:
        info: ModelInfo | None = read_model_info(target, shelf.known)
    except ModelFileError:
        info = None
    recommended = recommended_drafts(target.entry) if target.entry else []
    options = {
        str(option.path): option
        for shelved in shelf.models
        if (option := _of_shelf(target, info, shelved, recommended, shelf.known))
    }
    for name in recommended:
        option = _of_catalogue(target, info, name, shelf.known)
        if option and str(option.path) not in options:
            options[str(option.path or option.reference)] = option
    for name in _by_family(target, info, shelf):
        option = _of_catalogue(target, info, name, shelf.known)
        if option and option.path is None:
            options.setdefault(option.reference, option)
    shelf.known.keep()
    return sorted(options.values(), key=lambda option: (option.path is None, *_order(option)))


def choose_draft(
    target: Resolved, memory_bytes: int | None = None, context_tokens: int | None = None
) -> DraftChoice:
    """The draft for `--draft auto`: the user's own choice, or else the one of which most may be expected.

    Only what is on this machine counts, and what memory_bytes hold beside the target. Raises ModelFileError
    for a choice of the user's that is no model, ModelNotFoundError where the file of it is not understood.
    """
    wanted = preferred_draft(target)
    if wanted is not None:
        return _wanted(target, wanted)
    if target.entry is not None and target.entry.embedded_path is not None:
        # Nothing else has the tokens of the demo, and it is to start at once.
        return _first_recommended(target)
    shelf = find_installed()
    found = [option for option in draft_options(target, shelf) if _is_for_auto(option, target, shelf)]
    fitting = [
        o for o in found if memory_bytes is None or _fits(o, target, shelf, memory_bytes, context_tokens)
    ]
    promising = [option for option in fitting if option.speedup > 1.0]
    if promising:
        best = _best(promising, recommended_drafts(target.entry) if target.entry else [])
        draft = resolve(best.reference, allow_download=False)
        others = f", the best of {len(promising)}" if len(promising) > 1 else ""
        why = f"it has {best.tokens}, and {best.why}{others}"
        return DraftChoice(draft, why, usual=best.by == "catalogue")
    return DraftChoice(None, _why_none(target, found, fitting))


def _wanted(target: Resolved, draft: str) -> DraftChoice:
    """What the user chose."""
    if draft == "none":
        return DraftChoice(None, f"you chose no draft for {target.name}")
    try:
        return DraftChoice(resolve(draft, allow_download=False), f"you chose {draft} for {target.name}")
    except ModelNotFoundError:
        return DraftChoice(
            None, f"{draft}, which you chose, is not on this machine: --draft {draft} fetches it"
        )


def _first_recommended(target: Resolved) -> DraftChoice:
    assert target.entry is not None
    for name in recommended_drafts(target.entry):
        try:
            return DraftChoice(resolve(name, allow_download=False), f"it is recommended for {target.name}")
        except EdgespecError:
            continue
    return DraftChoice(None, f"no draft is known for {target.name}: name one with --draft")


def _why_none(target: Resolved, found: Sequence[DraftOption], fitting: Sequence[DraftOption]) -> str:
    if fitting:
        return (
            f"of {fitting[0].reference}, the best draft here, {fitting[0].speedup:.2f}x plain decoding may be"
            " expected: name it with --draft to try"
        )
    if found:
        return (
            f"{found[0].reference} could draft, but its {format_bytes(found[0].needed_bytes)} do not fit the"
            " memory that is left"
        )
    names = recommended_drafts(target.entry) if target.entry else []
    if names:
        return f"the recommended draft is not on this machine: --draft {names[0]} fetches it"
    return f"no draft is known for {target.name}: name one with --draft"


def _is_known(option: DraftOption, target: Resolved, shelf: InstalledModels) -> bool:
    """Whether what runs the target will know the draft's architecture: nobody asked for it by name."""
    with suppress(ModelFileError):
        if read_model_info(target, shelf.known).architecture == option.architecture:
            return True
    return backend_of(option.format).knows_architecture(option.architecture)


def _is_for_auto(option: DraftOption, target: Resolved, shelf: InstalledModels) -> bool:
    """Here, in the target's form, with its tokens as far as that is known, and to be trusted to load."""
    if option.path is None or not same_backend(option.format, target.format):
        return False
    if option.by == "tokens" and not _is_known(option, target, shelf):
        return False
    return option.by == "catalogue" if option.shared_share is None else option.shared_share >= _AUTO_SHARED


def _fits(
    option: DraftOption,
    target: Resolved,
    shelf: InstalledModels,
    memory_bytes: int,
    context_tokens: int | None,
) -> bool:
    try:
        mine = read_model_info(target, shelf.known)
    except ModelFileError:
        return True  # the loader knows better, and says so
    taken = mine.size_bytes + mine.kv_bytes * _context(mine, context_tokens)
    return taken + option.needed_bytes <= memory_bytes


def _context(info: ModelInfo, context_tokens: int | None) -> int:
    return context_tokens or min(info.context_tokens or _USUAL_CONTEXT_TOKENS, _USUAL_CONTEXT_TOKENS)


def _best(options: Sequence[DraftOption], recommended: Sequence[str]) -> DraftOption:
    """The one of which most may be expected; among those that are alike, the catalogue's first."""
    most = max(option.speedup for option in options)
    alike = [option for option in options if option.speedup >= _ALIKE * most]

    def rank(option: DraftOption) -> tuple[int, float, int, str]:
        place = _place(option.reference, recommended) if option.by == "catalogue" else len(recommended)
        return (place, *_order(option))

    return min(alike, key=rank)


def _order(option: DraftOption) -> tuple[float, int, str]:
    return (-round(option.speedup, 3), option.size_bytes, option.reference)


def _place(reference: str, recommended: Sequence[str]) -> int:
    entry = _entry(reference)
    return recommended.index(entry.name) if entry and entry.name in recommended else len(recommended)


def _entry(reference: str) -> ModelEntry | None:
    try:
        return resolve(reference, allow_download=False).entry
    except EdgespecError:
        return None


def _of_shelf(
    target: Resolved,
    info: ModelInfo | None,
    shelved: InstalledModel,
    recommended: Sequence[str],
    known: MetadataCache,
) -> DraftOption | None:
    """A model that is here as a draft; None where it cannot be one, or would be too dear."""
    by: By = "catalogue" if shelved.entry and shelved.entry.name in recommended else "tokens"
    if shelved.path == target.path or info is None or not info.pass_bytes:
        return None
    shared = known.shared_token_fraction(
        (target.path, target.format, info.vocabulary),
        (shelved.path, shelved.format, shelved.info.vocabulary),
    )
    if shared is None or shared < _LEAST_SHARED:
        return None
    cost = shelved.info.pass_bytes / info.pass_bytes
    if cost > _MOST_COST:
        return None
    acceptance = AcceptanceHistory().of((target.path, target.format), (shelved.path, shelved.format))
    size_share = shelved.info.parameters / max(1, info.parameters)
    return DraftOption(
        shelved.reference,
        shelved.path,
        shelved.format,
        by,
        shared,
        shelved.info.parameters,
        shelved.info.size_bytes,
        shelved.info.size_bytes + shelved.info.kv_bytes * _context(info, None),
        estimate_speedup(min(size_share, 1.0), cost, shared, acceptance),
        shelved.info.architecture,
        acceptance,
    )


def _of_catalogue(
    target: Resolved, info: ModelInfo | None, name: str, known: MetadataCache
) -> DraftOption | None:
    """A model of the catalogue as a draft, by what the catalogue says of it where its file says nothing."""
    found = load_catalogue().find(name)
    if found is None:
        return None
    entry = found[0]
    path, size_bytes, kv_bytes, shared = None, entry.approximate_file_bytes, 0, None
    try:
        here = resolve(name, allow_download=False)
        path = here.path
        its = known.info(path, here.format)
        size_bytes, kv_bytes = its.size_bytes, its.kv_bytes
        if info is not None:
            shared = known.shared_token_fraction(
                (target.path, target.format, info.vocabulary), (path, here.format, its.vocabulary)
            )
    except EdgespecError:
        pass
    parameters, target_bytes = _sizes(target, info)
    return DraftOption(
        name,
        path,
        entry.format,
        "catalogue",
        shared,
        entry.parameters,
        size_bytes,
        size_bytes + kv_bytes * (_context(info, None) if info else 0),
        estimate_speedup(
            min(entry.parameters / max(1, parameters), 1.0),
            size_bytes / max(1, target_bytes),
            1.0 if shared is None else shared,
        ),
    )


def _sizes(target: Resolved, info: ModelInfo | None) -> tuple[int, int]:
    """Parameters and bytes of a target, by its file or by the catalogue."""
    if info is not None:
        return info.parameters, info.pass_bytes
    if target.entry is not None:
        return target.entry.parameters, target.entry.approximate_file_bytes
    return 0, 0


def _by_family(target: Resolved, info: ModelInfo | None, shelf: InstalledModels) -> list[str]:
    """Smaller models of the catalogue with the target's tokens, because one that is here has them.

    A recommended draft has the tokens of its target, and so has whatever else it is recommended for.
    """
    entries = load_catalogue().entries
    names = {target.entry.name} if target.entry else set()
    if info is not None and info.vocabulary:
        names |= {
            one.entry.name for one in shelf.models if one.entry and one.info.vocabulary == info.vocabulary
        }
    grown = True
    while grown:
        joined = {
            n for entry in entries if names & {entry.name, *entry.drafts} for n in (entry.name, *entry.drafts)
        }
        grown = not joined <= names
        names |= joined
    parameters, _ = _sizes(target, info)
    return [
        entry.name
        for entry in entries
        if entry.name in names
        and entry.parameters * 2 <= parameters
        and same_backend(entry.format, target.format)
    ]
