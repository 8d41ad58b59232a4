"""Find models in the Hugging Face cache without network access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.model.formats.mlx_files import missing_files
from edgespec.store.hub_files import HubFile, choose_files, group_gguf_files, is_complete
from edgespec.store.stored_models import EntryBudget, StoredModel, files_below, folders_in, is_inside
from edgespec.system.files import read_regular_file

__all__ = ["cached_model", "hub_cache_folder", "hub_models", "repository_folder"]

_MAX_DEPTH = 3
_PREFIX = "models--"
# Maximum size in bytes of a ref file, which contains only a commit hash.
_MAX_REF_BYTES = 1000


def hub_cache_folder() -> Path:
    """Return the folder of the Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    """Return the folder of a repository in the Hugging Face cache."""
    return hub_cache_folder() / f"{_PREFIX}{repository.replace('/', '--')}"


def cached_model(
    repository: str,
    quantisation: str | None,
    missing_from_folder: Callable[[Path], list[str]] = missing_files,
) -> Path | None:
    """Return a model or a head in the Hugging Face cache, or None if any of its files is missing.

    Args:
        repository: `user/repo`.
        quantisation: The quantisation or file to select. See `choose_files`.
        missing_from_folder: Returns the names of files missing from a folder.

    Returns:
        The first file of a GGUF model, or the folder of an MLX model.
    """
    folder, budget = repository_folder(repository), EntryBudget()
    snapshots = list(_snapshots(folder, budget))
    for snapshot in snapshots:
        files = _gguf_files(folder, snapshot, budget)
        with suppress(ModelNotFoundError):
            return snapshot / choose_files(repository, files, quantisation)[0].name
    if quantisation is not None:
        return None
    return next((folder for folder in snapshots if _is_complete_folder(folder, missing_from_folder)), None)


def hub_models() -> Iterator[StoredModel]:
    """Yield every complete GGUF and MLX model in the Hugging Face cache."""
    budget = EntryBudget()
    for folder in folders_in(hub_cache_folder(), budget):
        if not folder.name.startswith(_PREFIX):
            continue
        repository = folder.name.removeprefix(_PREFIX).replace("--", "/")
        seen: set[str] = set()
        with suppress(OSError, ValueError):
            for snapshot in _snapshots(folder, budget):
                yield from _snapshot_models(folder, snapshot, repository, budget, seen)
    yield from budget.notice("hub")


def _snapshots(folder: Path, budget: EntryBudget) -> Iterator[Path]:
    """Yield the snapshots of a cached repository: `main` first, then the others from newest to oldest."""
    main = ""
    with suppress(OSError):
        ref = read_regular_file(folder / "refs" / "main", _MAX_REF_BYTES)
        main = ref.decode("utf-8", "replace").strip()
    with suppress(OSError):
        # Skip links that point outside the repository, because they could lead to a whole disk.
        snapshots = [path for path in folders_in(folder / "snapshots", budget) if is_inside(path, folder)]
        yield from sorted(snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def _gguf_files(folder: Path, snapshot: Path, budget: EntryBudget) -> list[HubFile]:
    """Return the GGUF files in a snapshot, which may be links to blobs. Unfinished downloads are left out."""
    files = files_below(snapshot, _MAX_DEPTH, budget, inside=folder)
    return [
        HubFile(file.relative_to(snapshot).as_posix()) for file in files if file.suffix.lower() == ".gguf"
    ]


def _snapshot_models(
    folder: Path, snapshot: Path, repository: str, budget: EntryBudget, seen: set[str]
) -> Iterator[StoredModel]:
    """Yield the models in a snapshot that are not in `seen`, and add them to `seen`."""
    files = _gguf_files(folder, snapshot, budget)
    models = list(filter(is_complete, group_gguf_files(files)))
    for first, *_ in models:
        if first.stem in seen:
            continue
        seen.add(first.stem)
        names = [f"{repository}:{first.quantisation}"] if first.quantisation else []
        names += [repository] if len(models) == 1 else []
        names += [*(f"hf:{name}" for name in names), f"hf:{repository}:{first.name}"]
        yield StoredModel("hub", tuple(names), snapshot / first.name)
    if not models and "" not in seen and (snapshot / "config.json").is_file():
        seen.add("")
        if _is_complete_folder(snapshot, missing_files):
            yield StoredModel("hub", (repository, f"hf:{repository}"), snapshot, "mlx")


def _is_complete_folder(folder: Path, missing_from_folder: Callable[[Path], list[str]]) -> bool:
    try:
        return not missing_from_folder(folder)
    except (ModelFileError, OSError):
        return False
