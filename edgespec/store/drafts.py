"""Find draft models that share a target's vocabulary, and choose the one that `--draft auto` uses.

The choice depends only on model sizes, vocabularies and measured acceptance rates, and is made without
downloading anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from edgespec.errors import EdgespecError, ModelNotFoundError
from edgespec.model.model_facts import ModelInfo
from edgespec.model.registry import backend_of, same_backend
from edgespec.store.aliases import preferred_draft
from edgespec.store.catalogue import ModelEntry, ModelFormat, load_catalogue
from edgespec.store.constants import (
    AUTO_MIN_SHARED_FRACTION,
    EQUAL_SPEEDUP_RATIO,
    ESTIMATED_CONTEXT_TOKENS,
    MAX_STEP_COST,
    MIN_SHARED_FRACTION,
)
from edgespec.store.installed import (
    InstalledModel,
    InstalledModels,
    ModelVocabulary,
    find_installed,
    model_info,
    model_info_or_none,
    shared_token_fraction,
)
from edgespec.store.reference import Resolved, resolve
from edgespec.store.speedup_estimate import estimate_speedup, measured_acceptance_rate
from edgespec.system.files import format_bytes

DraftSource = Literal["catalogue", "tokens"]


@dataclass(frozen=True, slots=True)
class DraftOption:
    """A model that can draft for a target.

    Attributes:
        reference: A reference to the model.
        path: The model's file or folder. None if it is not on this machine.
        format: Name of the file format.
        source: Why the model is an option: `catalogue` if the catalogue recommends it, `tokens` if it shares
            the target's tokens.
        rank: Index in the catalogue's list of recommended draft models, or the length of that list for other
            models.
        shared_token_fraction: Fraction of the target's tokens that the model also has. None if its file is
            not on this machine.
        parameters: Number of parameters.
        size_bytes: Size of the files.
        needed_bytes: Size of the files plus the KV cache at the default context length.
        speedup: Expected speed-up over plain decoding, from `estimate_speedup`.
        architecture: Name of the architecture. Empty if the file is not on this machine.
        acceptance_rate: Acceptance rate measured with this target, or None if it has not been measured.
    """

    reference: str
    path: Path | None
    format: ModelFormat
    source: DraftSource
    rank: int
    shared_token_fraction: float | None
    parameters: int
    size_bytes: int
    needed_bytes: int
    speedup: float
    architecture: str = ""
    acceptance_rate: float | None = None

    @property
    def reason(self) -> str:
        """Text that states the expected speed-up and how it was determined."""
        if self.acceptance_rate is None:
            return f"its expected speed-up is {self.speedup:.1f}x (estimated from its size)"
        return (
            f"its expected speed-up is {self.speedup:.1f}x (measured: {self.acceptance_rate:.0%} of its"
            " drafted tokens are accepted)"
        )

    @property
    def tokens(self) -> str:
        """Text that states how much of the target's vocabulary the draft model shares."""
        if self.shared_token_fraction is None:
            return "the same tokens as the model (according to the catalogue)"
        if self.shared_token_fraction == 1.0:
            return "the same tokens as the model"
        return f"{min(99.9, 100 * self.shared_token_fraction):.3g}% of the model's tokens"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The draft model that `--draft auto` uses.

    Attributes:
        draft: The model, or None if no model is suitable.
        reason: Why this model was chosen, or why none was.
        is_expected: Whether the user would expect this choice. If not, a notice explains it.
        source: `user` if it was set with --draft or `edgespec models pair`, otherwise `automatic`.
    """

    draft: Resolved | None
    reason: str
    is_expected: bool = True
    source: Literal["user", "automatic"] = "automatic"


def draft_options(target: Resolved, installed: InstalledModels) -> list[DraftOption]:
    """Return the models that can draft for a target, installed ones before downloadable ones.

    Both groups are sorted by expected speed-up, highest first.
    """
    info = model_info_or_none(target)
    options: dict[str, DraftOption] = {}
    recommended = _recommended(target)
    if info is not None:
        # The demo's draft models are offered only for the demo.
        models = (
            model
            for model in installed.models
            if model.place != "embedded" or (model.entry and model.entry.name in recommended)
        )
        found = (_installed_option(target, info, model) for model in models)
        options = {str(option.path): option for option in found if option}
    for name in dict.fromkeys((*recommended, *_same_family(target, info, installed))):
        option = _catalogue_option(target, info, name)
        if option and (option.path is None or name in recommended):
            options.setdefault(str(option.path or option.reference), option)
    return sorted(options.values(), key=lambda option: (option.path is None, *_order(option)))


def choose_draft(
    target: Resolved,
    memory_bytes: int | None = None,
    context_tokens: int | None = None,
    *,
    installed: InstalledModels | None = None,
    failed: Mapping[Path, str] = MappingProxyType({}),
) -> DraftChoice:
    """Choose the draft model for `--draft auto` from the models on this machine.

    A draft model set with `edgespec models pair` takes precedence. Otherwise, the one with the highest
    expected speed-up is chosen.

    Args:
        target: The target model.
        memory_bytes: Memory available for both models. Unlimited if None.
        context_tokens: Context length of the target. None for the default.
        installed: The models on this machine. If None, this function searches for them.
        failed: Models that failed to load, with the reasons. They are not chosen.

    Raises:
        ModelFileError: The draft model that the user chose is unusable.
        ModelNotFoundError: The user's alias file is invalid.
    """
    preferred = preferred_draft(target)
    if preferred is not None:
        return _preferred_choice(target, preferred)
    if target.source == "embedded" or load_catalogue().embedded_at(target.path):
        # The demo must start quickly and has its own draft model, so do not search for others.
        return _first_recommended(target, failed)
    installed = installed or find_installed()
    info = model_info_or_none(target)
    options = [option for option in draft_options(target, installed) if option.path not in failed]
    usable = [option for option in options if _is_for_auto(option, target, info)]
    fitting = usable
    if memory_bytes is not None and info is not None:
        room_bytes = memory_bytes - info.size_bytes - info.kv_bytes * _context(info, context_tokens)
        fitting = [option for option in usable if option.needed_bytes <= room_bytes]
    faster = [option for option in fitting if option.speedup > 1.0]
    if not faster:
        return DraftChoice(None, _why_failed(failed) or _why_none(target, options, usable, fitting))
    best = _best(faster)
    try:
        draft = resolve(best.reference, allow_download=False)
    except EdgespecError as error:
        # The draft model has become unusable, for example because another program deleted the file or its
        # reference now matches several models.
        assert best.path is not None
        failed = {**failed, best.path: error.what}
        return choose_draft(target, memory_bytes, context_tokens, installed=installed, failed=failed)
    others = f"; it is the best of {len(faster)} draft models" if len(faster) > 1 else ""
    reason = f"it has {best.tokens}, and {best.reason}{others}"
    return DraftChoice(draft, reason, is_expected=best.source == "catalogue")


def _best(options: Sequence[DraftOption]) -> DraftOption:
    highest = max(option.speedup for option in options)
    equal = [option for option in options if option.speedup >= EQUAL_SPEEDUP_RATIO * highest]
    return min(equal, key=lambda option: (option.rank, *_order(option)))


def _preferred_choice(target: Resolved, draft: str) -> DraftChoice:
    if draft == "none":
        return DraftChoice(
            None, f"you turned off the draft model for {target.name}; to use one anyway, name it with --draft"
        )
    try:
        resolved = resolve(draft, allow_download=False)
        return DraftChoice(resolved, f"you chose {draft} for {target.name}", source="user")
    except ModelNotFoundError:
        return DraftChoice(
            None,
            f"the draft model that you chose, {draft}, is not on this machine; to download it, use --draft"
            f" {draft}",
        )


def _first_recommended(target: Resolved, failed: Mapping[Path, str]) -> DraftChoice:
    for name in _recommended(target):
        with suppress(EdgespecError):
            draft = resolve(name, allow_download=False)
            if draft.path not in failed:
                return DraftChoice(draft, f"it is recommended for {target.name}")
    return DraftChoice(None, _why_failed(failed) or _no_draft_found(target))


def _recommended(target: Resolved) -> tuple[str, ...]:
    return target.entry.drafts if target.entry else ()


def _rank(target: Resolved, entry: ModelEntry | None) -> int:
    recommended = _recommended(target)
    return recommended.index(entry.name) if entry and entry.name in recommended else len(recommended)


def _no_draft_found(target: Resolved) -> str:
    return (
        f"no draft model was found for {target.name}; to try a smaller model of the same family, name it with"
        " --draft"
    )


def _why_failed(failed: Mapping[Path, str]) -> str:
    """Return why the draft models that were tried are not used, or an empty string if none failed."""
    return "; ".join([*failed.values(), "to try another draft model, name it with --draft"]) if failed else ""


def _why_none(
    target: Resolved,
    options: Sequence[DraftOption],
    usable: Sequence[DraftOption],
    fitting: Sequence[DraftOption],
) -> str:
    if fitting:
        return (
            f"no draft model on this machine is expected to make {target.name} faster (the best one,"
            f" {fitting[0].reference}, has an expected speed-up of {fitting[0].speedup:.2f}x); to try it"
            f" anyway, use --draft {fitting[0].reference}"
        )
    if usable:
        return (
            f"the draft model {usable[0].reference} needs {format_bytes(usable[0].needed_bytes)}, which does"
            f" not fit in memory alongside {target.name}; use a larger --memory or a smaller --context"
        )
    missing = min((each for each in options if each.path is None), key=lambda each: each.rank, default=None)
    if missing and missing.rank < len(_recommended(target)):
        return (
            "the recommended draft model is not on this machine; to download it, use --draft"
            f" {missing.reference} ({format_bytes(missing.size_bytes)}, expected speed-up"
            f" {missing.speedup:.1f}x, estimated from its size)"
        )
    return _no_draft_found(target)


def _is_for_auto(option: DraftOption, target: Resolved, info: ModelInfo | None) -> bool:
    if option.path is None or not same_backend(option.format, target.format):
        return False
    if option.shared_token_fraction is None:
        return option.source == "catalogue"
    return option.shared_token_fraction >= AUTO_MIN_SHARED_FRACTION and (
        option.source == "catalogue"
        or (info is not None and info.architecture == option.architecture)
        or backend_of(option.format).knows_architecture(option.architecture)
    )


def _context(info: ModelInfo, context_tokens: int | None = None) -> int:
    return context_tokens or min(info.context_tokens or ESTIMATED_CONTEXT_TOKENS, ESTIMATED_CONTEXT_TOKENS)


def _order(option: DraftOption) -> tuple[float, int, str]:
    return (-round(option.speedup, 3), option.size_bytes, option.reference)


def _installed_option(target: Resolved, info: ModelInfo, model: InstalledModel) -> DraftOption | None:
    """Return an installed model as a draft option, or None if it is too large or its vocabulary differs."""
    if model.path == target.path or not info.pass_bytes:
        return None
    step_cost = model.info.pass_bytes / info.pass_bytes
    shared_fraction = shared_token_fraction(
        ModelVocabulary(target.path, target.format, info.vocabulary),
        ModelVocabulary(model.path, model.format, model.info.vocabulary),
    )
    if shared_fraction is None or shared_fraction < MIN_SHARED_FRACTION or step_cost > MAX_STEP_COST:
        return None
    rate = measured_acceptance_rate(target, model)
    size_ratio = min(1.0, model.info.parameters / max(1, info.parameters))
    rank = _rank(target, model.entry)
    return DraftOption(
        reference=model.reference,
        path=model.path,
        format=model.format,
        source="catalogue" if rank < len(_recommended(target)) else "tokens",
        rank=rank,
        shared_token_fraction=shared_fraction,
        parameters=model.info.parameters,
        size_bytes=model.info.size_bytes,
        needed_bytes=model.info.size_bytes + model.info.kv_bytes * _context(info),
        speedup=estimate_speedup(size_ratio, step_cost, shared_fraction, rate),
        architecture=model.info.architecture,
        acceptance_rate=rate,
    )


def _catalogue_option(target: Resolved, info: ModelInfo | None, name: str) -> DraftOption | None:
    """Return a catalogue model as a draft option, with details from its file if it is installed."""
    named = load_catalogue().find(name)
    if named is None:
        return None
    entry = named[0]
    path, size_bytes, kv_bytes, shared_fraction = None, entry.approximate_file_bytes, 0, None
    with suppress(EdgespecError):
        local = resolve(name, allow_download=False)
        path = local.path
        draft_info = model_info(path, local.format)
        size_bytes, kv_bytes = draft_info.size_bytes, draft_info.kv_bytes
        if info is not None:
            shared_fraction = shared_token_fraction(
                ModelVocabulary(target.path, target.format, info.vocabulary),
                ModelVocabulary(path, local.format, draft_info.vocabulary),
            )
    parameters, target_bytes = _sizes(target, info)
    return DraftOption(
        reference=name,
        path=path,
        format=entry.format,
        source="catalogue",
        rank=_rank(target, entry),
        shared_token_fraction=shared_fraction,
        parameters=entry.parameters,
        size_bytes=size_bytes,
        needed_bytes=size_bytes + (kv_bytes * _context(info) if info else 0),
        speedup=estimate_speedup(
            min(1.0, entry.parameters / max(1, parameters)),
            size_bytes / max(1, target_bytes),
            1.0 if shared_fraction is None else shared_fraction,
        ),
    )


def _sizes(target: Resolved, info: ModelInfo | None) -> tuple[int, int]:
    """Return the target's parameter count and size in bytes, read from its file if possible."""
    if info is not None:
        return info.parameters, info.pass_bytes
    if target.entry is not None:
        return target.entry.parameters, target.entry.approximate_file_bytes
    return 0, 0


def _same_family(target: Resolved, info: ModelInfo | None, installed: InstalledModels) -> list[str]:
    """Return the names of smaller catalogue models that share the target's vocabulary."""
    entries = load_catalogue().entries
    names = {target.entry.name} if target.entry else set()
    if info is not None and info.vocabulary:
        same = (one.entry for one in installed.models if one.info.vocabulary == info.vocabulary)
        names |= {entry.name for entry in same if entry}
    groups = [{entry.name, *entry.drafts} for entry in entries]
    while (linked := names.union(*(group for group in groups if group & names))) != names:
        names = linked
    largest = _sizes(target, info)[0] / 2
    return [
        entry.name
        for entry in entries
        if entry.name in names and entry.parameters <= largest and same_backend(entry.format, target.format)
    ]
