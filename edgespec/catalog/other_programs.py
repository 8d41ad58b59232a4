"""Finds models in the stores of Ollama and LM Studio by the reference that the user typed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from edgespec.backends.gguf_files import gguf_files
from edgespec.catalog.lmstudio import lmstudio_file, lmstudio_model, lmstudio_models
from edgespec.catalog.ollama import ollama_model, ollama_models
from edgespec.catalog.stored_models import StoredModel
from edgespec.errors import ModelFileError, ModelNotFoundError

__all__ = [
    "are_same_size",
    "find_by_missing_path",
    "find_in_other_programs",
    "find_in_store",
    "installed_names",
    "ollama_names",
]


def find_in_store(store: Literal["ollama", "lmstudio"], name: str) -> StoredModel:
    """Return the model named `name` in Ollama or LM Studio.

    Raises:
        ModelNotFoundError: There is no such model. The hint lists similar names.
    """
    model = _in_ollama(name) if store == "ollama" else lmstudio_file(name) or lmstudio_model(*_split(name))
    if model:
        return model
    stored = ollama_models() if store == "ollama" else lmstudio_models()
    names = [one.names[0] for one in stored if one.path]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.4) or names[:2]
    raise ModelNotFoundError(
        f"{'Ollama' if store == 'ollama' else 'LM Studio'} has no model {name} on this machine",
        f"its models include {' and '.join(near)}"
        if near
        else "`edgespec models list` shows the models on this machine",
    )


def find_by_missing_path(path: Path) -> StoredModel | None:
    """Return the model that a missing path names: publisher/repo/file.gguf or registry/owner/name:tag."""
    text = path.as_posix()
    if path.is_absolute() or text.count("/") < 2 or text.startswith(("./", "../", "~")):
        return None
    with suppress(OSError, ValueError):
        if path.exists() or path.is_symlink():
            return None
    model = lmstudio_file(text)
    return model or (_in_ollama(text) if not text.lower().endswith(".gguf") else None)


def find_in_other_programs(
    repository: str, quantisation: str | None, *, hub_only: bool = False
) -> list[StoredModel]:
    """Return the models from a Hugging Face repository that LM Studio and Ollama have downloaded.

    Args:
        repository: `user/repo`.
        quantisation: A label or the name of a `.gguf` file. The default quantisation if None.
        hub_only: Ignore models named `user/repo` in Ollama's own registry, which is a separate namespace.
    """
    registries = (
        ["hf.co", "huggingface.co"] if hub_only else ["hf.co", "huggingface.co", "registry.ollama.ai"]
    )
    stored = [ollama_model(f"{registry}/{repository}", quantisation) for registry in registries]
    return [one for one in (lmstudio_model(repository, quantisation), *stored) if one]


def are_same_size(paths: Sequence[Path]) -> bool:
    """Return whether all models have exactly the same size, so that they are probably copies."""
    return len({_size(path) for path in paths}) <= 1


def ollama_names() -> list[str]:
    """Return the names of all usable models in Ollama."""
    return [one.names[0] for one in ollama_models() if one.path]


def installed_names() -> list[str]:
    """Return the shortest names of all usable models in Ollama and LM Studio."""
    return [*ollama_names(), *(one.names[0] for one in lmstudio_models() if one.path)]


def _in_ollama(name: str) -> StoredModel | None:
    return ollama_model(*_split(name))


def _split(name: str) -> tuple[str, str | None]:
    """Split a name at its last colon into name and tag."""
    base, colon, tag = name.rpartition(":")
    return (base, tag) if colon and "/" not in tag else (name, None)


def _size(path: Path) -> int:
    try:
        files = list(path.glob("*.safetensors")) if path.is_dir() else gguf_files(path)
        return sum(file.stat().st_size for file in files)
    except (OSError, ModelFileError):
        return -1
