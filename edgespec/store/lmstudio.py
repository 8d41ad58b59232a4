"""Find LM Studio's models, which it stores as publisher/repository/file, without modifying them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.mlx_files import missing_files
from edgespec.store.hub_files import HubFile, choose_files, group_gguf_files, join_names
from edgespec.store.stored_models import (
    REPOSITORY_DEPTH,
    EntryBudget,
    StoredModel,
    files_below,
    find_child,
    is_parent,
)
from edgespec.system.files import home_folder, read_regular_file

_CONFIG = "config.json"
_MAX_SETTINGS_BYTES = 1 << 22


class _Repository(NamedTuple):
    """A repository folder in LM Studio's models folder.

    Attributes:
        folder: Path of the folder.
        name: `publisher/repository`.
        files: The GGUF files in the folder.
        has_config: Whether the folder contains a config.json and could therefore be an MLX model.
    """

    folder: Path
    name: str
    files: list[HubFile]
    has_config: bool


def lmstudio_model(repository: str, quantisation: str | None = None) -> StoredModel | None:
    """Return the LM Studio model in this repository, or None.

    Args:
        repository: `publisher/repository`.
        quantisation: The quantisation or file to select. See `choose_files`.

    Raises:
        ModelNotFoundError: Several models match. The message lists them.
    """
    for found in _repository(repository):
        stored = _stored(found)
        if _CONFIG in stored and quantisation is None:
            return stored[_CONFIG]
        with suppress(ModelNotFoundError):
            return stored[choose_files(f"lmstudio:{found.name}", found.files, quantisation)[0].name]
        matching = [file.name for file in map(HubFile, stored) if _matches(file, quantisation)]
        if len(matching) > 1:
            raise ModelNotFoundError(
                f"LM Studio has {len(matching)} models in {found.name}: {join_names(matching)}",
                f"specify which one, such as lmstudio:{found.name}/{matching[0]}",
                code="ambiguous",
            )
    return None


def lmstudio_file(reference: str) -> StoredModel | None:
    """Return the LM Studio model named `publisher/repository/file.gguf`, or None."""
    publisher, _, rest = reference.partition("/")
    name, _, file = rest.partition("/")
    return lmstudio_model(f"{publisher}/{name}", file) if file.lower().endswith(".gguf") else None


def lmstudio_models() -> Iterator[StoredModel]:
    """Yield all LM Studio models, including those that edgespec cannot run."""
    seen: set[Path] = set()
    budget = EntryBudget()
    for repository in _repositories(budget):
        for name, model in _stored(repository).items():
            if (file := (repository.folder / name).resolve()) not in seen:
                seen.add(file)
                yield model
    yield from budget.notice("lmstudio")


def lmstudio_repository(path: Path) -> Path | None:
    """Return the repository folder in one of LM Studio's models folders that contains a file, or None."""
    for root in _folders():
        if path.is_relative_to(root):
            depth = len(path.relative_to(root).parts)
            return path.parents[depth - 3] if depth > 2 else None
    return None


def _stored(repository: _Repository) -> dict[str, StoredModel]:
    """Return the models in a repository folder, keyed by the name of their first file."""
    models, name = group_gguf_files(repository.files), repository.name
    if not models and repository.has_config:
        return {_CONFIG: _mlx_model(repository.folder, name)}
    labels = Counter(parts[0].quantisation for parts in models)
    stored = {}
    for parts in models:
        first = parts[0]
        names = [name] if len(models) == 1 else []
        if first.quantisation and labels[first.quantisation] == 1:
            names.append(f"{name}:{first.quantisation}")
        names.append(f"{name}/{first.name}")
        names += [f"lmstudio:{names[0]}", f"lmstudio:{names[-1]}"]
        missing = _missing_parts(repository.folder / first.name, parts)
        stored[first.name] = StoredModel(
            "lmstudio",
            tuple(names),
            None if missing else repository.folder / first.name,
            problem=f"it lacks {missing} of its {first.part_count} parts" if missing else "",
        )
    return stored


def _missing_parts(first: Path, parts: Sequence[HubFile]) -> int:
    """Return how many parts of a GGUF model are missing."""
    missing = parts[0].part_count - len(parts)
    if missing:
        # File names can be wrong, so identify the parts by their headers.
        with suppress(ModelFileError):
            gguf_files(first)
            return 0
    return missing


def _mlx_model(folder: Path, name: str) -> StoredModel:
    try:
        missing = missing_files(folder)
        problem = f"the model lacks {', '.join(missing[:3])}" if missing else ""
    except (ModelFileError, OSError) as error:
        problem = str(error)
    names = (name, f"lmstudio:{name}")
    return StoredModel("lmstudio", names, None if problem else folder, "mlx", problem)


def _matches(file: HubFile, quantisation: str | None) -> bool:
    return not quantisation or file.quantisation == quantisation.upper() or file.is_named(quantisation)


def _repository(name: str) -> Iterator[_Repository]:
    """Yield the repository called `name` from each of LM Studio's models folders that has one."""
    publisher, _, repository = name.partition("/")
    for root in _folders():
        publisher_folder = find_child(root, publisher)
        folder = find_child(publisher_folder, repository) if publisher_folder else None
        if publisher_folder and folder and folder.is_dir() and not is_parent(folder, root):
            found = files_below(folder, REPOSITORY_DEPTH, EntryBudget())
            files = [path.relative_to(folder).as_posix() for path in found]
            yield _read(folder, f"{publisher_folder.name}/{folder.name}", files)


def _repositories(budget: EntryBudget) -> Iterator[_Repository]:
    """Yield all repository folders in LM Studio's models folders.

    Symbolic links are followed, because users link to models on other disks and in other programs' stores.
    """
    for root in _folders():
        files_by_name: dict[str, list[str]] = {}
        # Search each models folder in a single pass, so that the limit on entries covers all of it.
        for path in files_below(root, REPOSITORY_DEPTH + 2, budget):
            parts = path.relative_to(root).parts
            if len(parts) > 2 and (path.name == _CONFIG or path.name.lower().endswith(".gguf")):
                files_by_name.setdefault("/".join(parts[:2]), []).append("/".join(parts[2:]))
        for name, files in sorted(files_by_name.items()):
            yield _read(root / name, name, files)


def _read(folder: Path, name: str, files: Sequence[str]) -> _Repository:
    models = [HubFile(file) for file in files if file.lower().endswith(".gguf")]
    return _Repository(folder, name, models, _CONFIG in files)


def _folders() -> list[Path]:
    """Return LM Studio's models folders: those in its settings and the default ones of all versions."""
    home = home_folder()
    if home is None:
        return []
    homes = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    with suppress(OSError, ValueError):
        pointer = _read_text(home / ".lmstudio-home-pointer").strip()
        homes[:0] = [Path(pointer)] if pointer else []
    folders = []
    for one in homes:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            folders.append(Path(json.loads(_read_text(one / "settings.json"))["downloadsFolder"]))
        folders.append(one / "models")
    distinct: dict[Path, Path] = {}
    for folder in folders:
        with suppress(OSError, RuntimeError):  # `resolve` fails if symbolic links form a loop.
            distinct.setdefault(folder.resolve(), folder)
    return list(distinct.values())


def _read_text(path: Path) -> str:
    """Read one of LM Studio's settings files. Raises OSError or ValueError."""
    return read_regular_file(path, _MAX_SETTINGS_BYTES).decode("utf-8-sig")
