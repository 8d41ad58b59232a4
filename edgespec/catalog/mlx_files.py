"""Models in MLX's form: which files of a repository they are, and what a folder of them lacks."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from edgespec.backends.checkpoint_names import TOKENIZERS, WEIGHTS, WEIGHTS_INDEX
from edgespec.catalog.hub_files import HubFile, repository_folder, snapshots
from edgespec.errors import BackendMissingError, ModelFileError, ModelNotFoundError

__all__ = ["cached_folder", "choose_folder_files", "lacking", "mlx_installed", "require_mlx"]

_OTHERS = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")


def mlx_installed() -> bool:
    """Whether the libraries that run MLX models are installed, without importing them."""
    return all(importlib.util.find_spec(library) is not None for library in ("mlx", "mlx_lm"))


def require_mlx(model: str) -> None:
    """Raises BackendMissingError, naming what to install, where MLX models cannot run."""
    if not mlx_installed():
        raise BackendMissingError(
            f"{model} is an MLX model, and mlx with mlx-lm is not installed",
            'install them with `pip install "edgespec[mlx]"`, or choose a GGUF model',
        )


def choose_folder_files(repository: str, files: Iterable[HubFile]) -> list[HubFile]:
    """The files of a repository that make up its MLX model, the weights last.

    Raises ModelNotFoundError, naming what is not there, when they make up none.
    """
    wanted = [file for file in files if "/" not in file.name and _is_wanted(file.name)]
    missing = _missing(file.name for file in wanted)
    if missing:
        raise ModelNotFoundError(
            f"{repository} holds no GGUF model, and for an MLX one it lacks {', '.join(missing)}",
            "look for a repository of the same model that ends in -GGUF, or one of mlx-community",
        )
    return sorted(wanted, key=lambda file: (_is_weights(file.name), file.name))


def lacking(folder: Path) -> list[str]:
    """What a folder lacks of a model in MLX's form, each as a file name; empty when it is whole.

    Raises ModelFileError when its index of the weights cannot be understood.
    """
    # A link whose blob is gone does not exist, so an interrupted download is never taken for a model.
    names = {path.name for path in folder.iterdir() if path.is_file()}
    listed = _listed_weights(folder / WEIGHTS_INDEX) - names if WEIGHTS_INDEX in names else set()
    return list(dict.fromkeys([*_missing(names), *sorted(listed)]))


def cached_folder(cache: Path, repository: str) -> Path | None:
    """The model in MLX's form that is wholly in the shared cache, found without a network, or None."""
    for snapshot in snapshots(repository_folder(cache, repository)):
        try:
            if not lacking(snapshot):
                return snapshot
        except (ModelFileError, OSError):
            continue
    return None


def _is_weights(name: str) -> bool:
    return fnmatchcase(name, WEIGHTS)


def _is_wanted(name: str) -> bool:
    return _is_weights(name) or any(fnmatchcase(name, pattern) for pattern in _OTHERS)


def _missing(names: Iterable[str]) -> list[str]:
    names = set(names)
    missing = [] if "config.json" in names else ["config.json"]
    if not any(fnmatchcase(name, pattern) for name in names for pattern in TOKENIZERS):
        missing.append("tokenizer.json")
    weights = sorted(name for name in names if _is_weights(name))
    if not weights:
        return [*missing, "model.safetensors"]
    for name in weights:
        if part := _PART.search(name):
            count = int(part.group(1))
            every = (f"{name[: part.start()]}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))
            missing += [wanted for wanted in every if wanted not in names and wanted not in missing]
    return missing


def _listed_weights(index: Path) -> set[str]:
    """The weight files that an index speaks of."""
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{index} is no index of weights: {type(error).__name__}", "download the model again"
        ) from error
