"""The stores of other programs, asked for a model by what a person typed."""

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
    """What a store calls `name`. Raises ModelNotFoundError, naming the nearest, when it has none."""
    found = _in_ollama(name) if store == "ollama" else lmstudio_file(name) or lmstudio_model(*_split(name))
    if found:
        return found
    stored = ollama_models() if store == "ollama" else lmstudio_models()
    names = [one.names[0] for one in stored if one.path]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.4) or names[:2]
    raise ModelNotFoundError(
        f"{'Ollama' if store == 'ollama' else 'LM Studio'} has no model {name} on this machine",
        f"it has {' and '.join(near)}" if near else "`edgespec models list` shows what is here",
    )


def find_by_missing_path(path: Path) -> StoredModel | None:
    """What a path that leads nowhere may mean instead: publisher/repo/file.gguf, registry/owner/name:tag."""
    text = path.as_posix()
    if path.is_absolute() or text.count("/") < 2 or text.startswith(("./", "../", "~")):
        return None
    with suppress(OSError, ValueError):
        if path.exists() or path.is_symlink():
            return None
    found = lmstudio_file(text)
    return found or (_in_ollama(text) if not text.lower().endswith(".gguf") else None)


def find_in_other_programs(
    repository: str, quantisation: str | None, *, hub_only: bool = False
) -> list[StoredModel]:
    """What LM Studio and Ollama keep under the name of a hub repository.

    hub_only: without what Ollama calls owner/name in its own registry, which is another thing.
    """
    registries = (
        ["hf.co", "huggingface.co"] if hub_only else ["hf.co", "huggingface.co", "registry.ollama.ai"]
    )
    kept = [ollama_model(f"{registry}/{repository}", quantisation) for registry in registries]
    return [one for one in (lmstudio_model(repository, quantisation), *kept) if one]


def are_same_size(paths: Sequence[Path]) -> bool:
    """Whether models at several places are of one size, to the byte: copies of each other."""
    return len({_size(path) for path in paths}) <= 1


def ollama_names() -> list[str]:
    """The names of all that Ollama has and that can be used."""
    return [one.names[0] for one in ollama_models() if one.path]


def installed_names() -> list[str]:
    """The shortest names of all that Ollama and LM Studio have and that can be used."""
    return [*ollama_names(), *(one.names[0] for one in lmstudio_models() if one.path)]


def _in_ollama(name: str) -> StoredModel | None:
    return ollama_model(*_split(name))


def _split(name: str) -> tuple[str, str | None]:
    """A name and what stands after its colon."""
    base, colon, tag = name.rpartition(":")
    return (base, tag) if colon and "/" not in tag else (name, None)


def _size(path: Path) -> int:
    try:
        files = list(path.glob("*.safetensors")) if path.is_dir() else gguf_files(path)
        return sum(file.stat().st_size for file in files)
    except (OSError, ModelFileError):
        return -1
