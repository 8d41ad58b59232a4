"""Models that LM Studio keeps on this machine: publisher/repository/file, read in place and never written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from edgespec.backends.mlx_files import missing_files
from edgespec.catalog.hub_files import HubFile, choose_files, listed
from edgespec.catalog.stored_models import (
    GgufModel,
    StoredModel,
    files_below,
    find_child,
    group_gguf_files,
    holds,
)
from edgespec.errors import ModelFileError, ModelNotFoundError

__all__ = ["lmstudio_file", "lmstudio_model", "lmstudio_models"]

_DEPTH = 3
_MOST_SETTINGS_BYTES = 1 << 22


class _Repository(NamedTuple):
    """A folder of LM Studio's, its name, the GGUF files in it, and whether it may be an MLX model."""

    folder: Path
    name: str
    files: list[HubFile]
    has_config: bool


def lmstudio_model(repository: str, quantisation: str | None = None) -> StoredModel | None:
    """The model LM Studio has of `publisher/repository`, or None. quantisation: as in `choose_files`.

    Raises ModelNotFoundError, naming them, where it has several that could be meant.
    """
    for folder, name, files, has_config in _repository(repository):
        models = group_gguf_files(files)
        if models:
            with suppress(ModelNotFoundError):
                chosen = choose_files(f"lmstudio:{name}", files, quantisation)
                return StoredModel("lmstudio", _names(name, chosen, models), folder / chosen[0].name)
            fits = [model for model in models if not quantisation or _is(model.files[0], quantisation)]
            if len(fits) > 1:
                raise ModelNotFoundError(
                    f"LM Studio has {len(fits)} models of {name}:"
                    f" {listed([model.files[0].name for model in fits])}",
                    f"name the file, such as lmstudio:{name}/{fits[0].files[0].name}",
                )
        elif quantisation is None and has_config:
            return _of_folder(folder, name)
    return None


def lmstudio_file(reference: str) -> StoredModel | None:
    """The model that `publisher/repository/file.gguf` names, or None."""
    publisher, _, rest = reference.partition("/")
    name, _, file = rest.partition("/")
    return lmstudio_model(f"{publisher}/{name}", file) if file.lower().endswith(".gguf") else None


def lmstudio_models() -> Iterator[StoredModel]:
    """Everything LM Studio has, what cannot be used included."""
    seen: set[Path] = set()
    for folder, name, files, has_config in _repositories():
        models = group_gguf_files(files)
        labels = _labels(models)
        for model in models:
            file = (folder / model.files[0].name).resolve()
            if file in seen:
                continue  # a link leads to it a second time
            seen.add(file)
            names = _names(name, model.files, models, labels)
            if model.whole:
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
            yield _of_folder(folder, name)


def _of_folder(folder: Path, name: str) -> StoredModel:
    names = (name, f"lmstudio:{name}")
    try:
        missing = missing_files(folder)
    except (ModelFileError, OSError) as error:
        return StoredModel("lmstudio", names, None, "mlx", str(error))
    if missing:
        return StoredModel("lmstudio", names, None, "mlx", f"it lacks {', '.join(missing[:3])}")
    return StoredModel("lmstudio", names, folder, "mlx")


def _labels(models: Sequence[GgufModel]) -> Counter[str]:
    """How many models of a repository there are of each quantisation."""
    return Counter(model.files[0].quantisation for model in models)


def _names(
    repository: str,
    files: Sequence[HubFile],
    models: Sequence[GgufModel],
    labels: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """What a model may be called: by its repository, its quantisation, its file. models: all of them."""
    first = files[0]
    label = first.quantisation
    names = [repository] if len(models) == 1 else []
    if label and (labels or _labels(models))[label] == 1:
        names.append(f"{repository}:{label}")
    names.append(f"{repository}/{first.name}")
    return (*names, f"lmstudio:{names[0]}", f"lmstudio:{names[-1]}")


def _is(file: HubFile, quantisation: str) -> bool:
    wanted = quantisation.lower()
    return wanted in (file.quantisation.lower(), file.name.lower(), file.name.rsplit("/", 1)[-1].lower())


def _repository(name: str) -> Iterator[_Repository]:
    """The folders that LM Studio has for publisher/repository."""
    publisher, _, repository = name.partition("/")
    for root in _folders():
        found = find_child(root, publisher)
        folder = find_child(found, repository) if found else None
        if found and folder and folder.is_dir() and not holds(folder, root):
            files = [path.relative_to(folder).as_posix() for path in files_below(folder, _DEPTH)]
            yield _read(folder, f"{found.name}/{folder.name}", files)


def _repositories() -> Iterator[_Repository]:
    """Everything LM Studio has, by publisher and repository."""
    for root in _folders():
        found: dict[str, list[str]] = {}
        # One walk, so that a root that is somebody's whole disk is given up soon.
        for path in files_below(root, _DEPTH + 2):
            if _matters(path.name):
                publisher, _, rest = path.relative_to(root).as_posix().partition("/")
                repository, _, file = rest.partition("/")
                if file:
                    found.setdefault(f"{publisher}/{repository}", []).append(file)
        for name, files in sorted(found.items()):
            yield _read(root / name, name, files)


def _matters(name: str) -> bool:
    return name == "config.json" or name.lower().endswith(".gguf")


def _read(folder: Path, name: str, files: Sequence[str]) -> _Repository:
    models = [HubFile(file) for file in files if file.lower().endswith(".gguf")]
    return _Repository(folder, name, models, "config.json" in files)


def _folders() -> list[Path]:
    """Where LM Studio keeps models: where its settings say, and where it does without being told."""
    home = Path.home()
    homes = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    with suppress(OSError, ValueError):
        pointer = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        homes[:0] = [Path(pointer)] if pointer else []
    folders = []
    for one in homes:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            settings = one / "settings.json"
            if settings.stat().st_size < _MOST_SETTINGS_BYTES:
                folders.append(Path(json.loads(settings.read_text(encoding="utf-8"))["downloadsFolder"]))
        folders.append(one / "models")
    distinct: dict[Path, Path] = {}
    for folder in folders:
        with suppress(OSError, RuntimeError):  # a loop of links
            distinct.setdefault(folder.resolve(), folder)
    return list(distinct.values())
