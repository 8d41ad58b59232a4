"""Models in MLX's form: which files of a repository they are, and what a folder of them lacks."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from edgespec.backends.mlx_files import is_weights, missing_among, missing_files
from edgespec.catalog.hub_files import HubFile, repository_folder, snapshots
from edgespec.errors import ModelFileError, ModelNotFoundError

__all__ = ["cached_folder", "choose_folder_files"]

_OTHERS = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")


def choose_folder_files(repository: str, files: Iterable[HubFile]) -> list[HubFile]:
    """The files of a repository that make up its MLX model, the weights last.

    Raises ModelNotFoundError, naming what is not there, when they make up none.
    """
    wanted = [file for file in files if "/" not in file.name and _is_wanted(file.name)]
    missing = missing_among(file.name for file in wanted)
    if missing:
        raise ModelNotFoundError(
            f"{repository} holds no GGUF model, and for an MLX one it lacks {', '.join(missing)}",
            "look for a repository of the same model that ends in -GGUF, or one of mlx-community",
        )
    return sorted(wanted, key=lambda file: (is_weights(file.name), file.name))


def cached_folder(cache: Path, repository: str) -> Path | None:
    """The model in MLX's form that is wholly in the shared cache, found without a network, or None."""
    for snapshot in snapshots(repository_folder(cache, repository)):
        try:
            if not missing_files(snapshot):
                return snapshot
        except (ModelFileError, OSError):
            continue
    return None


def _is_wanted(name: str) -> bool:
    return is_weights(name) or any(fnmatchcase(name, pattern) for pattern in _OTHERS)
