"""Parse model references, and resolve them to files and folders, downloading missing models.

A reference is a path, a Hugging Face repository, an Ollama or LM Studio model, or a name.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from edgespec.errors import CancelledError, EdgespecError, ModelFileError, ModelNotFoundError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.registry import Backend, FileFormat, backend_of, format_at, format_of, is_registered
from edgespec.store.catalogue import (
    LATEST,
    ModelEntry,
    ModelFormat,
    load_catalogue,
    user_aliases,
    user_aliases_path,
)
from edgespec.store.download import Progress, fetch
from edgespec.store.hub_files import cached_model, hub_name, is_quantisation
from edgespec.store.lmstudio import lmstudio_file, lmstudio_model, lmstudio_models
from edgespec.store.ollama import ollama_model, ollama_models
from edgespec.store.prepared_builder import find_quantised, prepare_quantised
from edgespec.store.prepared_files import (
    MANIFEST,
    PreparedModel,
    check_prepared,
    find_prepared,
    read_prepared,
)
from edgespec.store.stored_models import Store, StoredModel
from edgespec.system.installation import setup_command

Source = Literal["path"] | Store


Downloader: TypeAlias = Callable[[str, str | None], Path]
"""Returns the path of a model, given its repository and quantisation, downloading it if necessary."""


@dataclass(frozen=True)
class Resolved:
    """A model on this machine.

    Attributes:
        name: The reference that the user typed.
        path: A GGUF file (the first part of a split model), the folder of an MLX model, or a folder created
            by `edgespec prepare layerskip`.
        source: Where the model was found: `path`, `embedded` (part of edgespec or installed with it), `hub`
            (the Hugging Face cache), `ollama` or `lmstudio`.
        entry: The model's entry in the catalogue, if it has one.
        note: A line for the user on how the reference was resolved.
        format: Name of the model's file format.
        adapters: Adapters that are part of the model, as in some Ollama models.
        unused: Names of the model's parts that edgespec does not use, such as Ollama's `template`.
        sampling: Sampling settings that another program stores with the model, keyed by edgespec's names.
        projector: The projector (mmproj file) that Ollama stores with the model, or None.
    """

    name: str
    path: Path
    source: Source
    entry: ModelEntry | None
    note: str
    format: ModelFormat = "gguf"
    adapters: tuple[Path, ...] = ()
    unused: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    projector: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The model's path and its adapters' paths, which together identify the model."""
        return (self.path, *self.adapters)

    @property
    def backend(self) -> Backend:
        """The backend that runs this model."""
        return backend_of(self.format)

    @property
    def file_format(self) -> FileFormat:
        """The model's file format, as registered by its backend."""
        return format_of(self.format)


def resolve(reference: str, *, allow_download: bool = True, progress: Progress | None = None) -> Resolved:
    """Return the model that a reference names.

    Models on this machine take precedence, in this order: built-in models, the Hugging Face cache, LM Studio
    and Ollama.

    Args:
        reference: The reference that the user typed.
        allow_download: Whether to download the model if it is not on this machine.
        progress: Called during a download. Returning False cancels it.

    Raises:
        ModelNotFoundError: No model or several models match the reference.
        ModelFileError: The file or folder cannot be read, or is not a model.
        DownloadError: The download failed.
        CancelledError: `progress` returned False.
        BackendMissingError: The model is not on this machine, and no installed backend could run it.
    """
    download = partial(fetch, allow_download=allow_download, progress=progress)
    return resolve_with(reference, download, progress, prepare=allow_download)


def resolve_with(
    reference: str, download: Downloader, progress: Progress | None = None, *, prepare: bool = True
) -> Resolved:
    """Return the model that a reference names, calling `download` if it is not on this machine.

    If `prepare` is set, a model from a Python package is first copied to its default quantisation.
    """
    typed = reference.strip()
    match parsed := follow_aliases(typed):
        case PathReference(path):
            stored = _find_by_missing_path(path)
            return _resolve_stored(typed, stored) if stored else resolve_path(path)
        case StoreReference(store, name):
            return _resolve_stored(typed, _find_in_store(store, name))
        case HubReference():
            _refuse_local_name(parsed)
            return _resolve_hub(typed, parsed, download)
        case NameReference():
            return _resolve_name(typed, parsed, download, progress, prepare=prepare)


def follow_aliases(typed: str) -> Reference:
    """Parse a reference. If it is a user alias, return the reference that the alias refers to."""
    text, seen = typed, [typed.lower()]
    while True:
        reference = parse_reference(text)
        aliases = user_aliases() if isinstance(reference, NameReference) else {}
        alias = aliases.get(text.lower()) or aliases.get(text.lower().removesuffix(LATEST))
        if alias is None:
            return reference
        text = alias.strip()
        if text.lower() in seen:
            raise ModelNotFoundError(
                f"the alias {typed} refers to itself ({' -> '.join([*seen, text])})",
                f"correct the alias in {user_aliases_path()}",
                code="alias_invalid",
            )
        seen.append(text.lower())


def _resolve_name(
    typed: str, reference: NameReference, download: Downloader, progress: Progress | None, *, prepare: bool
) -> Resolved:
    catalogue, full_name = load_catalogue(), reference.full_name
    named = catalogue.find(full_name)
    stored = ollama_model(reference.name, reference.tag) if reference.tag or not named else None
    if stored and stored.path:
        return _resolve_stored(typed, stored, named[0] if named else None)
    if named is None and reference.tag and is_quantisation(reference.tag):
        base = catalogue.find(reference.name)
        named = (base[0], reference.tag) if base else None
    if named:
        entry, quantisation = named
        if entry.package:
            return _resolve_packaged(typed, entry, quantisation, progress, prepare=prepare)
        return _resolve_entry(typed, entry, quantisation, download)
    if os.path.exists(full_name):
        return resolve_path(Path(full_name))
    if stored:
        # This always raises an error, because the model is unusable.
        return _resolve_stored(typed, stored)
    _refuse_head(full_name)
    nearest = catalogue.nearest(full_name, [*user_aliases(), *_usable_names(ollama_models())])
    raise ModelNotFoundError(
        f"there is no model named {full_name}",
        (f"did you mean {' or '.join(nearest)}? " if nearest else "")
        + "`edgespec models list` shows the models",
    )


def _resolve_entry(typed: str, entry: ModelEntry, quantisation: str, download: Downloader) -> Resolved:
    several = entry.file_format.one_file_per_quantisation
    only_one = entry.embedded_path is not None or not several
    if only_one and quantisation.upper() != entry.quantisation.upper():
        in_gguf = entry.name.removesuffix("-mlx")
        other = f", or use its GGUF version {in_gguf}:{quantisation}" if entry.repository else ""
        raise ModelNotFoundError(
            f"{entry.name} is available only as {entry.quantisation}, not as {quantisation}",
            f"omit the quantisation (use {entry.name}){other}",
            code="quantisation_unavailable",
        )
    if entry.embedded_path is not None:
        path = resolve_path(entry.embedded_path).path
        return Resolved(typed, path, "embedded", entry, f"{typed} -> built in: {path}", entry.format)
    reference = HubReference(entry.repository, quantisation if several else None, explicit=True)
    return _resolve_hub(typed, reference, download)


def _resolve_packaged(
    typed: str, entry: ModelEntry, quantisation: str, progress: Progress | None, *, prepare: bool
) -> Resolved:
    """Return a model from a Python package, or its copy in the default quantisation.

    If the copy cannot be made, for example because the disk is full, return the model itself.
    """
    if entry.embedded_path is None:
        raise ModelNotFoundError(
            f"{entry.name} is not installed", f"run {setup_command()}, or use the built-in model `demo`"
        )
    original = resolve_path(entry.embedded_path).path
    is_packaged_type = quantisation.upper() == entry.packaged_quantisation.upper()
    if not is_packaged_type and quantisation.upper() != entry.quantisation.upper():
        raise ModelNotFoundError(
            f"{entry.name} is available only as {entry.quantisation} and {entry.packaged_quantisation},"
            f" not as {quantisation}",
            f"omit the quantisation: use {entry.name}",
            code="quantisation_unavailable",
        )
    copy, problem = None, ""
    if not is_packaged_type:
        copy = find_quantised(original, entry.quantisation)
        if copy is None and prepare:
            try:
                copy = prepare_quantised(original, entry.quantisation, progress)
            except CancelledError:
                raise
            except EdgespecError as error:
                problem = f" (a {entry.quantisation} copy could not be created: {error.what})"
    path = copy or original
    return Resolved(typed, path, "embedded", entry, f"{typed} -> installed: {path}{problem}", entry.format)


def _resolve_hub(typed: str, reference: HubReference, download: Downloader) -> Resolved:
    repository, quantisation = reference.repository, reference.quantisation
    _refuse_head(repository)
    entry = load_catalogue().of_repository(repository)
    cached = cached_model(repository, quantisation)
    stored = []
    if cached is None or not reference.explicit:
        stored = _find_in_other_programs(repository, quantisation, hub_only=reference.explicit)
    paths = {f"hf:{repository}": cached} if cached else {}
    paths |= {one.names[-1]: one.path for one in stored if one.path}
    if not _are_same_size(paths.values()):
        raise ModelNotFoundError(
            f"{typed} matches {len(paths)} different models on this machine: {', '.join(paths)}",
            "use one of these names",
            code="ambiguous",
        )
    if cached is None and stored:
        return _resolve_stored(typed, stored[0], entry)
    path = cached or download(repository, quantisation)
    note = f"{typed} -> hf:{hub_name(repository, quantisation)}: {path}"
    return Resolved(typed, path, "hub", entry, note, format_at(path).name)


def _resolve_stored(typed: str, stored: StoredModel, entry: ModelEntry | None = None) -> Resolved:
    """Return a model found in Ollama or LM Studio. Raises ModelFileError if it is unusable."""
    program = "Ollama" if stored.store == "ollama" else "LM Studio"
    if stored.path is None:
        raise ModelFileError(
            f"{program}'s {stored.names[0]} cannot be used: {stored.problem}",
            "choose another model",
            code="model_file_not_supported",
        )
    note = f"{typed} -> {program}'s {stored.names[0]}: {stored.path}"
    return Resolved(
        typed,
        stored.path,
        stored.store,
        entry,
        note,
        stored.format,
        stored.adapters,
        stored.unused,
        stored.sampling,
        stored.projector,
    )


def _find_in_store(store: Literal["ollama", "lmstudio"], name: str) -> StoredModel:
    """Return the model named `name` in Ollama or LM Studio.

    Raises:
        ModelNotFoundError: There is no such model. The hint lists similar names.
    """
    if store == "ollama":
        program, model, stored = "Ollama", ollama_model(*_split(name)), ollama_models
    else:
        model = lmstudio_file(name) or lmstudio_model(*_split(name))
        program, stored = "LM Studio", lmstudio_models
    if model:
        return model
    names = _usable_names(stored())
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.4) or names[:2]
    raise ModelNotFoundError(
        f"{program} has no model {name} on this machine",
        f"its models include {' and '.join(near)}"
        if near
        else "`edgespec models list` shows the models on this machine",
    )


def _find_by_missing_path(path: Path) -> StoredModel | None:
    """Return the LM Studio or Ollama model whose name is `path`, unless a file with this path exists.

    LM Studio names can look like publisher/repo/file.gguf, and Ollama names like registry/owner/name:tag.
    """
    text = path.as_posix()
    if path.is_absolute() or text.count("/") < 2 or text.startswith(("./", "../", "~")):
        return None
    with suppress(OSError, ValueError):
        if path.exists() or path.is_symlink():
            return None
    return lmstudio_file(text) if text.lower().endswith(".gguf") else ollama_model(*_split(text))


def _find_in_other_programs(
    repository: str, quantisation: str | None, *, hub_only: bool = False
) -> list[StoredModel]:
    """Return the usable models that LM Studio and Ollama downloaded from a Hugging Face repository.

    If `hub_only` is set, models named `user/repo` from Ollama's own registry, which is a separate namespace,
    are ignored.
    """
    registries = ["hf.co", "huggingface.co", *([] if hub_only else ["registry.ollama.ai"])]
    stored = [ollama_model(f"{registry}/{repository}", quantisation) for registry in registries]
    return [one for one in (lmstudio_model(repository, quantisation), *stored) if one and one.path]


def _are_same_size(paths: Iterable[Path]) -> bool:
    """Return whether all models have exactly the same size, and are therefore probably copies."""
    return len({_size(path) for path in paths}) <= 1


def installed_names() -> list[str]:
    """Return the shortest name of each usable model in Ollama and LM Studio."""
    return [*_usable_names(ollama_models()), *_usable_names(lmstudio_models())]


def _usable_names(models: Iterable[StoredModel]) -> list[str]:
    return [one.names[0] for one in models if one.path]


def _split(name: str) -> tuple[str, str | None]:
    base, colon, tag = name.rpartition(":")
    return (base, tag) if colon and "/" not in tag else (name, None)


def _size(path: Path) -> int:
    try:
        files = list(path.glob("*.safetensors")) if path.is_dir() else gguf_files(path)
        return sum(file.stat().st_size for file in files)
    except (OSError, ModelFileError):
        return -1


def refused_head(name: str, target: str = "TARGET") -> ModelFileError:
    """Return the error to raise if a head was passed as a model. `target` is the model that it drafts for."""
    return ModelFileError(
        f"{name} is a draft head, which proposes tokens for one model and cannot run on its own",
        f"load its model with --target {target}, and the head with --head {name}",
        code="wrong_file",
    )


def _refuse_local_name(reference: HubReference) -> None:
    """Raise ModelNotFoundError if the reference is a GGUF file's path without the suffix."""
    file = Path(f"{reference.repository}.gguf")
    if not reference.explicit and file.is_file():
        raise ModelNotFoundError(
            f"there is no file {reference.repository}",
            f"did you mean {file}? For the repository on Hugging Face, write hf:{reference.repository}",
        )


def _refuse_head(name: str) -> None:
    """Raise ModelFileError if the catalogue lists a head with this name or in this repository."""
    if head := load_catalogue().find_head(name):
        raise refused_head(name, head.targets[0])


def resolve_path(path: Path, missing_from_folder: Callable[[Path], list[str]] | None = None) -> Resolved:
    """Return the model or head at a path, after checking that the file is readable or the folder complete.

    Args:
        path: The file or folder.
        missing_from_folder: Returns the names of files missing from a folder. By default, checks for a
            model's files.

    Raises:
        ModelNotFoundError: There is no file or folder at this path.
        ModelFileError: The file cannot be read, or the folder is incomplete.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if (path / MANIFEST).exists():
                return _resolve_prepared(read_prepared(path), path)
            _check_folder(path, missing_from_folder or format_at(path).missing_files)
        elif not stat.S_ISREG(mode):
            raise ModelFileError(
                f"{path} is not a regular file", "use the path of a .gguf file", code="wrong_file"
            )
        elif path.suffix == ".safetensors":
            raise ModelFileError(
                f"{path} is only part of a model", f"use its folder: {path.parent}", code="wrong_file"
            )
        else:
            with path.open("rb"):
                pass
    except (FileNotFoundError, NotADirectoryError) as error:
        if prepared := find_prepared("layerskip", path):
            return _resolve_prepared(prepared, path)
        if path.is_symlink():
            raise ModelNotFoundError(
                f"{path} is a symbolic link to {os.readlink(path)}, which does not exist",
                "fix the link or use another path",
            ) from error
        nearest = difflib.get_close_matches(path.name, _models_in(path.parent), n=1)
        raise ModelNotFoundError(
            f"there is no file {path}",
            f"did you mean {path.parent / nearest[0]}?"
            if nearest
            else "check the path, or choose a model from `edgespec models list`",
        ) from error
    except PermissionError as error:
        raise ModelFileError(
            f"you do not have permission to read {path}",
            f"change its permissions, for example with chmod u+r {path}",
            code="model_file_unreadable",
        ) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} cannot be opened: {error}",
            "check that the path is correct",
            code="model_file_unreadable",
        ) from error
    name = path.name or path.resolve().name
    with suppress(OSError, ModelFileError):
        # The path may refer to any part of a split model.
        path = path if path.is_dir() else format_at(path).files(path)[0]
    return Resolved(name, path, "path", load_catalogue().of_file(path), str(path), format_at(path).name)


def _resolve_prepared(prepared: PreparedModel, given: Path) -> Resolved:
    if not is_registered(prepared.kind):
        raise ModelFileError(
            f"{given} contains files prepared for drafting, not a model",
            f"use the model that they were made from: {prepared.source}",
            code="wrong_file",
        )
    check_prepared(prepared)
    folder = prepared.folder
    deleted = given.absolute() != folder.absolute()
    note = f"{given} was deleted; using its prepared version {folder}" if deleted else str(folder)
    entry = load_catalogue().of_file(prepared.source)
    return Resolved(prepared.source.name, folder, "path", entry, note, "layerskip")


def _check_folder(folder: Path, missing_from_folder: Callable[[Path], list[str]]) -> None:
    missing = missing_from_folder(folder)
    if not missing:
        return
    if _is_head(folder):
        raise refused_head(str(folder))
    if models := _models_in(folder):
        usable = next((name for name in models if _is_model(folder / name)), models[0])
        raise ModelFileError(
            f"{folder} is a folder, not a model file or an MLX model",
            f"use the path of {'the' if len(models) == 1 else 'a'} GGUF file in it: {folder / usable}",
            code="wrong_file",
        )
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if "config.json" not in missing or any(folder.glob("*.safetensors")):
        what = "contains an incomplete MLX model"
        hint = "add the missing files, or download the model again"
    else:
        what = "is a folder, but not an MLX model"
        hint = "use the path of a .gguf file, or write hf:user/repo for a Hugging Face repository"
    raise ModelFileError(f"{folder} {what}: it lacks {shown}", hint, code="model_file_incomplete")


def _is_model(file: Path) -> bool:
    """Return whether a file is a complete, undamaged model rather than a head."""
    try:
        return format_at(file).read_info(file).kind == "model"
    except (ModelFileError, OSError):
        return False


def _is_head(folder: Path) -> bool:
    try:
        return format_at(folder).read_info(folder).kind == "head"
    except ModelFileError:
        return False


def _models_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    except OSError:
        return []


@dataclass(frozen=True)
class PathReference:
    """A file or folder on this machine."""

    path: Path


@dataclass(frozen=True)
class HubReference:
    """A model in a Hugging Face repository.

    Attributes:
        repository: `user/repo`.
        quantisation: A label such as `Q4_K_M`, the name of a `.gguf` file, or None for the default.
        explicit: Whether the reference starts with `hf:` or a Hugging Face URL and therefore cannot mean an
            Ollama model.
    """

    repository: str
    quantisation: str | None
    explicit: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class StoreReference:
    """The model named `name` in Ollama or LM Studio."""

    store: Literal["ollama", "lmstudio"]
    name: str


@dataclass(frozen=True)
class NameReference:
    """A name from the catalogue, Ollama or the user's aliases, with an optional tag after a colon."""

    name: str
    tag: str | None

    @property
    def full_name(self) -> str:
        """The name including its tag, as the user typed it."""
        return f"{self.name}:{self.tag}" if self.tag else self.name


Reference = PathReference | HubReference | StoreReference | NameReference

_MAX_PATH_CHARACTERS, _MAX_NAME_CHARACTERS = 4096, 512
# Maximum number of characters to quote from a model reference in an error message.
_MAX_SHOWN_CHARACTERS = 60
_HUB_PREFIX = re.compile(r"^(?:hf:|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/)", re.IGNORECASE)
_STORE_PREFIX = re.compile(r"^(ollama|lmstudio):(.*)$", re.IGNORECASE)
_REPOSITORY = re.compile(r"^([\w.-]+/[\w.-]+?)/?(?::([\w./-]+))?$")
# Matches the path of a file or folder page on Hugging Face.
_WEB_PAGE = re.compile(
    r"^([\w.-]+/[\w.-]+)/(?:tree|blob|resolve)/main(?:/|/([\w./-]+\.gguf))?(?:\?.*)?$", re.IGNORECASE
)
_REVISION = re.compile(r"^((?:hf:)?(?:[\w.-]+/)?[\w.-]+)@([\w./-]*)(:[\w./-]+)?$")
_NAME = re.compile(r"^([\w.-]+)(?::([\w.-]+))?$")
_WRITTEN_AS_PATH = re.compile(r"^(?:[/~]|\.\.?(?:[/\\]|$))|\\|\.gguf$", re.IGNORECASE)
_HINT = "use a path, user/repo:quant or a name such as demo"


def parse_reference(reference: str) -> Reference:
    """Parse a model reference.

    The disk is accessed only to distinguish the repository `user/repo` from a local path.

    Raises:
        ModelNotFoundError: The string is not a valid reference.
    """
    text = reference.strip()
    if not text:
        raise ModelNotFoundError("the model name is empty", _HINT, code="reference_invalid")
    if len(text) > _MAX_PATH_CHARACTERS:
        raise _too_long(text)
    if prefix := _HUB_PREFIX.match(text):
        return _parse_hub(text, text[prefix.end() :])
    if store := _STORE_PREFIX.match(text):
        if not store[2].strip():
            raise ModelNotFoundError(
                f"{text} does not name a model",
                f"write it as {store[1].lower()}:NAME",
                code="reference_invalid",
            )
        return StoreReference("ollama" if store[1].lower() == "ollama" else "lmstudio", store[2].strip())
    path = Path(os.path.expanduser(text))
    if _WRITTEN_AS_PATH.search(text) and "://" not in text:
        # `user/repo:file.gguf` is a file in a repository, unless there is a local file with that name.
        in_repository = _REPOSITORY.match(text) if ":" in text and not os.path.exists(path) else None
        if in_repository:
            return _hub_reference(in_repository)
        return PathReference(path)
    if name := _NAME.match(text):
        return NameReference(_check_length(name.group(1)), name.group(2))
    if os.path.exists(path):
        return PathReference(path)
    if name := _NAME.match(text.rstrip("/")):
        return NameReference(_check_length(name.group(1)), name.group(2))
    if repository := _REPOSITORY.match(text):
        return _hub_reference(repository)
    _reject_near_misses(text)
    return PathReference(path)


def _parse_hub(text: str, rest: str) -> HubReference:
    """Parse the part of a reference after `hf:` or the host name. Raises ModelNotFoundError."""
    if rest:
        _reject_near_misses(text)
    match = _REPOSITORY.match(rest) or _WEB_PAGE.match(rest)
    if not match:
        raise ModelNotFoundError(
            f"{_shorten(text)} is not a Hugging Face repository",
            "write it as hf:user/repo or hf:user/repo:Q4_K_M",
            code="reference_invalid",
        )
    return _hub_reference(match, explicit=True)


def _hub_reference(match: re.Match[str], *, explicit: bool = False) -> HubReference:
    """Return the reference for a repository. Ollama's tag `latest` means the default quantisation."""
    tag = match.group(2)
    is_default = tag is None or tag.lower() == "latest"
    return HubReference(_check_length(match.group(1)), None if is_default else tag, explicit)


def _reject_near_misses(text: str) -> None:
    """Raise ModelNotFoundError with a specific hint if a reference contains a common mistake."""
    if "://" in text and not _HUB_PREFIX.match(text):
        raise ModelNotFoundError(
            f"{_shorten(text)} is not a Hugging Face URL",
            "download the file yourself and use its path, or write hf:user/repo:Q4_K_M",
            code="reference_invalid",
        )
    if revision := _REVISION.match(text):
        requested = f"revision {revision[2]}" if revision[2] else "a revision"
        raise ModelNotFoundError(
            f"{_shorten(text)} specifies {requested}, but edgespec can download only the newest revision",
            f"write {_shorten(revision[1])}{revision[3] or ''}",
            code="reference_invalid",
        )
    if text.endswith(":"):
        raise ModelNotFoundError(
            f"{_shorten(text)} ends in a colon without a quantisation",
            f"write {_shorten(text)}Q4_K_M, or remove the colon",
            code="reference_invalid",
        )


def _check_length(name: str) -> str:
    if len(name) > _MAX_NAME_CHARACTERS:
        raise _too_long(name)
    return name


def _too_long(text: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"a model name of {len(text):,} characters is too long: {_shorten(text)}",
        _HINT,
        code="reference_invalid",
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
