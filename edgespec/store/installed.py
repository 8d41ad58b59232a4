"""Find the models on this machine, whichever program installed them, without modifying their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.model.model_info import ModelInfo, ModelKind
from edgespec.model.registry import format_of, same_backend
from edgespec.model.trial_load import TrialModel, why_refused
from edgespec.store.catalogue import ModelEntry, ModelFormat, load_catalogue
from edgespec.store.hub_cache import hub_models
from edgespec.store.lmstudio import lmstudio_models
from edgespec.store.metadata_cache import model_info
from edgespec.store.ollama import ollama_models
from edgespec.store.prepared.prepared_files import PreparedModel, list_prepared
from edgespec.store.reference import Resolved, Source, resolve
from edgespec.store.stored_models import StoredModel

__all__ = [
    "InstalledModel",
    "InstalledModels",
    "UnusableModel",
    "find_installed",
    "loaded_bytes",
    "model_info_or_none",
    "read_model_info",
    "refusal_of",
    "smaller_models",
    "smaller_quantisations",
]

_NOT_MODELS: dict[ModelKind, str] = {
    "projector": "the file is an image projector, not a language model",
    "adapter": "the file is an adapter, not a model",
    "embedding": "the file is an embedding model, which does not generate text",
    "other": "the file is not a language model",
}


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model on this machine.

    Attributes:
        reference: The shortest reference to this model.
        place: Where the model is stored: `ollama`, `lmstudio`, `hub` (the Hugging Face cache), `embedded`
            (part of edgespec), or `path` (elsewhere).
        path: The model's file or folder.
        format: Name of the model's file format.
        info: The model's metadata.
        entry: The model's entry in the catalogue, if it has one.
        adapters: Adapters that are part of the model.
    """

    reference: str
    place: Source
    path: Path
    format: ModelFormat
    info: ModelInfo
    entry: ModelEntry | None = None
    adapters: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The model's path and its adapters, which together identify the model."""
        return (self.path, *self.adapters)


class UnusableModel(NamedTuple):
    """A model in another program's store that edgespec cannot run, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class InstalledModels:
    """All models found on this machine.

    Attributes:
        models: The models that edgespec can run.
        prepared: Files that `edgespec prepare` created.
        unusable: Models that edgespec cannot run.
    """

    models: tuple[InstalledModel, ...]
    prepared: tuple[PreparedModel, ...]
    unusable: tuple[UnusableModel, ...]


def find_installed(*, include_embedded: bool = False) -> InstalledModels:
    """Find the models in Ollama, LM Studio and the Hugging Face cache. Never raises.

    Args:
        include_embedded: Whether to include the models that are part of edgespec.
    """
    models, unusable, doubtful = [], [], []
    embedded = _embedded() if include_embedded else ()
    for stored in chain(embedded, ollama_models(), lmstudio_models(), hub_models()):
        try:
            if stored.path is None:
                raise ModelFileError(stored.problem)
            info = model_info(stored.path, stored.format)
            if info.kind == "head":
                continue  # `edgespec models show` lists heads with their target.
            if info.kind != "model":
                raise ModelFileError(_NOT_MODELS[info.kind], code="wrong_file")
            reference, entry = _shortest_reference(stored)
            model = InstalledModel(
                reference, stored.store, stored.path, stored.format, info, entry, stored.adapters
            )
            models.append(model)
            if info.doubt:
                doubtful.append((model, stored.names[0]))
        except (EdgespecError, OSError) as error:
            unusable.append(UnusableModel(stored.names[0], str(error)))
    for (model, name), reason in zip(doubtful, _refusals([model for model, _ in doubtful]), strict=True):
        if reason:
            models.remove(model)
            unusable.append(UnusableModel(name, reason))
    return InstalledModels(tuple(models), tuple(list_prepared()), tuple(unusable))


def _refusals(models: Sequence[InstalledModel]) -> list[str]:
    trials = (TrialModel(each.reference, each.path, format_of(each.format), runs=False) for each in models)
    return [
        reason.removeprefix(f"{model.path} ")
        for model, reason in zip(models, why_refused([*trials]), strict=True)
    ]


def refusal_of(resolved: Resolved, info: ModelInfo) -> str:
    """Return why the backend rejects a model with this metadata. Empty if the model seems usable."""
    if not info.doubt:
        return ""
    (reason,) = why_refused([TrialModel(resolved.name, resolved.path, resolved.file_format, runs=False)])
    return reason


def loaded_bytes(info: ModelInfo, entry: ModelEntry | None) -> int:
    """Return the size of the file that edgespec loads for a model with this metadata.

    edgespec converts a model in a Python package to its default quantisation when it is first loaded.

    Args:
        info: The metadata of the model's files.
        entry: The model's entry in the catalogue, if it has one.
    """
    is_converted = entry is not None and entry.packaged_quantisation == info.quantisation
    return entry.approximate_file_bytes if entry and is_converted else info.size_bytes


def read_model_info(resolved: Resolved) -> ModelInfo:
    """Return the metadata of a model. Raises ModelFileError if its files cannot be read."""
    return model_info(resolved.path, resolved.format)


def model_info_or_none(resolved: Resolved) -> ModelInfo | None:
    """Return the metadata of a model, or None if its files cannot be read."""
    try:
        return read_model_info(resolved)
    except EdgespecError:
        return None


def smaller_quantisations(resolved: Resolved, installed: InstalledModels) -> list[Resolved]:
    """Return installed versions of the same model with fewer bits per weight, largest first."""
    return _resolve_all(model for model, is_same in _smaller(resolved, installed) if is_same)


def smaller_models(resolved: Resolved, installed: InstalledModels) -> list[Resolved]:
    """Return smaller installed models: quantisations of the same model first, then others by size."""
    smaller = sorted(_smaller(resolved, installed), key=lambda pair: not pair[1])
    return _resolve_all(model for model, _ in smaller)


def _embedded() -> Iterator[StoredModel]:
    for entry in load_catalogue().entries:
        with suppress(EdgespecError):
            path = resolve(entry.name, allow_download=False).path if entry.package else entry.embedded_path
            if path is not None:
                yield StoredModel("embedded", (entry.name,), path, entry.format)


def _shortest_reference(stored: StoredModel) -> tuple[str, ModelEntry | None]:
    """Return a model's shortest reference and its catalogue entry, or its path and None."""
    for name in stored.names:
        try:
            resolved = resolve(name, allow_download=False)
        except EdgespecError:
            continue
        if resolved.path == stored.path:
            return name, resolved.entry
    return str(stored.path), None


def _smaller(resolved: Resolved, installed: InstalledModels) -> list[tuple[InstalledModel, bool]]:
    """Return smaller models that run on the same backend, largest first.

    Each model comes with a flag for whether it is another quantisation of the same model.
    """
    info = model_info_or_none(resolved)
    smaller = [
        (one, info is not None and _is_same_model(one.info, info))
        for one in installed.models
        if same_backend(one.format, resolved.format)
        and one.path != resolved.path
        and (info is None or one.info.size_bytes < info.size_bytes)
    ]
    return sorted(smaller, key=lambda pair: (-pair[0].info.size_bytes, pair[0].reference))


def _is_same_model(one: ModelInfo, other: ModelInfo) -> bool:
    first, second = (
        (info.architecture, info.family, info.parameters, info.vocabulary) for info in (one, other)
    )
    return bool(one.vocabulary) and first == second


def _resolve_all(models: Iterable[InstalledModel]) -> list[Resolved]:
    resolved = []
    for one in models:
        try:
            resolved.append(resolve(one.reference, allow_download=False))
        except EdgespecError:
            continue
    return resolved
