"""Find, describe and remove the models on this machine, whichever program installed them.

Metadata is cached across runs until one of a model's files changes. By default, replies use the sampling
settings that a model's makers recommend. Models that belong to other programs are never modified or deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import EdgespecError, ModelFileError, OptionError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.projector import read_projector
from edgespec.model.heads.mtp_files import mtp_files
from edgespec.model.model_facts import ModelInfo, ModelKind
from edgespec.model.registry import format_of, same_backend
from edgespec.model.token_list import TokenList
from edgespec.model.trial_load import TrialModel, why_refused
from edgespec.store.catalogue import ModelEntry, ModelFormat, load_catalogue
from edgespec.store.hub_files import (
    HubFile,
    best_projector,
    hub_cache_folder,
    hub_models,
    is_gguf_model,
    is_projector,
    snapshot_folder,
)
from edgespec.store.lmstudio import lmstudio_models, lmstudio_repository
from edgespec.store.ollama import ollama_models
from edgespec.store.prepared_files import PreparedModel, list_prepared
from edgespec.store.reference import Resolved, Source, resolve
from edgespec.store.stored_models import REPOSITORY_DEPTH, EntryBudget, StoredModel, files_below
from edgespec.system.facts import Facts
from edgespec.system.files import delete_files, error_reason, reading_model_files, write_advice

_NOT_MODELS: dict[ModelKind, str] = {
    "projector": "the file is an image projector, not a language model",
    "adapter": "the file is an adapter, not a model",
    "embedding": "the file is an embedding model, which does not generate text",
    "other": "the file is not a language model",
}
# Increment this when `read_info` returns different values for the same files, or when a field's type changes.
_VERSION = 6
# Fields of `ModelInfo` that are sequences.
_SEQUENCES = ("heads", "read_layers")
# Reasons why edgespec does not remove a model, each with a hint, keyed by where the model was found.
_REFUSALS = {
    "embedded": ("it is part of edgespec", ""),
    "ollama": ("it is managed by Ollama", "delete it with `ollama rm`"),
    "lmstudio": ("it is managed by LM Studio", "delete it in LM Studio"),
    "path": ("it is your own file", "delete the file yourself"),
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
        """The model's path and its adapters' paths, which together identify the model."""
        return (self.path, *self.adapters)


class UnusableModel(NamedTuple):
    """A model in another program's store that edgespec cannot run, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class InstalledModels:
    """All models found on this machine.

    Attributes:
        models: Models that edgespec can run.
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
    """Return why the backend rejects a model with this metadata, or an empty string if it seems usable."""
    if not info.doubt:
        return ""
    (reason,) = why_refused([TrialModel(resolved.name, resolved.path, resolved.file_format, runs=False)])
    return reason


def loaded_bytes(info: ModelInfo, entry: ModelEntry | None) -> int:
    """Return the size of the file that edgespec loads for a model with this metadata.

    edgespec converts a model from a Python package to its default quantisation when it is first loaded.

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
    """Return installed versions of the same model that have fewer bits per weight, largest first."""
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
    """Return a model's shortest working reference and its catalogue entry, or its path and None."""
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


class ModelVocabulary(NamedTuple):
    """A model's path, its file format and the hash of its tokens."""

    path: Path
    format: ModelFormat
    digest: str


def model_info(path: Path, form: ModelFormat) -> ModelInfo:
    """Return the metadata of the model at `path`. Raises ModelFileError if it cannot be read."""
    state = f"{files_fingerprint(path, form)} {_VERSION}"
    match Facts().get("model", str(path)):
        case [str(saved_state), dict(value)] if saved_state == state:
            with suppress(TypeError, KeyError):
                return ModelInfo(**{**value, **{name: tuple(value[name]) for name in _SEQUENCES}})
    info = format_of(form).read_info(path)
    Facts().put("model", {str(path): [state, asdict(info)]})
    return info


def same_token_ids(target: ModelVocabulary, draft: ModelVocabulary) -> bool:
    """Return whether the models use the same token IDs, or True if that is unknown."""
    if not target.digest or not draft.digest or target.digest == draft.digest:
        return True
    target_tokens, draft_tokens = _read_tokens(target, draft)
    return target_tokens is None or draft_tokens is None or target_tokens.same_ids(draft_tokens)


def shared_token_fraction(target: ModelVocabulary, draft: ModelVocabulary) -> float | None:
    """Return the fraction of the target's tokens that the draft model also has, or None if it is unknown."""
    if not target.digest or not draft.digest:
        return None
    if target.digest == draft.digest:
        return 1.0
    key = f"{target.digest} {draft.digest}"
    match Facts().get("shared tokens", key):
        case float(saved):
            return saved
    target_tokens, draft_tokens = _read_tokens(target, draft)
    if target_tokens is None or draft_tokens is None:
        return None
    fraction = float(target_tokens.shared_token_fraction(draft_tokens))
    Facts().put("shared tokens", {key: fraction})
    return fraction


def _read_tokens(
    target: ModelVocabulary, draft: ModelVocabulary
) -> tuple[TokenList | None, TokenList | None]:
    try:
        target_tokens = format_of(target.format).read_tokens(target.path)
        return target_tokens, format_of(draft.format).read_tokens(draft.path)
    except ModelFileError:
        return None, None


def files_fingerprint(path: Path, form: ModelFormat) -> str:
    """Return a hash of the names, sizes and modification times of a model's files. Raises ModelFileError."""
    with reading_model_files(path):
        stamps = file_stamps(format_of(form).named_files(path))
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:32]


def file_stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the name, size and modification time of each file. Raises OSError."""
    return [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]


def model_repository(path: Path) -> Path | None:
    """Return the folder with all files of the repository that a model's file is from.

    Returns None if the file is neither in a Hugging Face cache nor in LM Studio.
    """
    return snapshot_folder(path) or lmstudio_repository(path)


def find_projector(model: Resolved) -> Path | None:
    """Return the projector that is stored with a model, or None.

    Ollama stores the projector as part of the model. Other projectors are in the folder of the model's file,
    or elsewhere in its repository in LM Studio or the Hugging Face cache.
    """
    if model.projector:
        return model.projector
    info = model_info_or_none(model)
    repository = model_repository(model.path)
    folder = repository or model.path.parent
    files = files_below(folder, REPOSITORY_DEPTH if repository else 0, EntryBudget())
    names = [path.relative_to(folder).as_posix() for path in files]
    own_name = model.path.relative_to(folder).as_posix()
    # A folder can also contain other models' projectors, so check the size.
    while info and (name := best_projector(names, own_name)):
        with suppress(ModelFileError):
            if read_projector(folder / name).hidden_size == info.hidden_size:
                return folder / name
        names.remove(name)
    return None


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """The files to delete when a model is removed.

    Attributes:
        links: Links in the cache's snapshots.
        blobs: Data files that no other model uses.
    """

    links: tuple[Path, ...]
    blobs: tuple[Path, ...]

    @property
    def size_bytes(self) -> int:
        """Number of bytes that the removal will free."""
        return sum(path.stat().st_size for path in self.blobs)

    def execute(self) -> int:
        """Delete the model's files and return the number of bytes freed. Raises ModelFileError on failure."""
        try:
            freed_bytes = delete_files(self.blobs)
            for link in self.links:
                link.unlink(missing_ok=True)
                # Delete the folders that are now empty.
                with suppress(OSError):
                    for folder in link.parents:
                        folder.rmdir()
        except OSError as error:
            raise ModelFileError(
                f"{self.links[0]} cannot be deleted: {error_reason(error)}",
                write_advice(error, self.links[0].parent),
                code="file_not_written",
            ) from error
        return freed_bytes


def plan_removal(resolved: Resolved) -> RemovalPlan:
    """Find the files that belong only to this cached model.

    Raises:
        OptionError: The model is not in the Hugging Face cache.
    """
    if resolved.source != "hub":
        reason, hint = _REFUSALS[resolved.source]
        raise OptionError(f"cannot remove {resolved.name}: {reason}", hint)
    cache = hub_cache_folder().resolve()
    if resolved.path.is_dir():
        files = {*resolved.path.iterdir(), *mtp_files(resolved.path)}
        links = sorted(path for path in files if path.is_file())
    else:
        parts = gguf_files(resolved.path)
        links = [*parts, *_unused_projectors(resolved.path, parts)]
    repository = next((p for p in resolved.path.absolute().parents if p.name.startswith("models--")), None)
    if repository is None or not repository.resolve().is_relative_to(cache):
        raise OptionError(
            f"cannot remove {resolved.path}: it is not in the Hugging Face cache {cache}",
            "delete it yourself",
        )
    own = {link.absolute() for link in links}
    others = {
        path.resolve()
        for path in (repository / "snapshots").rglob("*")
        if path.is_file() and path.absolute() not in own
    }
    blobs = {link.resolve() for link in links} - others
    if not all(blob.is_relative_to(cache) for blob in blobs):
        raise OptionError(
            f"cannot remove {resolved.path}: it links to files outside the Hugging Face cache {cache}",
            "delete it yourself",
        )
    return RemovalPlan(tuple(links), tuple(sorted(blobs)))


def _unused_projectors(model: Path, removed: Sequence[Path]) -> list[Path]:
    """Return the projectors in a model's snapshot, unless other models in the snapshot can use them.

    Args:
        model: The model's file.
        removed: The files that will be removed.
    """
    snapshot = snapshot_folder(model)
    if snapshot is None:
        return []
    files = [path for path in files_below(snapshot, REPOSITORY_DEPTH, EntryBudget()) if path not in removed]
    models = (path for path in files if is_gguf_model(HubFile(path.name)))
    if any(map(_can_use_projector, models)):
        return []
    return [path for path in files if is_projector(path.name)]


def _can_use_projector(file: Path) -> bool:
    """Return whether a GGUF file is not a head. Unreadable files are assumed to be models."""
    try:
        return model_info(file, "gguf").kind != "head"
    except ModelFileError:
        return True


class RecommendedSetting(NamedTuple):
    """The recommended value of one sampling setting.

    Attributes:
        value: The recommended value.
        source: Where the value comes from: `Ollama`, `the model's files` or `the catalogue`.
    """

    value: float
    source: str


def recommended_sampling(model: Resolved | None, entry: ModelEntry | None) -> dict[str, RecommendedSetting]:
    """Return a model's recommended sampling settings by name.

    The user's own settings take precedence. If several sources define a setting, the first of these wins: the
    program that stores the model, the model's files, the catalogue. The catalogue's settings also apply to
    copies of its models in other programs' folders, which are recognised by their headers.

    Args:
        model: The model, or None if it is not on this machine.
        entry: The model's entry in the catalogue, if it has one.
    """
    info = model_info_or_none(model) if model else None
    if model and not entry:
        entry = load_catalogue().of_header(model.path)
    sources: dict[str, Mapping[str, float]] = {
        "Ollama": model.sampling if model else {},
        "the model's files": info.sampling if info else {},
        "the catalogue": entry.sampling if entry else {},
    }
    found: dict[str, RecommendedSetting] = {}
    for source, settings in sources.items():
        for name, value in settings.items():
            found.setdefault(name, RecommendedSetting(value, source))
    return found
