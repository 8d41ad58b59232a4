"""From what a person types for a model to a file or a folder on this machine."""

from __future__ import annotations

import difflib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.backends.registry import Backend, FileFormat, backend_of, format_at, format_of, is_registered
from edgespec.catalog.catalogue import (
    ModelEntry,
    ModelFormat,
    load_catalogue,
    user_aliases,
    user_aliases_path,
)
from edgespec.catalog.download import Progress, fetch
from edgespec.catalog.hub_files import is_quantisation
from edgespec.catalog.ollama import ollama_model
from edgespec.catalog.other_programs import (
    are_same_size,
    find_by_missing_path,
    find_in_other_programs,
    find_in_store,
    ollama_names,
)
from edgespec.catalog.reference_parsing import (
    HubReference,
    NameReference,
    PathReference,
    Reference,
    StoreReference,
    parse,
)
from edgespec.catalog.stored_models import StoredModel
from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.prepare.store import MANIFEST, PreparedModel, check_prepared, find_prepared, read_prepared

__all__ = [
    "HubReference",
    "NameReference",
    "PathReference",
    "Reference",
    "Resolved",
    "StoreReference",
    "parse",
    "resolve",
]


Source = Literal["path", "embedded", "hub", "ollama", "lmstudio"]


@dataclass(frozen=True)
class Resolved:
    """A model on this machine. `path` is a GGUF file (the first part, when it is split), an MLX folder, or
    the folder of a GGUF model that was prepared for early exit.

    `name` is what was asked for, `entry` the catalogue's model if it is one, `note` the line to show.
    """

    name: str
    path: Path
    source: Source
    entry: ModelEntry | None
    note: str
    format: ModelFormat = "gguf"

    @property
    def backend(self) -> Backend:
        """The backend that runs this model."""
        return backend_of(self.format)

    @property
    def file_format(self) -> FileFormat:
        """What its backend can do with files of this format."""
        return format_of(self.format)


def resolve(reference: str, *, allow_download: bool = True, progress: Progress | None = None) -> Resolved:
    """Find the model a reference stands for; with `allow_download`, fetch it when it is not on this machine.

    What is already here wins: the embedded models, the Hugging Face cache, what LM Studio and Ollama keep.
    Raises ModelNotFoundError (also where different models are called that), ModelFileError (the path is no
    readable model), DownloadError, CancelledError, BackendMissingError (it would have to be downloaded, and
    could not run here).
    """
    asked = reference.strip()
    meaning = _follow_user_aliases(asked)
    match meaning:
        case PathReference(path):
            stored = find_by_missing_path(path)
            return _stored(asked, stored) if stored else _at(path)
        case StoreReference(store, name):
            return _stored(asked, find_in_store(store, name))
        case HubReference():
            return _of_hub(asked, meaning, allow_download, progress)
        case NameReference(name, tag):
            return _named(asked, name, tag, allow_download, progress)


def _follow_user_aliases(asked: str) -> Reference:
    text, seen = asked, [asked.lower()]
    while True:
        reference = parse(text)
        meaning = user_aliases().get(text.lower()) if isinstance(reference, NameReference) else None
        if meaning is None:
            return reference
        text = meaning.strip()
        if text.lower() in seen:
            raise ModelNotFoundError(
                f"the alias {asked} leads back to itself ({' -> '.join([*seen, text])})",
                f"correct it in {user_aliases_path()}",
            )
        seen.append(text.lower())


def _named(
    asked: str, name: str, tag: str | None, allow_download: bool, progress: Progress | None
) -> Resolved:
    catalogue = load_catalogue()
    full_name = f"{name}:{tag}" if tag else name
    found = catalogue.find(full_name)
    stored = ollama_model(name, tag) if tag or not found else None
    if stored is not None and stored.path is not None:
        return _stored(asked, stored, found[0] if found else None)
    if found is None and tag and is_quantisation(tag):
        base = catalogue.find(name)
        found = (base[0], tag) if base else None
    if found is not None:
        return _catalogued(asked, *found, allow_download, progress)
    if os.path.exists(full_name):
        return _at(Path(full_name))
    if stored is not None:
        return _stored(asked, stored)  # says why it cannot be used
    nearest = catalogue.nearest(full_name, [*user_aliases(), *ollama_names()])
    raise ModelNotFoundError(
        f"no model is called {full_name}",
        (f"did you mean {' or '.join(nearest)}? " if nearest else "")
        + "`edgespec models list` shows the names; a path or hf:user/repo:quant works too",
    )


def _catalogued(
    asked: str, entry: ModelEntry, quantisation: str, allow_download: bool, progress: Progress | None
) -> Resolved:
    several = entry.file_format.one_file_per_quantisation
    only_one = entry.embedded_path is not None or not several
    if only_one and quantisation.upper() != entry.quantisation.upper():
        in_gguf = entry.name.removesuffix("-mlx")
        other = f", or for its GGUF form: {in_gguf}:{quantisation}" if entry.repository else ""
        raise ModelNotFoundError(
            f"{entry.name} comes as {entry.quantisation} only, not {quantisation}",
            f"ask for {entry.name}{other}",
        )
    if entry.embedded_path is not None:
        path = _at(entry.embedded_path).path
        return Resolved(asked, path, "embedded", entry, f"{asked} -> embedded: {path}", entry.format)
    wanted = quantisation if several else None
    return _of_hub(asked, HubReference(entry.repository, wanted, explicit=True), allow_download, progress)


def _of_hub(asked: str, meaning: HubReference, allow_download: bool, progress: Progress | None) -> Resolved:
    """A model of a hub repository: from the cache, as another program keeps it, or from the hub."""
    repository, quantisation = meaning.repository, meaning.quantisation
    entry = load_catalogue().of_repository(repository)
    cached = _cached(repository, quantisation)
    others = []
    if cached is None or not meaning.explicit:
        others = find_in_other_programs(repository, quantisation, hub_only=meaning.explicit)
    found = [one for one in others if one.path]
    if len(found) + (cached is not None) > 1 and not are_same_size(
        [*([cached] if cached else []), *(one.path for one in found if one.path)]
    ):
        meant = [*([f"hf:{repository}"] if cached else []), *(one.names[-1] for one in found)]
        raise ModelNotFoundError(
            f"{asked} means {len(meant)} different models on this machine: {', '.join(meant)}",
            "name one of these",
        )
    if cached is None and found:
        return _stored(asked, found[0], entry)
    path = cached or fetch(repository, quantisation, allow_download=allow_download, progress=progress)
    note = f"{asked} -> {_hub_note(repository, quantisation)}: {path}"
    return Resolved(asked, path, "hub", entry, note, format_at(path).name)


def _cached(repository: str, quantisation: str | None) -> Path | None:
    """The model as it is in the shared cache, or None."""
    try:
        return fetch(repository, quantisation, allow_download=False)
    except ModelNotFoundError:
        return None


def _stored(asked: str, stored: StoredModel, entry: ModelEntry | None = None) -> Resolved:
    """A model that Ollama or LM Studio keeps. Raises ModelFileError where that cannot be used."""
    program = {"ollama": "Ollama", "lmstudio": "LM Studio", "hub": "the cache"}[stored.store]
    if stored.path is None:
        raise ModelFileError(
            f"{program}'s {stored.names[0]} cannot be used: {stored.problem}", "choose another model"
        )
    note = f"{asked} -> {program}'s {stored.names[0]}: {stored.path}"
    return Resolved(asked, stored.path, stored.store, entry, note, stored.format)


def _hub_note(repository: str, quantisation: str | None) -> str:
    return f"hf:{repository}:{quantisation}" if quantisation else f"hf:{repository}"


def _at(path: Path) -> Resolved:
    """The model at `path`, checked to be a file that can be read, or a folder that is whole."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if (path / MANIFEST).exists():
                return _prepared(read_prepared(path), path)
            _check_folder(path)
        elif not stat.S_ISREG(mode):
            raise ModelFileError(f"{path} is not a regular file", "give the path of a .gguf file")
        elif path.suffix == ".safetensors":
            raise ModelFileError(f"{path} is one file of a model", f"give its folder: {path.parent}")
        else:
            with path.open("rb"):
                pass
    except (FileNotFoundError, NotADirectoryError) as error:
        if prepared := find_prepared("layerskip", path):
            return _prepared(prepared, path)
        if path.is_symlink():
            raise ModelNotFoundError(
                f"{path} is a link to {os.readlink(path)}, which is not there",
                "mend the link or give another path",
            ) from error
        nearest = difflib.get_close_matches(path.name, _models_in(path.parent), n=1)
        raise ModelNotFoundError(
            f"there is no file {path}",
            f"did you mean {path.parent / nearest[0]}?"
            if nearest
            else "check the path; `edgespec models list` shows the models known by name",
        ) from error
    except PermissionError as error:
        raise ModelFileError(
            f"{path} may not be read by this user", f"change its permissions, such as chmod u+r {path}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be opened: {error}", "check the path") from error
    name = path.name or path.resolve().name  # "." has no name of its own
    return Resolved(name, path, "path", load_catalogue().embedded_at(path), str(path), format_at(path).name)


def _prepared(prepared: PreparedModel, asked: Path) -> Resolved:
    """What was prepared for early exit, named by its folder or by the file it was made from, now gone.

    Raises ModelFileError when it is damaged, or is no whole model.
    """
    if not is_registered(prepared.kind):
        raise ModelFileError(
            f"{asked} holds what was prepared for drafting, not a model of its own",
            f"name the model it was made from: {prepared.source}",
        )
    check_prepared(prepared)
    folder = prepared.folder
    gone = asked.absolute() != folder.absolute()
    note = f"{asked} is gone, what was prepared from it is used: {folder}" if gone else str(folder)
    entry = load_catalogue().embedded_at(prepared.source)
    return Resolved(prepared.source.name, folder, "path", entry, note, "layerskip")


def _check_folder(folder: Path) -> None:
    """Raises ModelFileError when the folder is no model in MLX's form, saying what it lacks."""
    missing = format_at(folder).missing_files(folder)
    if not missing:
        return
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    models = _models_in(folder)
    resembles = "config.json" not in missing or any(folder.glob("*.safetensors"))
    if models:
        next_step = f"name {'the' if len(models) == 1 else 'a'} GGUF file in it: {folder / models[0]}"
    elif resembles:
        next_step = "add what is missing, or download the model again"
    else:
        next_step = "give the path of a .gguf file; a hub repository of that name is written hf:user/repo"
    what = "a folder without a whole MLX model" if resembles else "a folder, not a model file or an MLX model"
    raise ModelFileError(f"{folder} is {what}: it lacks {shown}", next_step)


def _models_in(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    except OSError:
        return []
