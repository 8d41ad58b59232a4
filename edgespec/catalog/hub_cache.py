"""Find models in the Hugging Face cache without network access."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from edgespec.backends.mlx_files import missing_files
from edgespec.catalog.hub_files import HubFile, choose_files, group_gguf_files, is_complete
from edgespec.catalog.stored_models import StoredModel, files_below
from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.files import read_regular_file

__all__ = ["cached_model", "hub_cache_folder", "hub_models", "repository_folder"]

# Maximum depth of subfolders to search for GGUF files in a snapshot.
_MAX_DEPTH = 3
_PREFIX = "models--"


def hub_cache_folder() -> Path:
    """Return the folder of the Hugging Face cache."""
    # Importing huggingface_hub takes 0.1 s, so import it only when needed.
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    """Return the folder of a repository in the Hugging Face cache."""
    return hub_cache_folder() / f"{_PREFIX}{repository.replace('/', '--')}"


def cached_model(repository: str, quantisation: str | None) -> Path | None:
    """Return a model in the Hugging Face cache, or None if any of its files is missing.

    Args:
        repository: `user/repo`.
        quantisation: The quantisation or file to select; see `choose_files`.

    Returns:
        The first file of a GGUF model, or the folder of an MLX model.
    """
    snapshots = list(_snapshots(repository_folder(repository)))
    for snapshot in snapshots:
        # `exists` is False for a link to a missing blob, so this skips unfinished downloads.
        present = [path for path in snapshot.rglob("*.gguf") if path.exists()]
        files = [HubFile(path.relative_to(snapshot).as_posix()) for path in present]
        with suppress(ModelNotFoundError):
            return snapshot / choose_files(repository, files, quantisation)[0].name
    complete = filter(_is_mlx_model, snapshots) if quantisation is None else iter(())
    return next(complete, None)


def hub_models() -> Iterator[StoredModel]:
    """Yield every complete GGUF and MLX model in the Hugging Face cache."""
    try:
        folders = sorted(path for path in hub_cache_folder().iterdir() if path.name.startswith(_PREFIX))
    except OSError:
        return
    for folder in folders:
        repository = folder.name.removeprefix(_PREFIX).replace("--", "/")
        seen: set[str] = set()
        with suppress(OSError, ValueError):
            for snapshot in _snapshots(folder):
                yield from _snapshot_models(snapshot, repository, seen)


def _snapshots(folder: Path) -> Iterator[Path]:
    """Yield the snapshots of a cached repository: `main` first, then the others from newest to oldest."""
    main = ""
    with suppress(OSError):
        main = read_regular_file(folder / "refs" / "main").decode("utf-8", "replace").strip()
    with suppress(OSError):
        folders = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
        yield from sorted(folders, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def _snapshot_models(snapshot: Path, repository: str, seen: set[str]) -> Iterator[StoredModel]:
    """Yield the models in a snapshot that are not in `seen`, and add them to it."""
    paths = [path for path in files_below(snapshot, _MAX_DEPTH) if path.suffix.lower() == ".gguf"]
    files = [HubFile(path.relative_to(snapshot).as_posix()) for path in paths]
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
        if _is_mlx_model(snapshot):
            yield StoredModel("hub", (repository, f"hf:{repository}"), snapshot, "mlx")


def _is_mlx_model(folder: Path) -> bool:
    """Return whether a folder contains all files of an MLX model."""
    try:
        return not missing_files(folder)
    except (ModelFileError, OSError):
        return False
