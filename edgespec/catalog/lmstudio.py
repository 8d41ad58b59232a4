"""Models that LM Studio keeps on this machine: publisher/repository/file, read in place and never written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from edgespec.catalog.hub_files import HubFile, choose_files
from edgespec.catalog.mlx_files import lacking
from edgespec.catalog.stored import Stored, files_below, models_among
from edgespec.errors import ModelFileError, ModelNotFoundError

__all__ = ["lmstudio_file", "lmstudio_model", "lmstudio_models"]

_DEPTH = 3
_MOST_SETTINGS_BYTES = 1 << 22


def lmstudio_model(repository: str, quantisation: str | None = None) -> Stored | None:
    """The model LM Studio has of `publisher/repository`, or None. quantisation: as in `choose_files`.

    Raises ModelNotFoundError, naming them, where it has several that could be meant.
    """
    for folder, name, files in _repositories():
        if name.lower() != repository.lower():
            continue
        models = models_among(files)
        if models:
            with suppress(ModelNotFoundError):
                chosen = choose_files(f"lmstudio:{name}", files, quantisation)
                return Stored("lmstudio", _names(name, chosen, files), folder / chosen[0].name)
            fits = [model for model in models if not quantisation or _is(model.files[0], quantisation)]
            if len(fits) > 1:
                raise ModelNotFoundError(
                    f"LM Studio has {len(fits)} models of {name}:"
                    f" {', '.join(model.files[0].name for model in fits)}",
                    f"name the file, such as lmstudio:{name}/{fits[0].files[0].name}",
                )
        elif quantisation is None and (folder / "config.json").is_file():
            return _of_folder(folder, name)
    return None


def lmstudio_file(reference: str) -> Stored | None:
    """The model that `publisher/repository/file.gguf` names, or None."""
    publisher, _, rest = reference.partition("/")
    name, _, file = rest.partition("/")
    return lmstudio_model(f"{publisher}/{name}", file) if file.lower().endswith(".gguf") else None


def lmstudio_models() -> Iterator[Stored]:
    """Everything LM Studio has, what cannot be used included."""
    seen: set[Path] = set()
    for folder, name, files in _repositories():
        models = models_among(files)
        for model in models:
            file = (folder / model.files[0].name).resolve()
            if file in seen:
                continue  # a link leads to it a second time
            seen.add(file)
            names = _names(name, model.files, files)
            if model.whole:
                yield Stored("lmstudio", names, folder / model.files[0].name)
            else:
                missing = model.files[0].part_count - len(model.files)
                yield Stored(
                    "lmstudio",
                    names,
                    None,
                    problem=f"{missing} of its {model.files[0].part_count} parts are missing",
                )
        if not models and (folder / "config.json").is_file():
            yield _of_folder(folder, name)


def _of_folder(folder: Path, name: str) -> Stored:
    names = (name, f"lmstudio:{name}")
    try:
        missing = lacking(folder)
    except (ModelFileError, OSError) as error:
        return Stored("lmstudio", names, None, "mlx", str(error))
    if missing:
        return Stored("lmstudio", names, None, "mlx", f"it lacks {', '.join(missing[:3])}")
    return Stored("lmstudio", names, folder, "mlx")


def _names(repository: str, files: Sequence[HubFile], all_files: Sequence[HubFile]) -> tuple[str, ...]:
    """What a model may be called: by its repository, its quantisation, its file."""
    first, models = files[0], models_among(all_files)
    same = [model for model in models if model.files[0].quantisation == first.quantisation]
    names = [repository] if len(models) == 1 else []
    if first.quantisation and len(same) == 1:
        names.append(f"{repository}:{first.quantisation}")
    names.append(f"{repository}/{first.name}")
    return (*names, f"lmstudio:{names[0]}", f"lmstudio:{names[-1]}")


def _is(file: HubFile, quantisation: str) -> bool:
    wanted = quantisation.lower()
    return wanted in (file.quantisation.lower(), file.name.lower(), file.name.rsplit("/", 1)[-1].lower())


def _repositories() -> Iterator[tuple[Path, str, list[HubFile]]]:
    """Each publisher/repository: its folder, its name, and the GGUF files in it."""
    for root in _folders():
        for publisher in _inside(root):
            for folder in _inside(publisher):
                files = [path for path in files_below(folder, _DEPTH) if path.suffix.lower() == ".gguf"]
                named = [HubFile(path.relative_to(folder).as_posix()) for path in files]
                yield folder, f"{publisher.name}/{folder.name}", named


def _inside(folder: Path) -> list[Path]:
    """The folders in a folder, none where it cannot be read."""
    try:
        found = [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except OSError:
        return []
    return sorted(found)


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
