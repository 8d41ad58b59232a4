"""Look up Ollama and LM Studio models by the reference that the user typed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.store.lmstudio import lmstudio_file, lmstudio_model, lmstudio_models
from edgespec.store.ollama import ollama_model, ollama_models
from edgespec.store.stored_models import StoredModel

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
    if store == "ollama":
        program, model, stored = "Ollama", ollama_model(*_split(name)), ollama_models
    else:
        model = lmstudio_file(name) or lmstudio_model(*_split(name))
        program, stored = "LM Studio", lmstudio_models
    if model:
        return model
    names = [one.names[0] for one in stored() if one.path]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.4) or names[:2]
    raise ModelNotFoundError(
        f"{program} has no model {name} on this machine",
        f"its models include {' and '.join(near)}"
        if near
        else "`edgespec models list` shows the models on this machine",
    )


def find_by_missing_path(path: Path) -> StoredModel | None:
    """Return the LM Studio or Ollama model whose name is `path`, unless a file with this path exists.

    LM Studio names can look like publisher/repo/file.gguf, and Ollama names like registry/owner/name:tag.
    """
    text = path.as_posix()
    if path.is_absolute() or text.count("/") < 2 or text.startswith(("./", "../", "~")):
        return None
    with suppress(OSError, ValueError):
        if path.exists() or path.is_symlink():
            return None
    return lmstudio_file(text) if text.lower().endswith(".gguf") else ollama_model(*_split(text))


def find_in_other_programs(
    repository: str, quantisation: str | None, *, hub_only: bool = False
) -> list[StoredModel]:
    """Return the usable models that LM Studio and Ollama downloaded from a Hugging Face repository.

    Args:
        repository: `user/repo`.
        quantisation: A label or the name of a `.gguf` file. Defaults to the default quantisation.
        hub_only: Whether to ignore models named `user/repo` from Ollama's own registry, which is a separate
            namespace.
    """
    registries = ["hf.co", "huggingface.co", *([] if hub_only else ["registry.ollama.ai"])]
    stored = [ollama_model(f"{registry}/{repository}", quantisation) for registry in registries]
    return [one for one in (lmstudio_model(repository, quantisation), *stored) if one and one.path]


def are_same_size(paths: Iterable[Path]) -> bool:
    """Return whether all models have exactly the same size, and are therefore probably copies."""
    return len({_size(path) for path in paths}) <= 1


def ollama_names() -> list[str]:
    """Return the names of all usable models in Ollama."""
    return [one.names[0] for one in ollama_models() if one.path]


def installed_names() -> list[str]:
    """Return the shortest name of each usable model in Ollama and LM Studio."""
    return [*ollama_names(), *(one.names[0] for one in lmstudio_models() if one.path)]


def _split(name: str) -> tuple[str, str | None]:
    base, colon, tag = name.rpartition(":")
    return (base, tag) if colon and "/" not in tag else (name, None)


def _size(path: Path) -> int:
    try:
        files = list(path.glob("*.safetensors")) if path.is_dir() else gguf_files(path)
        return sum(file.stat().st_size for file in files)
    except (OSError, ModelFileError):
        return -1
