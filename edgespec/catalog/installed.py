"""The shelf: every model on this machine, whoever put it there. Looked at in place, never written to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from edgespec.backends.model_info import Kind, ModelInfo
from edgespec.backends.registry import same_backend
from edgespec.catalog.catalogue import ModelEntry, ModelFormat, load_catalogue
from edgespec.catalog.hub_cache import hub_models
from edgespec.catalog.lmstudio import lmstudio_models
from edgespec.catalog.metadata_cache import MetadataCache
from edgespec.catalog.ollama import ollama_models
from edgespec.catalog.reference import Resolved, resolve
from edgespec.catalog.stored_models import StoredModel
from edgespec.errors import EdgespecError, ModelFileError
from edgespec.prepare.store import PreparedModel, list_prepared

__all__ = [
    "InstalledModel",
    "InstalledModels",
    "UnusableModel",
    "find_installed",
    "read_model_info",
    "smaller_models",
    "smaller_quantisations",
]

_NOT_MODELS: dict[Kind, str] = {
    "projector": "it is a projector for pictures, not a model",
    "adapter": "it is an adapter, not a model",
    "embedding": "it embeds text and writes none",
    "head": "it drafts from the hidden states of another model",
    "other": "it is no language model",
}
Place = Literal["embedded", "ollama", "lmstudio", "hub"]


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model on this machine. reference: what to type for it. entry: of the catalogue, if it is there."""

    reference: str
    place: Place
    path: Path
    format: ModelFormat
    info: ModelInfo
    entry: ModelEntry | None = None


@dataclass(frozen=True, slots=True)
class UnusableModel:
    """Something in a store that cannot be used, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class InstalledModels:
    """What is on this machine. prepared: what `edgespec prepare` made. known: keeps what was looked up."""

    models: tuple[InstalledModel, ...]
    prepared: tuple[PreparedModel, ...]
    skipped: tuple[UnusableModel, ...]
    known: MetadataCache = field(compare=False, repr=False)


def find_installed(*, include_embedded: bool = False) -> InstalledModels:
    """Look through the stores of Ollama, LM Studio and the Hugging Face cache. Raises nothing.

    include_embedded: the models that come with edgespec as well.
    """
    known = MetadataCache()
    models, skipped = [], []
    for place, stored in chain(_embedded() if include_embedded else (), _stores()):
        try:
            if stored.path is None:
                raise ModelFileError(stored.problem)
            info = known.info(stored.path, stored.format)
            if info.kind != "model":
                raise ModelFileError(_NOT_MODELS[info.kind])
            reference, entry = _reference(stored)
            models.append(InstalledModel(reference, place, stored.path, stored.format, info, entry))
        except (EdgespecError, OSError) as error:
            skipped.append(UnusableModel(stored.names[0], str(error)))
    known.keep()
    return InstalledModels(tuple(models), tuple(list_prepared()), tuple(skipped), known)


def read_model_info(found: Resolved, known: MetadataCache) -> ModelInfo:
    """The facts of a model that was found. Raises ModelFileError."""
    return known.info(found.path, found.format)


def _stores() -> Iterator[tuple[Place, StoredModel]]:
    for store in (ollama_models, lmstudio_models, hub_models):
        for stored in store():
            yield stored.store, stored


def _embedded() -> Iterator[tuple[Place, StoredModel]]:
    for entry in load_catalogue().entries:
        if entry.embedded_path is not None:
            yield "embedded", StoredModel("hub", (entry.name,), entry.embedded_path, entry.format)


def _reference(stored: StoredModel) -> tuple[str, ModelEntry | None]:
    """The shortest reference that leads to this model and no other; its path where none does."""
    for name in stored.names:
        try:
            found = resolve(name, allow_download=False)
        except EdgespecError:
            continue
        if found.path == stored.path:
            return name, found.entry
    return str(stored.path), None


def smaller_quantisations(found: Resolved, shelf: InstalledModels) -> list[Resolved]:
    """Smaller files of the same model with the same tokens, the largest first."""
    info = _info(found, shelf)
    return _resolved(one for one in _smaller(found, info, shelf) if info and _is_same(one.info, info))


def smaller_models(found: Resolved, shelf: InstalledModels) -> list[Resolved]:
    """Smaller models, the largest first; smaller files of the same one before all others."""
    info = _info(found, shelf)
    smaller = _smaller(found, info, shelf)
    return _resolved(sorted(smaller, key=lambda one: not (info and _is_same(one.info, info))))


def _info(found: Resolved, shelf: InstalledModels) -> ModelInfo | None:
    try:
        return read_model_info(found, shelf.known)
    except EdgespecError:
        return None


def _smaller(found: Resolved, info: ModelInfo | None, shelf: InstalledModels) -> list[InstalledModel]:
    smaller = [
        one
        for one in shelf.models
        if same_backend(one.format, found.format)
        and one.path != found.path
        and (info is None or one.info.size_bytes < info.size_bytes)
    ]
    return sorted(smaller, key=lambda one: (-one.info.size_bytes, one.reference))


def _is_same(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether these are one model, perhaps with other bits."""
    mine, its = ((info.architecture, info.family, info.parameters, info.vocabulary) for info in (one, other))
    return bool(one.vocabulary) and mine == its


def _resolved(models: Iterable[InstalledModel]) -> list[Resolved]:
    found = []
    for one in models:
        try:
            found.append(resolve(one.reference, allow_download=False))
        except EdgespecError:
            continue
    return found
