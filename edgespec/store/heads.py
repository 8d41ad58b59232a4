"""Find heads for a target in its files, next to them and in the catalogue, and convert them to GGUF.

Finding heads reads only metadata, and neither downloads files nor loads weights. A head is assumed
to fit the target if the sizes in their metadata match. Only resolving a reference downloads a
missing head.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from edgespec.errors import CapabilityError, EdgespecError, ModelFileError, ModelNotFoundError, OptionError
from edgespec.model.base import Head
from edgespec.model.formats.head_files import (
    drafts_in_one_pass,
    head_at,
    head_info,
    method_of,
    unknown_head,
    why_not_made_for,
)
from edgespec.model.formats.mlx_files import missing_from_head
from edgespec.model.heads.residual_layout import residual_head_method
from edgespec.model.model_facts import ModelInfo
from edgespec.model.registry import FileFormat, format_at
from edgespec.options.methods import head_kinds, head_names
from edgespec.store.catalogue import HeadEntry, ModelEntry, load_catalogue
from edgespec.store.download import HEAD, Progress, fetch
from edgespec.store.hub_files import cached_model, hub_name
from edgespec.store.installed import file_stamps, model_info_or_none, model_repository, read_model_info
from edgespec.store.prepared_builder import delete_leftovers, require_folder, write_conversion
from edgespec.store.reference import (
    Downloader,
    HubReference,
    NameReference,
    PathReference,
    Resolved,
    StoreReference,
    follow_aliases,
    resolve_path,
)
from edgespec.store.speedup_estimate import estimate_head_speedup
from edgespec.store.stored_models import EntryBudget, files_below, folders_in
from edgespec.system.files import cache_folder, format_bytes, reading_model_files

HeadSource: TypeAlias = Literal["named", "beside", "catalogue", "target"]

# Maximum number of entries to read in a model's folder while looking for heads.
_MAX_ENTRIES = 10_000
# Where a head can be found, most preferred first. A head next to the model takes precedence over one from the
# catalogue, because the user probably put it there on purpose.
_SOURCES: tuple[HeadSource, ...] = ("named", "beside", "catalogue", "target")


@dataclass(frozen=True, slots=True)
class HeadOption:
    """A head for a target.

    Attributes:
        reference: A reference to the head. Empty for a head in the target's own files.
        kind: The kind of head, such as `EAGLE-3`.
        head: The head to load, or None if it must be downloaded first.
        source: Where the head was found: `named` by the user, `beside` the target, in the `catalogue`, or in
            the files of the `target`.
        size_bytes: Size of the head's files. 0 for a head in the target's own files.
        speedup: Expected speed-up over plain decoding, estimated from the head's size. 0 if unknown.
        problem: Why edgespec cannot draft with the head. Empty if it can.
        published: The publisher's measured speed-up, for messages. Empty if unknown.
        must_be_named: Whether edgespec drafts with the head only if the user names it.
        licence: The head's licence in the catalogue, or in its files. Empty if unknown.
    """

    reference: str
    kind: str
    head: Head | None
    source: HeadSource
    size_bytes: int = 0
    speedup: float = 0.0
    problem: str = ""
    published: str = ""
    must_be_named: bool = False
    licence: str = ""

    @property
    def method(self) -> str:
        """The drafting method for this kind of head, or an empty string if there is none."""
        return method_of(self.kind)

    @property
    def is_usable(self) -> bool:
        """Whether edgespec can select the head automatically."""
        return self.head is not None and not self.problem and not self.must_be_named

    @property
    def name(self) -> str:
        """The head's display name."""
        return self.reference or f"in the model's own files ({self.kind})"

    @property
    def expectation(self) -> str:
        """Text with the head's size and expected speed-up, or an empty string if both are unknown."""
        size = format_bytes(self.size_bytes) if self.size_bytes else ""
        if not self.speedup:
            return size
        basis = "estimated from its size, not measured on this machine"
        published = f"; {self.published}" if self.published else ""
        return f"{size}, expected speed-up {self.speedup:.1f}x ({basis}{published})"


def head_options(target: Resolved) -> list[HeadOption]:
    """Return the heads for a target, most preferred first.

    Unusable heads come last, with the reason in `problem`. Heads next to the target that were made for a
    different model are left out.
    """
    info = model_info_or_none(target)
    if info is None:
        return []
    options = [
        HeadOption("", kind, Head(method_of(kind)), "target", problem=_why_not_yet(kind, target.file_format))
        for kind in info.heads
        if method_of(kind)
    ]
    published = load_catalogue().heads_for(target.entry)
    # A published head in the target's repository is also in the target's cache folder. Do not list it twice.
    downloaded = {_cached_head(entry) for entry in published}
    beside = (path for path in _sidecars(target.path) if path not in downloaded)
    options += filter(None, (_installed(path, str(path), "beside", target, info) for path in beside))
    options += [_published(entry, target, info) for entry in published]
    own_words = _words(target.path.stem) | _words(info.family)
    return sorted(options, key=lambda option: _preference(option, own_words))


def published_heads(entry: ModelEntry) -> list[HeadOption]:
    """Return the heads for a catalogue model that is not on this machine, those in its own files first."""
    own = [
        HeadOption("", kind, None, "target", problem=_why_not_yet(kind, entry.file_format))
        for kind in entry.heads
    ]
    return own + [
        _not_downloaded(head, entry.file_format, entry.approximate_file_bytes)
        for head in load_catalogue().heads_for(entry)
    ]


def named_head(found: Resolved, target: Resolved, *, convert: bool = True) -> HeadOption:
    """Return the head that the user named, after checking that it can draft for the target.

    Args:
        found: The head that the user named. If it is the target itself, the head in the target's files is
            used.
        target: The target.
        convert: Whether to convert a head in the Hugging Face layout to the target's format.

    Raises:
        ModelFileError: The files are damaged, contain a model instead of a head, or cannot be converted.
        CapabilityError: The head was made for a different target, or edgespec cannot draft with it.
    """
    info = head_info(found.path)
    kind = _kind(info)
    if not kind:
        raise unknown_head(found.name, info) if info.heads else _refused_model(found.name)
    path = None if found.path.resolve() == target.path.resolve() else found.path
    converted_from = None
    mismatch = why_not_made_for(info, read_model_info(target)) if path else ""
    problem = mismatch or _why_not_yet(kind, target.file_format)
    if not problem and path and not _is_readable(kind, path, target):
        if not _is_convertible(kind, path, target):
            problem = _unreadable(target)
        elif convert:
            converted_from, path = path, _convert_once(path, target.path)
    if problem:
        made_for = "was made for another model" if mismatch else f"does not work with {target.name}"
        raise CapabilityError(
            f"the draft head {found.name} {made_for}: {problem}",
            f"{_other_head(found, target)}, or use --head none",
            code="head_mismatch",
        )
    head = Head(method_of(kind), path, converted_from)
    return HeadOption(found.name, kind, head, "named", info.size_bytes if path else 0)


def _other_head(refused: Resolved, target: Resolved) -> str:
    """Suggest a head from the catalogue for the target, or explain how to list heads."""
    for entry in load_catalogue().heads_for(target.entry):
        if entry.name != refused.name and not _why_not_yet(entry.kind, target.file_format):
            return f"use --head {entry.name}, which was made for {target.name}"
    return f"choose another draft head (`edgespec models show {target.name}` lists them)"


def _sidecars(target: Path) -> Iterator[Path]:
    """Yield files and folders with head-like names in a model's folder, next to it or in its repository."""
    names = "|".join({*head_names(), *head_kinds()})
    is_sidecar = re.compile(rf"(?:{names})\d?(?:[-_.]|$)", re.IGNORECASE).match
    folders = (target, target.parent) if target.is_dir() else (target.parent, model_repository(target))
    for folder in filter(None, dict.fromkeys(folders)):
        files = files_below(folder, 0, EntryBudget(_MAX_ENTRIES))
        yield from (path for path in files if path.suffix == ".gguf" and is_sidecar(path.name))
        inner = folders_in(folder, EntryBudget(_MAX_ENTRIES))
        yield from (path for path in inner if path != target and is_sidecar(path.name))


def _installed(
    path: Path, reference: str, source: HeadSource, target: Resolved, target_info: ModelInfo
) -> HeadOption | None:
    """Return the head at a path, or None if it is damaged, not a head, or made for a different target."""
    try:
        info = head_info(path)
    except EdgespecError:
        return None
    kind = _kind(info)
    if not kind or why_not_made_for(info, target_info):
        return None
    head, problem = Head(method_of(kind), path), _why_not_yet(kind, target.file_format)
    if not problem and not _is_readable(kind, path, target):
        problem = _unreadable(target)
        if _is_convertible(kind, path, target):
            problem = f"it must first be converted to GGUF; --head {shlex.quote(reference)} does this"
            with suppress(EdgespecError):
                if (converted := _converted_path(path, target.path)).exists():
                    head, problem = Head(method_of(kind), converted, path), ""
    speedup = _speedup(kind, info.size_bytes, target_info.pass_bytes)
    return HeadOption(reference, kind, head, source, info.size_bytes, speedup, problem, licence=info.licence)


def _published(entry: HeadEntry, target: Resolved, target_info: ModelInfo) -> HeadOption:
    """Return a head from the catalogue, with details from its files if it is on this machine."""
    path = _cached_head(entry)
    option = _installed(path, entry.name, "catalogue", target, target_info) if path else None
    if option is None:
        return _not_downloaded(entry, target.file_format, target_info.pass_bytes)
    # The demo must start quickly and has its own draft model, so do not select its head automatically.
    return replace(
        option,
        published=_published_speedup(entry),
        must_be_named=bool(entry.embedded_file),
        licence=entry.licence or option.licence,
    )


def _not_downloaded(entry: HeadEntry, form: FileFormat, target_bytes: int) -> HeadOption:
    size = entry.approximate_file_bytes
    return HeadOption(
        entry.name,
        entry.kind,
        None,
        "catalogue",
        size,
        _speedup(entry.kind, size, target_bytes),
        _why_not_yet(entry.kind, form),
        _published_speedup(entry),
        licence=entry.licence,
    )


def _published_speedup(entry: HeadEntry) -> str:
    if not entry.published_speedup:
        return ""
    return f"its publisher measured {entry.published_speedup:.1f}x on {entry.published_on}"


def _kind(info: ModelInfo) -> str:
    """Return the kind of head in the files, such as `EAGLE-3`, or an empty string if it is unknown."""
    return next(filter(method_of, info.heads), "")


def _speedup(kind: str, head_bytes: int, target_bytes: int) -> float:
    if not target_bytes:
        return 0.0
    return estimate_head_speedup(head_bytes / target_bytes, one_pass=drafts_in_one_pass(kind))


def _why_not_yet(kind: str, form: FileFormat) -> str:
    """Return why this kind of head is not supported for targets in this format, or an empty string."""
    method = method_of(kind)
    if method in form.heads:
        return ""
    where = f" with {form.label} models" if method in head_names() else ""
    return f"edgespec does not support {kind} heads{where} yet"


def _is_readable(kind: str, path: Path, target: Resolved) -> bool:
    """Return whether the target's backend can read the head's files."""
    form = target.file_format
    support = form.heads[method_of(kind)]
    return (path.is_dir() and kind in support.unconverted) or format_at(path).name in support.formats


def _is_convertible(kind: str, path: Path, target: Resolved) -> bool:
    """Return whether edgespec can convert the head to the target's format."""
    return path.is_dir() and method_of(kind) in target.file_format.converted_heads


def _unreadable(target: Resolved) -> str:
    return f"its file format does not work with {target.file_format.label} models"


def _preference(option: HeadOption, own_words: set[str]) -> tuple[bool, int, int, int, int, str]:
    """Return a sort key that puts preferred heads first.

    Args:
        option: The head.
        own_words: Words in the target's names. Heads whose names share more of these words come first.
    """
    heads = head_names()
    return (
        not option.is_usable,
        _SOURCES.index(option.source),
        heads.index(option.method) if option.method in heads else len(heads),
        -len(_words(option.reference) & own_words),
        option.size_bytes,
        option.reference,
    )


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|[\d.]+", Path(name).name.lower()))


def resolve_head(
    reference: str, *, allow_download: bool = True, progress: Progress | None = None
) -> Resolved:
    """Return the head that a reference names: a path, `user/repo[:file]`, or a name from the catalogue.

    Args:
        reference: The reference that the user typed.
        allow_download: Whether to download the head if it is not on this machine.
        progress: Called during a download. Returning False cancels it.

    Raises:
        ModelNotFoundError: No head matches the reference.
        ModelFileError: The file or folder cannot be read, or the reference names a model instead.
        DownloadError: The download failed.
        CancelledError: `progress` returned False.
    """
    download = partial(fetch, allow_download=allow_download, progress=progress, content=HEAD)
    return resolve_head_with(reference, download)


def resolve_head_with(reference: str, download: Downloader) -> Resolved:
    """Resolve a reference to a head, calling `download` if the head is not on this machine."""
    typed, catalogue = reference.strip(), load_catalogue()
    match parsed := follow_aliases(typed):
        case PathReference(path):
            return _resolve_head_path(path)
        case StoreReference():
            raise _refused_model(typed)
        case HubReference(repository, quantisation):
            is_file = (quantisation or "").lower().endswith(".gguf")
            if catalogue.of_repository(repository) and not is_file:
                raise _refused_model(typed)
            return _resolve_hub(typed, repository, quantisation, download)
        case NameReference():
            name = parsed.full_name
            if head := catalogue.find_head(name):
                if head.embedded_path is not None:
                    note = f"{typed} -> built in: {head.embedded_path}"
                    found = _resolve_head_path(head.embedded_path)
                    return replace(found, name=head.name, source="embedded", note=note)
                return _resolve_hub(typed, head.repository, head.gguf_file or None, download)
            if Path(name).exists():
                return _resolve_head_path(Path(name))
            if catalogue.find(name):
                raise _refused_model(typed)
            nearest = difflib.get_close_matches(name.lower(), [head.name for head in catalogue.heads], n=3)
            raise ModelNotFoundError(
                f"there is no draft head named {name}",
                (f"did you mean {' or '.join(nearest)}? " if nearest else "")
                + "`edgespec models show TARGET` lists the heads for a model; a path or user/repo also works",
                code="head_not_found",
            )


def _resolve_head_path(path: Path) -> Resolved:
    """Return the head at a path. For Medusa and Hydra heads, the path may be that of the weight file."""
    is_weights = path.is_file() and residual_head_method(path) is not None
    return resolve_path(path.parent if is_weights else path, missing_from_head)


def _resolve_hub(typed: str, repository: str, quantisation: str | None, download: Downloader) -> Resolved:
    path = cached_model(repository, quantisation, missing_from_head) or download(repository, quantisation)
    note = f"{typed} -> hf:{hub_name(repository, quantisation)}: {path}"
    return Resolved(typed, path, "hub", None, note, format_at(path).name)


def _refused_model(name: str) -> ModelFileError:
    """Return the error to raise if the user passed a model as a head."""
    return ModelFileError(
        f"{name} is a model, not a draft head",
        f"pass draft models with --draft, for example --draft {name}",
        code="wrong_file",
    )


def _cached_head(head: HeadEntry) -> Path | None:
    """Return the local path of a head from the catalogue, or None if it must be downloaded."""
    return head.embedded_path or cached_model(head.repository, head.gguf_file or None, missing_from_head)


def _converted_path(folder: Path, target: Path) -> Path:
    """Return the cache path for a head's GGUF version, whether or not the file exists.

    The path depends on the size and modification time of the head's files, so that a changed head is
    converted again. Raises ModelFileError if the folder cannot be read.
    """
    with reading_model_files(folder):
        stamps = file_stamps(format_at(folder).files(folder))
    key = f"{folder.resolve()} {stamps} {_layer_count(target)}"
    return (
        cache_folder()
        / "heads"
        / f"{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}.gguf"
    )


def needs_conversion(folder: Path, target: Path) -> bool:
    """Return whether a head must be converted for a target. Raises ModelFileError if the head is damaged."""
    return head_at(folder).method in format_at(target).converted_heads


def _convert_once(folder: Path, target: Path) -> Path:
    """Return a head's GGUF version, converting it on first use. Raises the same errors as `prepare_head`."""
    path = _converted_path(folder, target)
    if not path.exists():
        delete_leftovers(path.parent)
        prepare_head(folder, target, path, setting="EDGESPEC_CACHE_DIR")
    return path


def prepare_head(folder: Path, target: Path, output: Path, *, setting: str = "--to") -> int:
    """Convert a published head, such as EAGLE-3, to a GGUF file.

    Args:
        folder: Folder of the head, as published on Hugging Face.
        target: The GGUF model that the head was trained for.
        output: The file to write. An existing file is replaced once the new one is complete.
        setting: The option or environment variable that determines the output folder, for error messages.

    Returns:
        The size of the new file in bytes.

    Raises:
        ModelNotFoundError: The folder does not exist.
        ModelFileError: The folder contains no head that can be converted.
        OptionError: The target is not a GGUF model.
        EdgespecError: The file cannot be written.
    """
    file_format = format_at(target)
    if not file_format.converted_heads:
        raise OptionError(
            f"{target} is not a GGUF model",
            "pass the GGUF model that the draft head was trained for",
            code="wrong_file",
        )
    require_folder(folder)
    support = file_format.heads.get(head_at(folder).method)
    if support is None or support.convert is None:
        raise ModelFileError(
            f"the draft head in {folder} does not need to be converted, because edgespec can use it as it is",
            f"use the folder itself: --head {shlex.quote(str(folder))}",
            code="wrong_file",
        )
    write = partial(support.convert, folder, _layer_count(target))
    return write_conversion(output, f"the draft head {folder}", write, setting=setting)


def _layer_count(target: Path) -> int:
    return format_at(target).read_info(target).layers
