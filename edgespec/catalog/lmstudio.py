"""Finds the models of LM Studio, which stores them as publisher/repository/file. Never changes its files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from edgespec.backends.mlx_files import missing_files
from edgespec.catalog.hub_files import HubFile, choose_files, join_names
from edgespec.catalog.stored_models import (
    GgufModel,
    StoredModel,
    files_below,
    find_child,
    group_gguf_files,
    is_parent,
)
from edgespec.errors import ModelFileError, ModelNotFoundError

__all__ = ["lmstudio_file", "lmstudio_model", "lmstudio_models"]

# Maximum depth of subfolders to search for model files in a repository.
_MAX_DEPTH = 3
# Maximum accepted size of settings.json. LM Studio writes only a few kilobytes.
_MAX_SETTINGS_BYTES = 1 << 22


class _Repository(NamedTuple):
    """A repository folder in LM Studio's models folder.

    Attributes:
        folder: The folder.
        name: `publisher/repository`.
        files: The GGUF files in it.
        has_config: Whether it contains a config.json, so that it may be an MLX model.
    """

    folder: Path
    name: str
    files: list[HubFile]
    has_config: bool


def lmstudio_model(repository: str, quantisation: str | None = None) -> StoredModel | None:
    """Return the model that LM Studio stores under a repository name, or None.

    Args:
        repository: `publisher/repository`.
        quantisation: The quantisation or file to select, as in `choose_files`.

    Raises:
        ModelNotFoundError: Several models match. The message lists them.
    """
    for folder, name, files, has_config in _repository(repository):
        models = group_gguf_files(files)
        if models:
            with suppress(ModelNotFoundError):
                chosen = choose_files(f"lmstudio:{name}", files, quantisation)
                return StoredModel("lmstudio", _names(name, chosen, models), folder / chosen[0].name)
            matching = [m for m in models if not quantisation or _has_label(m.files[0], quantisation)]
            if len(matching) > 1:
                raise ModelNotFoundError(
                    f"LM Studio has {len(matching)} models of {name}:"
                    f" {join_names([model.files[0].name for model in matching])}",
                    f"name the file, such as lmstudio:{name}/{matching[0].files[0].name}",
                )
        elif quantisation is None and has_config:
            return _mlx_model(folder, name)
    return None


def lmstudio_file(reference: str) -> StoredModel | None:
    """Return LM Studio's model `publisher/repository/file.gguf`, or None."""
    publisher, _, rest = reference.partition("/")
    name, _, file = rest.partition("/")
    return lmstudio_model(f"{publisher}/{name}", file) if file.lower().endswith(".gguf") else None


def lmstudio_models() -> Iterator[StoredModel]:
    """Yield all models in LM Studio, including those that edgespec cannot run."""
    seen: set[Path] = set()
    for folder, name, files, has_config in _repositories():
        models = group_gguf_files(files)
        labels = _labels(models)
        for model in models:
            file = (folder / model.files[0].name).resolve()
            if file in seen:
                continue  # The same file was already reached through another symbolic link.
            seen.add(file)
            names = _names(name, model.files, models, labels)
            if model.is_complete:
                yield StoredModel("lmstudio", names, folder / model.files[0].name)
            else:
                missing = model.files[0].part_count - len(model.files)
                yield StoredModel(
                    "lmstudio",
                    names,
                    None,
                    problem=f"{missing} of its {model.files[0].part_count} parts are missing",
                )
        if not models and has_config:
            yield _mlx_model(folder, name)


def _mlx_model(folder: Path, name: str) -> StoredModel:
    names = (name, f"lmstudio:{name}")
    try:
        missing = missing_files(folder)
    except (ModelFileError, OSError) as error:
        return StoredModel("lmstudio", names, None, "mlx", str(error))
    if missing:
        return StoredModel("lmstudio", names, None, "mlx", f"it lacks {', '.join(missing[:3])}")
    return StoredModel("lmstudio", names, folder, "mlx")


def _labels(models: Sequence[GgufModel]) -> Counter[str]:
    """Count the models in a repository by quantisation."""
    return Counter(model.files[0].quantisation for model in models)


def _names(
    repository: str,
    files: Sequence[HubFile],
    models: Sequence[GgufModel],
    labels: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """Return all references to a model in a repository, shortest first.

    Args:
        repository: `publisher/repository`.
        files: The files of the model.
        models: All models in the repository.
        labels: Number of models by quantisation. Counted from `models` if None.
    """
    first = files[0]
    label = first.quantisation
    names = [repository] if len(models) == 1 else []
    if label and (labels or _labels(models))[label] == 1:
        names.append(f"{repository}:{label}")
    names.append(f"{repository}/{first.name}")
    return (*names, f"lmstudio:{names[0]}", f"lmstudio:{names[-1]}")


def _has_label(file: HubFile, quantisation: str) -> bool:
    label = quantisation.lower()
    return label in (file.quantisation.lower(), file.name.lower(), file.name.rsplit("/", 1)[-1].lower())


def _repository(name: str) -> Iterator[_Repository]:
    """Yield the folders named publisher/repository in all of LM Studio's models folders."""
    publisher, _, repository = name.partition("/")
    for root in _folders():
        publisher_folder = find_child(root, publisher)
        folder = find_child(publisher_folder, repository) if publisher_folder else None
        if publisher_folder and folder and folder.is_dir() and not is_parent(folder, root):
            files = [path.relative_to(folder).as_posix() for path in files_below(folder, _MAX_DEPTH)]
            yield _read(folder, f"{publisher_folder.name}/{folder.name}", files)


def _repositories() -> Iterator[_Repository]:
    """Yield all repository folders in LM Studio's models folders."""
    for root in _folders():
        files_by_name: dict[str, list[str]] = {}
        # Search the folder only once, so that the limit on the number of entries applies to the whole folder.
        for path in files_below(root, _MAX_DEPTH + 2):
            if _is_model_file(path.name):
                publisher, _, rest = path.relative_to(root).as_posix().partition("/")
                repository, _, file = rest.partition("/")
                if file:
                    files_by_name.setdefault(f"{publisher}/{repository}", []).append(file)
        for name, files in sorted(files_by_name.items()):
            yield _read(root / name, name, files)


def _is_model_file(name: str) -> bool:
    return name == "config.json" or name.lower().endswith(".gguf")


def _read(folder: Path, name: str, files: Sequence[str]) -> _Repository:
    models = [HubFile(file) for file in files if file.lower().endswith(".gguf")]
    return _Repository(folder, name, models, "config.json" in files)


def _folders() -> list[Path]:
    """Return LM Studio's models folders: those in its settings, and the defaults of all versions."""
    home = Path.home()
    homes = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    with suppress(OSError, ValueError):
        pointer = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        homes[:0] = [Path(pointer)] if pointer else []
    folders = []
    for one in homes:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            settings = one / "settings.json"
            if settings.stat().st_size < _MAX_SETTINGS_BYTES:
                folders.append(Path(json.loads(settings.read_text(encoding="utf-8"))["downloadsFolder"]))
        folders.append(one / "models")
    distinct: dict[Path, Path] = {}
    for folder in folders:
        with suppress(OSError, RuntimeError):  # Resolving fails if symbolic links form a loop.
            distinct.setdefault(folder.resolve(), folder)
    return list(distinct.values())
