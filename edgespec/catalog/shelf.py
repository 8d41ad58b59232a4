"""The shelf: every model on this machine, whoever put it there. Looked at in place, never written to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from edgespec.backends.model_info import Kind, ModelInfo
from edgespec.catalog.catalogue import ModelEntry, ModelFormat, load_catalogue
from edgespec.catalog.hub_store import hub_models
from edgespec.catalog.known import Known
from edgespec.catalog.lmstudio import lmstudio_models
from edgespec.catalog.ollama import ollama_models
from edgespec.catalog.reference import Resolved, resolve
from edgespec.catalog.stored import Stored
from edgespec.errors import EdgespecError, ModelFileError
from edgespec.prepare.store import PreparedModel, list_prepared

__all__ = ["Shelf", "Shelved", "Skipped", "info_of", "look"]

_NOT_MODELS: dict[Kind, str] = {
    "projector": "it is a projector for pictures, not a model",
    "adapter": "it is an adapter, not a model",
    "embedding": "it embeds text and writes none",
    "head": "it drafts from the hidden states of another model",
    "other": "it is no language model",
}
Place = Literal["embedded", "ollama", "lmstudio", "hub"]


@dataclass(frozen=True, slots=True)
class Shelved:
    """A model on this machine. reference: what to type for it. entry: of the catalogue, if it is there."""

    reference: str
    place: Place
    path: Path
    format: ModelFormat
    info: ModelInfo
    entry: ModelEntry | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something in a store that cannot be used, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Shelf:
    """What is on this machine. prepared: what `edgespec prepare` made. known: keeps what was looked up."""

    models: tuple[Shelved, ...]
    prepared: tuple[PreparedModel, ...]
    skipped: tuple[Skipped, ...]
    known: Known = field(compare=False, repr=False)


def look(*, embedded: bool = False) -> Shelf:
    """Look through the stores of Ollama, LM Studio and the Hugging Face cache. Raises nothing.

    embedded: the models that come with edgespec as well.
    """
    known = Known()
    models, skipped = [], []
    for place, stored in chain(_embedded() if embedded else (), _stores()):
        try:
            if stored.path is None:
                raise ModelFileError(stored.problem)
            info = known.info(stored.path, stored.format)
            if info.kind != "model":
                raise ModelFileError(_NOT_MODELS[info.kind])
            reference, entry = _reference(stored)
            models.append(Shelved(reference, place, stored.path, stored.format, info, entry))
        except (EdgespecError, OSError) as error:
            skipped.append(Skipped(stored.names[0], str(error)))
    known.keep()
    return Shelf(tuple(models), tuple(list_prepared()), tuple(skipped), known)


def info_of(found: Resolved, known: Known) -> ModelInfo:
    """The facts of a model that was found. Raises ModelFileError."""
    return known.info(found.path, found.format)


def _stores() -> Iterator[tuple[Place, Stored]]:
    for store in (ollama_models, lmstudio_models, hub_models):
        for stored in store():
            yield stored.store, stored


def _embedded() -> Iterator[tuple[Place, Stored]]:
    for entry in load_catalogue().entries:
        if entry.embedded_path is not None:
            yield "embedded", Stored("hub", (entry.name,), entry.embedded_path, entry.format)


def _reference(stored: Stored) -> tuple[str, ModelEntry | None]:
    """The shortest reference that leads to this model and no other; its path where none does."""
    for name in stored.names:
        try:
            found = resolve(name, allow_download=False)
        except EdgespecError:
            continue
        if found.path == stored.path:
            return name, found.entry
    return str(stored.path), None
