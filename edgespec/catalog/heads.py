"""Find the heads that can draft for a target, and choose the ones to use.

Heads are looked for in the target's own files, beside them, and in the catalogue. Nothing is downloaded or
loaded: whether a head was made for the target is judged by the sizes in their metadata.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from edgespec.backends.base import Head
from edgespec.backends.head_files import drafts_in_one_pass, method_of, why_not_made_for
from edgespec.backends.model_info import ModelInfo
from edgespec.backends.registry import FileFormat, format_at, same_backend
from edgespec.catalog.catalogue import HeadEntry, ModelEntry, load_catalogue
from edgespec.catalog.head_reference import cached_head, refused_model
from edgespec.catalog.installed import model_info_or_none
from edgespec.catalog.metadata_cache import MetadataCache
from edgespec.catalog.reference import Resolved
from edgespec.catalog.speedup_estimate import estimate_head_speedup
from edgespec.catalog.stored_models import EntryBudget, files_below, folders_in
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.files import format_bytes
from edgespec.method_names import HEADS
from edgespec.prepare.head import convert_once, converted_path

__all__ = [
    "HeadOption",
    "choose_heads",
    "describe_choice",
    "head_options",
    "named_head",
    "published_heads",
]

Source: TypeAlias = Literal["named", "beside", "catalogue", "target"]

# Names of files and folders beside a model that are looked at as heads.
_SIDECAR = re.compile(r"^(?:mtp|eagle\d?|dflash|dspark|medusa|hydra)(?:[-_.]|$)", re.IGNORECASE)
# Maximum number of entries of a model's folder to read while looking for heads.
_MAX_ENTRIES = 10_000
# Where heads are taken from first. A head that someone put beside the model was put there to be used.
_SOURCES: tuple[Source, ...] = ("named", "beside", "catalogue", "target")


@dataclass(frozen=True, slots=True)
class HeadOption:
    """A head for a target.

    Attributes:
        reference: A reference to the head. Empty for a head in the target's own files.
        kind: What kind of head it is, such as `EAGLE-3`.
        head: The head to load. None if it is not on this machine.
        source: Where it was found: `named` by the user, `beside` the target, in the `catalogue`, or in the
            files of the `target`.
        size_bytes: Size of its files. 0 for a head in the target's own files.
        speedup: Expected speed-up over plain decoding, estimated from its size. 0 if unknown.
        problem: Why edgespec cannot draft with it. Empty if it can.
        published: The speed-up that its publisher measured, as text for messages. Empty if there is none.
        fits: Whether its metadata match the target's, as far as they are known.
    """

    reference: str
    kind: str
    head: Head | None
    source: Source
    size_bytes: int
    speedup: float = 0.0
    problem: str = ""
    published: str = ""
    fits: bool = True

    @property
    def method(self) -> str:
        """The method that drafts with the head. Empty if there is none."""
        return method_of(self.kind)

    @property
    def is_usable(self) -> bool:
        """Whether edgespec can draft with the head now."""
        return self.head is not None and not self.problem

    @property
    def name(self) -> str:
        """The head's name for messages."""
        return self.reference or f"in the model's own files ({self.kind})"

    @property
    def expectation(self) -> str:
        """The size and the expected speed-up, as text for messages. Empty if both are unknown."""
        size = format_bytes(self.size_bytes) if self.size_bytes else ""
        if not self.speedup:
            return size
        basis = "estimated from its size, not measured on this machine"
        published = f"; {self.published}" if self.published else ""
        return f"{size}, expected speed-up {self.speedup:.1f}x ({basis}{published})"


def head_options(target: Resolved, metadata: MetadataCache) -> list[HeadOption]:
    """Return the heads that could draft for a target, the ones to prefer first.

    Heads that edgespec cannot use come last, with the reason. Heads beside the target that were made for
    another model are left out.
    """
    info = model_info_or_none(target, metadata)
    if info is None:
        return []
    own = [HeadOption("", kind, Head(method_of(kind)), "target", 0) for kind in info.heads if method_of(kind)]
    options = [_checked(option, target, info, None) for option in own]
    for path in _sidecars(target.path):
        option = _installed(path, str(path), "beside", target, info, metadata)
        if option and option.fits:
            options.append(option)
    published = load_catalogue().heads_for(target.entry)
    options += [_published(entry, target, info, metadata) for entry in published]
    metadata.save()
    return sorted(options, key=lambda option: _preference(option, target, info))


def published_heads(entry: ModelEntry) -> list[HeadOption]:
    """Return the published heads for a catalogue model that is not on this machine."""
    return [
        _not_downloaded(head, entry.file_format, entry.approximate_file_bytes)
        for head in load_catalogue().heads_for(entry)
    ]


def named_head(
    found: Resolved, target: Resolved, metadata: MetadataCache, *, convert: bool = True
) -> HeadOption:
    """Return the head that the user named, after checking that it can draft for the target.

    Args:
        found: The head.
        target: The target.
        metadata: Used to read the metadata of both.
        convert: Whether to convert a head in the layout of Hugging Face to the target's format.

    Raises:
        ModelFileError: The files are damaged, or contain a model instead of a head.
        CapabilityError: The head was made for another target, or edgespec cannot draft with it.
    """
    target_info = metadata.model_info(target.path, target.format)
    info = metadata.model_info(found.path, found.format)
    kind = next(filter(method_of, info.heads), "")
    if not kind:
        raise refused_model(found.name)
    metadata.save()
    is_own = found.path.resolve() == target.path.resolve()
    head = Head(method_of(kind), None if is_own else found.path)
    option = HeadOption(found.name, kind, head, "named", 0 if is_own else info.size_bytes)
    convertible = not is_own and _is_convertible(found.path, target)
    checked = _checked(option, target, target_info, info, will_convert=convertible)
    if checked.problem:
        raise CapabilityError(
            f"the head {found.name} cannot draft for {target.name}: {checked.problem}",
            "choose another head (`edgespec models show` lists them), or use --head none",
        )
    if convertible and convert:
        return replace(checked, head=Head(head.method, convert_once(found.path, target.path)))
    return checked


def choose_heads(
    options: Sequence[HeadOption], named_methods: Collection[str], automatic: bool
) -> tuple[HeadOption, ...]:
    """Return the heads to load: one for each method that the user named, and the best one for `auto`.

    Args:
        options: The heads for the target, the ones to prefer first.
        named_methods: The methods that the user named.
        automatic: Whether `auto` can be used.
    """
    usable = [option for option in options if option.is_usable]
    chosen = {option.method: option for option in reversed(usable) if option.method in named_methods}
    if automatic and usable:
        chosen.setdefault(usable[0].method, usable[0])
    return tuple(chosen[method] for method in HEADS if method in chosen)


def describe_choice(chosen: Sequence[HeadOption], options: Sequence[HeadOption]) -> str:
    """Return a line that tells the user which heads were found and chosen, or an empty string."""
    if not chosen:
        blocked = next((each for each in options if each.source == "beside" and each.problem), None)
        return f"not drafting with the head {blocked.name}: {blocked.problem}" if blocked else ""
    names = " and ".join(option.name for option in chosen)
    others = [option.name for option in options if option.is_usable and option not in chosen]
    if not others:
        return f"drafting with the head {names}"
    count = f"{len(others)} other heads fit" if len(others) > 1 else "another head fits"
    return f"drafting with the head {names}; {count}: {', '.join(others)} (choose with --head)"


def _sidecars(target: Path) -> Iterator[Path]:
    """Yield the files and folders beside a model, or in its folder, that are named like heads."""
    for folder in (target, target.parent) if target.is_dir() else (target.parent,):
        files = files_below(folder, 0, EntryBudget(_MAX_ENTRIES))
        yield from (path for path in files if path.suffix == ".gguf" and _SIDECAR.match(path.name))
        folders = folders_in(folder, EntryBudget(_MAX_ENTRIES))
        yield from (path for path in folders if path != target and _SIDECAR.match(path.name))


def _installed(
    path: Path, reference: str, source: Source, target: Resolved, info: ModelInfo, metadata: MetadataCache
) -> HeadOption | None:
    """Return the head at a path, or None if there is no head or its files are damaged."""
    try:
        head_info = metadata.model_info(path, format_at(path).name)
    except EdgespecError:
        return None
    kind = next(filter(method_of, head_info.heads), "")
    if not kind:
        return None
    head = Head(method_of(kind), _converted(path, target) or path)
    option = HeadOption(
        reference,
        kind,
        head,
        source,
        head_info.size_bytes,
        _speedup(kind, head_info.size_bytes, info.pass_bytes),
    )
    return _checked(option, target, info, head_info)


def _published(entry: HeadEntry, target: Resolved, info: ModelInfo, metadata: MetadataCache) -> HeadOption:
    """Return a head of the catalogue, with details from its files if it is on this machine."""
    path = cached_head(entry)
    option = _installed(path, entry.name, "catalogue", target, info, metadata) if path else None
    if option is None:
        return _not_downloaded(entry, target.file_format, info.pass_bytes)
    return replace(option, published=_published_speedup(entry))


def _not_downloaded(entry: HeadEntry, form: FileFormat, target_bytes: int) -> HeadOption:
    return HeadOption(
        entry.name,
        entry.kind,
        None,
        "catalogue",
        entry.approximate_file_bytes,
        _speedup(entry.kind, entry.approximate_file_bytes, target_bytes),
        entry.problem or _why_not_yet(entry.kind, form),
        _published_speedup(entry),
    )


def _published_speedup(entry: HeadEntry) -> str:
    if not entry.published_speedup:
        return ""
    return f"its publisher measured {entry.published_speedup:.1f}x on {entry.published_on}"


def _speedup(kind: str, head_bytes: int, target_bytes: int) -> float:
    if not target_bytes:
        return 0.0
    return estimate_head_speedup(head_bytes / target_bytes, one_pass=drafts_in_one_pass(kind))


def _checked(
    option: HeadOption,
    target: Resolved,
    info: ModelInfo,
    head: ModelInfo | None,
    *,
    will_convert: bool = False,
) -> HeadOption:
    """Return the option with the reason why edgespec cannot draft with the head, if there is one.

    Args:
        option: The head.
        target: The target.
        info: The target's metadata.
        head: The head's metadata, or None if they are not known.
        will_convert: Whether the head will be converted to the target's format.
    """
    mismatch = why_not_made_for(head, info) if head else ""
    if mismatch:
        return replace(option, fits=False, problem=f"it was made for another model: {mismatch}")
    problem = _why_not_yet(option.kind, target.file_format)
    return replace(option, problem=problem or ("" if will_convert else _why_unreadable(option, target)))


def _why_not_yet(kind: str, form: FileFormat) -> str:
    """Return why edgespec cannot draft with a kind of head for a target, judging by the target's format."""
    if method_of(kind) not in HEADS:
        return f"edgespec does not support {kind} heads yet"
    if method_of(kind) not in form.head_methods:
        return f"edgespec does not support {kind} heads with this model's format ({form.label}) yet"
    return ""


def _why_unreadable(option: HeadOption, target: Resolved) -> str:
    """Return why the target's backend cannot read the head's files, or an empty string."""
    path = option.head.path if option.head else None
    if path is None or same_backend(format_at(path).name, target.format):
        return ""
    if _is_convertible(path, target):
        return f"it has not been converted to GGUF yet; --head {shlex.quote(option.reference)} converts it"
    return f"its files are in a format that does not work with {target.file_format.label}"


def _is_convertible(path: Path, target: Resolved) -> bool:
    """Return whether edgespec can convert a head to the format of the target."""
    return path.is_dir() and "head" in target.file_format.preparations


def _converted(path: Path, target: Resolved) -> Path | None:
    """Return the GGUF version of a head that was converted before, or None."""
    if not _is_convertible(path, target):
        return None
    with suppress(EdgespecError):
        converted = converted_path(path, target.path)
        return converted if converted.exists() else None
    return None


def _preference(
    option: HeadOption, target: Resolved, info: ModelInfo
) -> tuple[bool, int, int, int, int, str]:
    """Return the sort key of a head: smaller for the ones to prefer."""
    shared = _words(option.reference) & (_words(target.path.stem) | _words(info.family))
    return (
        not option.is_usable,
        _SOURCES.index(option.source),
        HEADS.index(option.method) if option.method in HEADS else len(HEADS),
        -len(shared),
        option.size_bytes,
        option.reference,
    )


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|[\d.]+", Path(name).name.lower()))
