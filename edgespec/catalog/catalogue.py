"""The catalogue: the models edgespec knows by name, and the names a user gave."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from edgespec.backends.registry import FileFormat, format_of
from edgespec.errors import ModelNotFoundError
from edgespec.files import config_folder

__all__ = [
    "Catalogue",
    "ModelEntry",
    "ModelFormat",
    "load_catalogue",
    "models_folder",
    "recommended_drafts",
    "user_aliases",
    "user_aliases_path",
    "user_pairs",
]


ModelFormat: TypeAlias = str
"""The name of a file format in the registry of backends (`backends/registry.py`)."""

_MLX_SUFFIX = "-mlx"


@dataclass(frozen=True)
class ModelEntry:
    """One model of the catalogue. Empty strings stand for what it does not have.

    `aliases` maps its other names to the quantisation each of them means; `drafts` are names of this
    catalogue, best first. `approximate_file_bytes` is the size on disk at `quantisation`. An entry of
    format gguf may name the `mlx_repository` of the same model; that is an entry of its own, NAME-mlx.
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
    notice: str = ""
    drafts: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    format: ModelFormat = "gguf"

    @property
    def repository(self) -> str:
        """The hub repository it is fetched from; empty for an embedded model."""
        return self.gguf_repository or self.mlx_repository

    @property
    def file_format(self) -> FileFormat:
        """What its backend can do with files of this format."""
        return format_of(self.format)

    @property
    def embedded_path(self) -> Path | None:
        """Where the model lies if it comes with edgespec, else None."""
        return models_folder() / self.embedded_file if self.embedded_file else None


class Catalogue:
    """Entries by name and alias; case does not matter."""

    def __init__(self, entries: Iterable[ModelEntry]) -> None:
        self.entries = tuple(entries)
        self._by_name: dict[str, tuple[ModelEntry, str]] = {}
        for entry in self.entries:
            for name, quantisation in {entry.name: entry.quantisation, **entry.aliases}.items():
                if name.lower() in self._by_name:
                    raise ValueError(f"two models of the catalogue are called {name}")
                self._by_name[name.lower()] = (entry, quantisation)

    @property
    def names(self) -> list[str]:
        """Every name and alias, in the order of the file."""
        return list(self._by_name)

    def find(self, name: str) -> tuple[ModelEntry, str] | None:
        """The entry called `name` and the quantisation that name means, or None."""
        return self._by_name.get(name.lower())

    def of_repository(self, repository: str) -> ModelEntry | None:
        """The entry that is fetched from `repository`, or None."""
        matches = (entry for entry in self.entries if entry.repository.lower() == repository.lower())
        return next(matches, None)

    def embedded_at(self, path: Path) -> ModelEntry | None:
        """The embedded model whose file or folder `path` is, or None."""
        for entry in self.entries:
            if entry.embedded_path is not None and entry.embedded_path.resolve() == path.resolve():
                return entry
        return None

    def nearest(self, name: str, also: Iterable[str] = ()) -> list[str]:
        """Up to three known names (with `also`, the user's) that look like `name`, nearest first."""
        known = [*also, *self.names]
        # What was typed may be the start of a name ("llama-3.1"): that is nearer than any misspelling.
        starts = [candidate for candidate in known if candidate.startswith(name.lower())]
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        return list(dict.fromkeys([*starts, *close]))[:3]


def models_folder() -> Path:
    """The folder of the catalogue and the embedded models: in the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


@cache
def load_catalogue() -> Catalogue:
    """Read the catalogue that comes with edgespec (once per process)."""
    with (models_folder() / "catalogue.toml").open("rb") as file:
        tables: list[dict[str, Any]] = tomllib.load(file)["model"]
    return Catalogue(_with_mlx_forms([_entry(table) for table in tables]))


def _with_mlx_forms(entries: list[ModelEntry]) -> Iterator[ModelEntry]:
    """Each entry, followed by the one for its MLX repository if it has one."""
    in_both = {entry.name for entry in entries if entry.gguf_repository and entry.mlx_repository}
    for entry in entries:
        yield entry
        if entry.name in in_both:
            yield _mlx_form(entry, [name + _MLX_SUFFIX for name in entry.drafts if name in in_both])


def _mlx_form(entry: ModelEntry, drafts: list[str]) -> ModelEntry:
    bits = int(entry.mlx_repository.rpartition("-")[2].removesuffix("bit"))
    # `8b-q4` becomes `8b-mlx`. Names of another quantisation have no MLX form.
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
        # Half precision scale and bias for each group of 64 weights are half a bit more for each.
        approximate_file_bytes=round(entry.parameters * (bits + 0.5) / 8),
        gguf_repository="",
        drafts=tuple(drafts),
        aliases=MappingProxyType({stem + _MLX_SUFFIX: f"{bits}-bit" for stem in stems}),
    )


def _entry(table: dict[str, Any]) -> ModelEntry:
    return ModelEntry(
        name=table["name"],
        family=table["family"],
        parameters=table["parameters"],
        quantisation=table["quantisation"],
        context_tokens=table["context_tokens"],
        approximate_file_bytes=round(table["gigabytes"] * 1e9),
        licence=table["licence"],
        chat_template=table["chat_template"],
        gguf_repository=table.get("gguf", ""),
        mlx_repository=table.get("mlx", ""),
        embedded_file=table.get("file", ""),
        notice=table.get("notice", ""),
        drafts=tuple(table.get("drafts", ())),
        aliases=MappingProxyType(table.get("aliases", {})),
        format=table.get("format", "gguf"),
    )


def recommended_drafts(entry: ModelEntry) -> list[str]:
    """Names of drafts that suit `entry` as a target, best first; all share its vocabulary."""
    return list(entry.drafts)


def user_aliases_path() -> Path:
    """The file of a user's own names, tables of `"name" = "REF"`: see `own_names`. It need not exist."""
    return config_folder() / "aliases.toml"


def user_aliases() -> dict[str, str]:
    """The user's aliases, lower case name to reference; empty when the file does not exist.

    Raises ModelNotFoundError when the file is there but cannot be understood.
    """
    return _user_table("aliases", 'big = "hf:user/repo:Q4_K_M"')


def user_pairs() -> dict[str, str]:
    """The drafts a user chose, lower case target to draft; raises as `user_aliases` does."""
    return _user_table("pairs", '"70b-q4" = "1b-q4"')


def _user_table(name: str, example: str) -> dict[str, str]:
    path = user_aliases_path()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get(name, {})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"the alias file {path} cannot be read: {error}", "correct it, or move it away"
        ) from error
    if not isinstance(table, dict) or not all(isinstance(reference, str) for reference in table.values()):
        raise ModelNotFoundError(
            f"the alias file {path} has something other than references under [{name}]",
            f"write each as a line such as {example}",
        )
    return {name.lower(): reference for name, reference in table.items()}
