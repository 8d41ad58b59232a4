"""The registry of backends: one record says everything that the rest of edgespec needs to know about one.

Code outside this package never compares the names of formats. It looks up the record and reads its fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from edgespec.backends.base import LanguageModel, LoadOptions, Progress
from edgespec.backends.memory_estimate import MemoryEstimator
from edgespec.backends.model_info import ModelInfo
from edgespec.backends.token_list import TokenList
from edgespec.errors import ModelFileError

__all__ = [
    "Backend",
    "ExitMeasurement",
    "FileFormat",
    "backend_of",
    "backends",
    "format_at",
    "format_of",
    "is_registered",
    "process_bytes",
    "register",
    "same_backend",
]

ExitMeasurement: TypeAlias = tuple[dict[int, float], list[int], int]
"""Agreement of each exit layer's best token with the full model's, from 0 to 1; the bytes of each layer; and
the bytes read after the last layer.
"""


def _always_installed(_model: str) -> None:
    """Accept a backend that needs no library of its own."""


def _no_cards() -> Sequence[tuple[str, int]]:
    return ()


def _nothing_to_preload() -> None:
    """Do nothing."""


def _unknown_architecture(_architecture: str) -> bool:
    return False


def _files_at(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def _nothing_missing(_path: Path) -> list[str]:
    return []


def _no_info(path: Path) -> ModelInfo:
    raise ModelFileError(f"the format of {path} states no metadata", "name the draft model with --draft")


def _no_tokens(_path: Path) -> TokenList | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """One way in which a model lies on disk, and how its backend handles it.

    Attributes:
        name: The format's unique name, as it stands in the catalogue and in JSON output.
        label: The format and the program that runs it, for people.
        recognise: Whether the file or folder at a path has this format. Formats registered later are asked
            first.
        load: Loads the model at a path, with the name to show for it.
        open_estimator: Reads the metadata of the model at a path to estimate its memory.
        read_info: Reads facts about a model from its files. Raises ModelFileError.
        read_tokens: Reads the tokens of a model, or None where its files do not list them.
        files: All files of the model at a path. Raises OSError and ModelFileError.
        missing_files: Names of files that the model at a path lacks.
        one_file_per_quantisation: Whether a hub repository holds several quantisations, each in a file.
        mapped: Whether weights are memory-mapped, so that the files must not change while they are in use.
        adapters: Whether a LoRA or DoRA adapter can be applied to a target.
        online_training: Whether a draft model can be trained between replies (`--learn`).
        skips_layers: Whether the model can draft with some of its layers left out (method `swift`).
        preparations: What `edgespec prepare` can make from this format, such as `lowbit`.
        fixed_exit: Whether the files were split at one early exit, which a manifest states.
        measure_exits: Measures every early exit on `(model, tokens, first)`; None where exits are fixed or
            the model has to be prepared first.
        low_bit_copy_format: The format of a prepared copy with fewer bits; empty where none is used.
        low_bit_weights: Whether loaded weights can be split to draft with fewer bits, without a copy.
    """

    name: str
    label: str
    recognise: Callable[[Path], bool]
    load: Callable[[str, str, LoadOptions, Progress | None], LanguageModel]
    open_estimator: Callable[[str, str, LoadOptions], MemoryEstimator]
    read_info: Callable[[Path], ModelInfo] = _no_info
    read_tokens: Callable[[Path], TokenList | None] = _no_tokens
    files: Callable[[Path], list[Path]] = _files_at
    missing_files: Callable[[Path], list[str]] = _nothing_missing
    one_file_per_quantisation: bool = False
    mapped: bool = False
    adapters: bool = False
    online_training: bool = False
    skips_layers: bool = False
    preparations: frozenset[str] = frozenset()
    fixed_exit: bool = False
    measure_exits: Callable[[LanguageModel, Sequence[int], int], ExitMeasurement] | None = None
    low_bit_copy_format: str = ""
    low_bit_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A library that runs models, and what planning and loading have to know about it.

    Attributes:
        name: The library's name, for people.
        formats: The formats that it loads.
        process_bytes: What Python and this library occupy before any model is loaded.
        require: Raises BackendMissingError, naming the model, where the library is not installed.
        modules: Python modules that are imported once the backend is in use.
        packages: Distributions whose versions change how fast and how exactly it computes.
        graphics_cards: Name and free bytes of each graphics card with memory of its own.
        preload: Imports what loading a model would import, so that a plan counts its memory.
        cache_follows_text: Whether the KV cache grows with the text by itself, without `resize`.
        ignored_options: Fields of LoadOptions that the library does not have. Loading refuses them, and in a
            pair with a model of another backend they apply to the other model only.
        shares_kv_type: Whether a draft model takes over the `kv_type` of a target of another backend.
        knows_architecture: Whether a model of this architecture can be loaded, whatever the target's is.
    """

    name: str
    formats: tuple[FileFormat, ...]
    process_bytes: int = 0
    require: Callable[[str], None] = _always_installed
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    graphics_cards: Callable[[], Sequence[tuple[str, int]]] = _no_cards
    preload: Callable[[], None] = _nothing_to_preload
    cache_follows_text: bool = False
    ignored_options: frozenset[str] = frozenset()
    shares_kv_type: bool = True
    knows_architecture: Callable[[str], bool] = _unknown_architecture


_registered: list[Backend] = []


@cache
def _built_in() -> tuple[Backend, ...]:
    from edgespec.backends.built_in import BUILT_IN

    return BUILT_IN


def register(backend: Backend) -> Callable[[], None]:
    """Add a backend, whose formats are recognised before those that are registered already.

    Returns:
        A function that takes the backend out again.

    Raises:
        ValueError: One of its formats has a name that is taken.
    """
    names = [form.name for form in backend.formats]
    for name in names:
        if is_registered(name) or names.count(name) > 1:
            raise ValueError(f"a format named {name!r} is already registered")
    _registered.append(backend)

    def unregister() -> None:
        if backend in _registered:
            _registered.remove(backend)

    return unregister


def backends() -> tuple[Backend, ...]:
    """Return every backend, in the order of registration."""
    return (*_built_in(), *_registered)


def backend_of(format_name: str) -> Backend:
    """Return the backend that loads a format. Raises KeyError for a format that nobody registered."""
    return _found(format_name)[0]


def format_of(format_name: str) -> FileFormat:
    """Return the record of a format. Raises KeyError for a format that nobody registered."""
    return _found(format_name)[1]


def _found(format_name: str) -> tuple[Backend, FileFormat]:
    for backend in backends():
        for form in backend.formats:
            if form.name == format_name:
                return backend, form
    raise KeyError(format_name)


def is_registered(format_name: str) -> bool:
    """Return whether a backend loads a format of this name."""
    return any(form.name == format_name for backend in backends() for form in backend.formats)


def format_at(path: Path) -> FileFormat:
    """Return the format of the file or folder at `path`. Files of no known kind count as GGUF."""
    every = [form for backend in backends() for form in backend.formats]
    return next(form for form in reversed(every) if form.recognise(path))


def same_backend(format_name: str, other_name: str) -> bool:
    """Return whether one backend loads both formats."""
    return backend_of(format_name) is backend_of(other_name)


def process_bytes() -> int:
    """Return what Python and the largest backend in use occupy; the first backend's where none is in use."""
    in_use = [each for each in backends() if any(module in sys.modules for module in each.modules)]
    return max((each.process_bytes for each in in_use), default=backends()[0].process_bytes)
