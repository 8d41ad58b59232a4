"""The catalogue of models that edgespec knows by name, and the user's aliases and draft pairs.

It also suggests larger models to users of the default model, if this machine has enough memory.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from edgespec.errors import ModelNotFoundError
from edgespec.model.formats.gguf_header import read_general
from edgespec.model.registry import FileFormat, format_of
from edgespec.options.default_model import models_folder as models_folder
from edgespec.options.default_model import package_folder
from edgespec.system.files import config_folder, error_reason, parse_toml, read_regular_file

# Suffixes of short names, such as `8b-q4`, by file format.
_ALIAS_SUFFIX = {"gguf": "-q4", "mlx": "-mlx"}
# Maximum size of a suggested download in bytes. Larger models take hours to download, and are slow on most
# machines that can hold them.
_MAX_DOWNLOAD_BYTES = 10_000_000_000
# Size in bytes of an 8,192-token KV cache, and the parameter count of a model that needs a cache of this
# size. For other models, the size is scaled by the square root of the parameter count.
_CACHE_BYTES, _CACHE_PARAMETERS = 1 << 30, 8e9
# Memory in bytes for compute buffers, the draft model's KV cache and Python.
_OTHER_BYTES = 768 << 20
# Approximate memory in bytes for reading an image, apart from the projector's weights. Projectors need from
# 260 MB (Gemma 3) to 3 GiB (Qwen2.5-VL with large photos).
_IMAGE_BUFFER_BYTES = 512 << 20


ModelFormat: TypeAlias = str
"""The name of a file format in the registry of backends (`model/registry.py`)."""

_MLX_SUFFIX = "-mlx"
# The tag that Ollama adds to names without one.
LATEST = ":latest"
_MAX_ALIASES_BYTES = 1 << 20
_ATTRIBUTES = {"gguf": "gguf_repository", "mlx": "mlx_repository", "file": "embedded_file"}


@dataclass(frozen=True)
class ModelEntry:
    """A model in the catalogue.

    Attributes:
        name: The model's name.
        family: Name of the model family. All models in a family share a vocabulary.
        parameters: Parameter count.
        active_parameters: Number of parameters that are active for each token in a mixture-of-experts
            model, otherwise 0.
        quantisation: The default quantisation.
        context_tokens: Context length that the model was trained with.
        approximate_file_bytes: Approximate size on disk at the default quantisation.
        approximate_projector_bytes: Approximate size of the projector, which is downloaded with the model
            and lets it see images. 0 if there is none.
        licence: The model's licence.
        chat_template: Name of the chat template.
        gguf_repository: Hugging Face repository of the GGUF files. Empty if there is none.
        mlx_repository: Hugging Face repository of the MLX files. Empty if there is none. A GGUF entry
            that has one gets a second entry named NAME-mlx.
        embedded_file: Path of the file in the models folder, if the model comes with edgespec. If there
            is a `package`, this is the path within the package.
        package: Name of the Python package that contains the model. Empty if there is none.
        packaged_quantisation: Quantisation of the file in the package, from which edgespec makes a copy
            in the default quantisation.
        header_name: The model's name in its GGUF headers, used to recognise copies under other paths.
            Empty if copies are not recognised.
        sampling: Recommended sampling settings, used as defaults for this model.
        notice: A notice for the user. Empty if there is none.
        suggested: Whether the start screen suggests the model to users of a model that comes with
            edgespec.
        is_gated: Whether a user must accept the licence on Hugging Face before downloading the model.
        heads: Kinds of heads that the GGUF files contain, as in `ModelInfo.heads`.
        drafts: Names of recommended draft models, best first. They share this model's vocabulary.
        aliases: Other names for the model, each with the quantisation that it selects.
        format: Name of the file format.
        sources: Sources for these facts: public addresses, or repositories and paths.
    """

    name: str
    family: str
    parameters: int
    quantisation: str
    context_tokens: int
    approximate_file_bytes: int
    licence: str
    chat_template: str
    gguf_repository: str = ""
    mlx_repository: str = ""
    embedded_file: str = ""
    approximate_projector_bytes: int = 0
    package: str = ""
    packaged_quantisation: str = ""
    header_name: str = ""
    sampling: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    notice: str = ""
    active_parameters: int = 0
    heads: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    format: ModelFormat = "gguf"
    suggested: bool = False
    is_gated: bool = False
    sources: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        """Hugging Face repository to download from, or an empty string if the model comes with edgespec."""
        return self.gguf_repository or self.mlx_repository

    @property
    def active_fraction(self) -> float:
        """Fraction of the parameters that are active for each token."""
        return (self.active_parameters or self.parameters) / self.parameters

    @property
    def download_bytes(self) -> int:
        """Approximate size of the files to download: the model and its projector."""
        return self.approximate_file_bytes + self.approximate_projector_bytes

    @property
    def image_bytes(self) -> int:
        """Approximate memory that seeing images takes, or 0 if the model sees none."""
        return self.approximate_projector_bytes and self.approximate_projector_bytes + _IMAGE_BUFFER_BYTES

    @property
    def file_format(self) -> FileFormat:
        """The model's file format, as registered by its backend."""
        return format_of(self.format)

    @property
    def embedded_path(self) -> Path | None:
        """Path of the model's file if it comes with edgespec or its package is installed, otherwise None."""
        folder = package_folder(self.package) if self.package else models_folder()
        return folder / self.embedded_file if folder is not None and self.embedded_file else None


@dataclass(frozen=True)
class HeadEntry:
    """A head in the catalogue, either published on Hugging Face or bundled with edgespec.

    Attributes:
        name: The head's name.
        kind: The kind of head, as in `ModelInfo.heads`.
        targets: Names of the models that the head drafts for.
        approximate_file_bytes: Approximate size on disk.
        repository: Hugging Face repository of the files. Empty if the head comes with edgespec.
        gguf_file: The head's file, if the repository contains other GGUF files. Empty for a repository that
            contains only the head.
        embedded_file: Path of the file or folder in the models folder, if the head comes with edgespec.
        licence: The head's licence. Empty if none was found.
        published_speedup: The speed-up measured by the publisher, or 0 if there is none.
        published_on: The machine on which the publisher measured the speed-up.
        sources: Sources for these facts, as for models.
    """

    name: str
    kind: str
    targets: tuple[str, ...]
    approximate_file_bytes: int
    repository: str = ""
    gguf_file: str = ""
    embedded_file: str = ""
    licence: str = ""
    published_speedup: float = 0.0
    published_on: str = ""
    sources: tuple[str, ...] = ()

    def fits_format(self, form: ModelFormat) -> bool:
        """Return whether the head's files can be used with models in this format.

        A head published as a folder works with all formats, because edgespec converts it for GGUF models. A
        single-file head requires a format whose models are also single files.
        """
        return not self.gguf_file or format_of(form).one_file_per_quantisation

    @property
    def embedded_path(self) -> Path | None:
        """Path of the head if it comes with edgespec, otherwise None."""
        return models_folder() / self.embedded_file if self.embedded_file else None


class Catalogue:
    """Looks up models by name or alias, and heads by name, ignoring case."""

    def __init__(self, entries: Iterable[ModelEntry], heads: Iterable[HeadEntry] = ()) -> None:
        self.entries, self.heads = tuple(entries), tuple(heads)
        self._by_name: dict[str, tuple[ModelEntry, str]] = {}
        for entry in self.entries:
            for name, quantisation in {entry.name: entry.quantisation, **entry.aliases}.items():
                if name.lower() in self._by_name:
                    raise ValueError(f"the catalogue has two models named {name}")
                self._by_name[name.lower()] = (entry, quantisation)
        self._heads_by_name = {head.name.lower(): head for head in self.heads}
        if clash := self._heads_by_name.keys() & self._by_name.keys():
            raise ValueError(f"the catalogue has a model and a draft head that are both named {min(clash)}")

    @property
    def names(self) -> list[str]:
        """Lower-case names and aliases of all models, in catalogue order."""
        return list(self._by_name)

    def find(self, name: str) -> tuple[ModelEntry, str] | None:
        """Return the entry with this name or alias and the quantisation that it selects, or None.

        As in Ollama, NAME:latest means NAME.
        """
        return self._by_name.get(name.lower().removesuffix(LATEST))

    def of_repository(self, repository: str) -> ModelEntry | None:
        """Return the catalogue entry whose files are in a Hugging Face repository, or None."""
        matches = (entry for entry in self.entries if entry.repository.lower() == repository.lower())
        return next(matches, None)

    def find_head(self, name: str) -> HeadEntry | None:
        """Return the head with this name, or the only head in this Hugging Face repository, or None."""
        if head := self._heads_by_name.get(name.lower()):
            return head
        alone = (head for head in self.heads if head.repository and not head.gguf_file)
        return next((head for head in alone if head.repository.lower() == name.lower()), None)

    def heads_for(self, entry: ModelEntry | None) -> tuple[HeadEntry, ...]:
        """Return the heads for a model. The GGUF and MLX versions of a model share most published heads."""
        if entry is None:
            return ()
        return tuple(
            head
            for head in self.heads
            if (entry.name if head.embedded_file else entry.name.removesuffix(_MLX_SUFFIX)) in head.targets
            and head.fits_format(entry.format)
        )

    def embedded_at(self, path: Path) -> ModelEntry | None:
        """Return the entry for the model at `path` if it comes with edgespec, otherwise None."""
        for entry in self.entries:
            if entry.embedded_path is not None and entry.embedded_path.resolve() == path.resolve():
                return entry
        return None

    def of_file(self, path: Path) -> ModelEntry | None:
        """Return the entry for the model at `path`, identified by its location or header, or None."""
        if entry := self.embedded_at(path):
            return entry
        name = read_general(path).get("general.name")
        return next((entry for entry in self.entries if name and entry.header_name == name), None)

    def of_header(self, path: Path) -> ModelEntry | None:
        """Identify a GGUF copy of a catalogue model by its header. Return the model's entry, or None.

        Other programs' copies can have any file name and quantisation, but their headers still contain the
        model's name or its parts. Fine-tuned models have different names.
        """
        header = read_general(path)
        parts = ("basename", "size_label", "finetune")
        spelled = {
            _letters(header.get("general.name", "")),
            _letters("".join(header.get(f"general.{part}", "") for part in parts)),
        } - {""}
        return next((entry for entry in self.entries if spelled & _header_names(entry)), None)

    def nearest(self, name: str, also: Iterable[str] = ()) -> list[str]:
        """Return up to three model names similar to `name`, most similar first.

        Args:
            name: The name that the user typed, with or without a tag.
            also: Additional names to suggest.
        """
        known = [*also, *self.names]
        typed = name.lower().removesuffix(LATEST)
        found: dict[str, str] = {}
        # List names that resemble the full name first, then those that resemble the part before the colon.
        for text in dict.fromkeys((typed, typed.partition(":")[0])):
            starts = [candidate for candidate in known if candidate.startswith(text)]
            close = difflib.get_close_matches(text, known, n=8, cutoff=0.5)
            for candidate in (*starts, *close):
                named = self._by_name.get(candidate)
                found.setdefault(named[0].name.removesuffix(_MLX_SUFFIX) if named else candidate, candidate)
        return list(found.values())[:3]

    def nearest_repository(self, repository: str) -> str:
        """Return the repository in the catalogue with the most similar name, or an empty string."""
        known = {entry.repository.lower(): entry.repository for entry in self.entries if entry.repository}
        close = difflib.get_close_matches(repository.lower(), known, n=1, cutoff=0.8)
        return known[close[0]] if close else ""


def _header_names(entry: ModelEntry) -> set[str]:
    """Return the possible names in a model's GGUF headers, normalised to lower-case letters and digits."""
    repository = entry.gguf_repository.rpartition("/")[2].removesuffix("-GGUF")
    return {_letters(name) for name in (entry.header_name, repository) if name}


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


@cache
def load_catalogue() -> Catalogue:
    """Load the built-in catalogue. The result is cached."""
    with (models_folder() / "catalogue.toml").open("rb") as file:
        tables: dict[str, list[dict[str, Any]]] = tomllib.load(file)
    entries = [_entry(table) for table in tables["model"]]
    return Catalogue(_with_mlx_forms(entries), map(_head_entry, tables["head"]))


def _with_mlx_forms(entries: list[ModelEntry]) -> Iterator[ModelEntry]:
    """Yield each entry, followed by a second entry for its MLX repository if it has one."""
    in_both = {entry.name for entry in entries if entry.gguf_repository and entry.mlx_repository}
    for entry in entries:
        yield entry
        if entry.name in in_both:
            yield _mlx_form(entry, [name + _MLX_SUFFIX for name in entry.drafts if name in in_both])


def _mlx_form(entry: ModelEntry, drafts: list[str]) -> ModelEntry:
    # MXFP4 uses four bits per weight, plus a shared eight-bit exponent for every 32 weights.
    label = entry.mlx_repository.rpartition("-")[2]
    bits = 4 if "MXFP4" in entry.mlx_repository else int(label.removesuffix("bit"))
    # Derive the aliases of the MLX model from those of the GGUF model: `8b-q4` becomes `8b-mlx`.
    stems = [
        alias.removesuffix("-q4")
        for alias, quantisation in entry.aliases.items()
        if quantisation == entry.quantisation
    ]
    return replace(
        entry,
        name=entry.name + _MLX_SUFFIX,
        format="mlx",
        quantisation=f"{bits}-bit",
        # For every 64 weights, MLX stores a 16-bit scale and a 16-bit bias, which adds half a bit per weight.
        approximate_file_bytes=round(entry.parameters * (bits + 0.5) / 8),
        # MLX models see no images.
        approximate_projector_bytes=0,
        gguf_repository="",
        # mlx-lm drops the MTP layers when it converts a model.
        heads=(),
        drafts=tuple(drafts),
        aliases=MappingProxyType({stem + _MLX_SUFFIX: f"{bits}-bit" for stem in stems}),
    )


def _entry(table: dict[str, Any]) -> ModelEntry:
    values = {_ATTRIBUTES.get(key, key): value for key, value in table.items()}
    values["approximate_file_bytes"] = round(values.pop("gigabytes") * 1e9)
    values["approximate_projector_bytes"] = round(values.pop("projector_gigabytes", 0) * 1e9)
    for name in ("heads", "drafts", "sources"):
        values[name] = tuple(values.get(name, ()))
    values["aliases"] = MappingProxyType(values.get("aliases", {}))
    values["sampling"] = MappingProxyType(values.get("sampling", {}))
    return ModelEntry(**values)


def _head_entry(table: dict[str, Any]) -> HeadEntry:
    values = {_ATTRIBUTES.get(key, key): value for key, value in table.items()}
    for name in ("targets", "sources"):
        values[name] = tuple(table[name])
    values["approximate_file_bytes"] = round(values.pop("gigabytes") * 1e9)
    return HeadEntry(**values)


def user_aliases_path() -> Path:
    """Return the path of the TOML file with the user's model aliases and draft pairs."""
    return config_folder() / "aliases.toml"


def user_aliases() -> dict[str, str]:
    """Return the user's aliases as {lower-case name: reference}.

    Raises:
        ModelNotFoundError: The alias file is invalid.
    """
    return _user_table("aliases", 'big = "hf:user/repo:Q4_K_M"')


def user_pairs() -> dict[str, str]:
    """Return the user's pairs as {lower-case target: draft model}.

    Raises:
        ModelNotFoundError: The alias file is invalid.
    """
    return _user_table("pairs", '"70b-q4" = "1b-q4"')


def _user_table(name: str, example: str) -> dict[str, str]:
    path = user_aliases_path()
    try:
        table = parse_toml(read_regular_file(path, _MAX_ALIASES_BYTES).decode("utf-8-sig")).get(name, {})
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        reason = error_reason(error) if isinstance(error, OSError) else error
        raise ModelNotFoundError(
            f"the alias file {path} cannot be read: {reason}",
            "correct, move or delete the file",
            code="alias_invalid",
        ) from error
    if not isinstance(table, dict) or not all(isinstance(reference, str) for reference in table.values()):
        raise ModelNotFoundError(
            f"the [{name}] table in the alias file {path} has values that are not model names",
            f"use lines such as {example}",
            code="alias_invalid",
        )
    return {name.lower(): reference for name, reference in table.items()}


class Suggestion(NamedTuple):
    """A suggested target, with its draft model if it has one.

    Attributes:
        target: Model reference of the target.
        draft: Model reference of the draft model. Empty if there is none.
        download_bytes: Approximate size of both files, and of the projectors that are downloaded with them.
    """

    target: str
    draft: str
    download_bytes: int


def needed_bytes(file_bytes: int, parameters: int) -> int:
    """Estimate the memory in bytes that a model and its draft model need for an 8,192-token context.

    Args:
        file_bytes: Combined size of both models' files.
        parameters: The target's parameter count.
    """
    return round(file_bytes + _OTHER_BYTES + _CACHE_BYTES * math.sqrt(parameters / _CACHE_PARAMETERS))


def suggest_models(
    budget_bytes: int, model_format: str = "gguf", *, installed: Collection[str] = ()
) -> list[Suggestion]:
    """Return the three largest suggested models that fit, with their draft models, smallest first.

    The choice is based only on the sizes in the catalogue.

    Args:
        budget_bytes: Memory that edgespec may use.
        model_format: `gguf` or `mlx`.
        installed: Names of catalogue models that are on this machine, which are not suggested.

    Returns:
        The suggestions, fewer than three if memory is tight.
    """
    suggestions = []
    for entry in load_catalogue().entries:
        if entry.format != model_format or not entry.suggested or entry.name in installed:
            continue
        # Models with multi-token prediction layers draft for themselves.
        found = load_catalogue().find(entry.drafts[0]) if entry.drafts and not entry.heads else None
        size_bytes = entry.approximate_file_bytes + (found[0].approximate_file_bytes if found else 0)
        download_bytes = entry.download_bytes + (found[0].download_bytes if found else 0)
        fits = needed_bytes(size_bytes, entry.parameters) <= budget_bytes
        if download_bytes <= _MAX_DOWNLOAD_BYTES and fits:
            suggestions.append(Suggestion(entry.name, found[0].name if found else "", download_bytes))
    return sorted(suggestions, key=lambda each: each.download_bytes)[-3:]


def short_name(entry: ModelEntry) -> str:
    """Return the entry's recommended short name, such as `8b-q4`, or its name if it has none."""
    suffix = _ALIAS_SUFFIX.get(entry.format, "")
    names = (name for name in entry.aliases if suffix and name.endswith(suffix) and ":" not in name)
    return next(names, entry.name)
