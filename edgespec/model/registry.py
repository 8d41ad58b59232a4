"""The registry of backends and their file formats.

Code outside this package never compares format names. It reads the fields of `FileFormat` instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from edgespec.cluster.machines import Library
from edgespec.errors import BackendMissingError, ModelFileError
from edgespec.model.base import Head, LanguageModel, LoadOptions, Progress
from edgespec.model.drafter_training import Teacher, Writer
from edgespec.model.memory_estimate import MemoryEstimate, MemoryEstimator
from edgespec.model.model_facts import Adapter, ModelInfo, PassWeights
from edgespec.model.token_list import TokenList
from edgespec.options.methods import methods

# The module that declares the built-in backends.
_BUILT_IN_MODULE = "edgespec.backends.built_in"

ExitMeasurement: TypeAlias = tuple[dict[int, float], list[int], int]
"""Three measurements of a model's exit layers.

- The fraction of tokens for which each exit layer predicts the same token as the full model.
- The size of each layer in bytes.
- The number of bytes read after the last layer.
"""


def all_files(path: Path) -> list[Path]:
    """Return the files in a folder, or just the path itself if it is not a folder. Raises OSError."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def _no_info(path: Path) -> ModelInfo:
    raise ModelFileError(
        f"edgespec cannot read the metadata of {path}, which it needs to choose a draft model",
        "select a draft model yourself with --draft",
        code="model_file_not_supported",
    )


@dataclass(frozen=True, slots=True)
class BenchmarkModels:
    """Models with random weights, for measuring how fast this machine runs each quantisation type.

    Attributes:
        types: Bits per weight of each quantisation type to measure.
        write: Writes a model to a path, given its quantisation type and approximate weight bytes (0 for a
            model with many small layers). Returns the model's weights. Raises OSError.
        mixtures: Typical fraction of each type in quantisations that mix several types, such as `Q4_K_M`.
    """

    types: Mapping[str, float]
    write: Callable[[Path, str, int], PassWeights]
    mixtures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class HeadNetwork(Protocol):
    """A backend's module for one kind of head."""

    def load_head(self, target: Any, head: Head, /) -> Any:
        """Load a head for a loaded target, whose cache must be empty. The result is backend-specific.

        Raises:
            CapabilityError: The head was made for a different target, or cannot be run.
            ModelFileError: The head is damaged.
            MemoryBudgetError: The head does not fit in memory.
        """

    def estimate_head(self, head: Head, target: Path, context_tokens: int, /) -> MemoryEstimate:
        """Estimate a head's memory, including the hidden-state log that it reads.

        Args:
            head: The head to estimate.
            target: The target's path.
            context_tokens: Size of the head's KV cache in tokens.

        Raises:
            CapabilityError: The head cannot be run.
            ModelFileError: The files are missing or damaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSupport:
    """How a backend runs one kind of head.

    Attributes:
        network: Imports the code that runs the heads.
        formats: Names of the head file formats that it can read.
        runs_for: Returns whether the heads can draft for loaded targets with this architecture.
        convert: Converts a published head to a file of this format, given the head's folder, the number of
            layers in the target, and the path of the file (`edgespec prepare head`). Raises ModelFileError or
            OSError. None if heads are not converted.
        unconverted: Kinds of heads, such as `EAGLE-1`, that are read as published even if `convert` is set.
        can_crash: Whether a damaged head can crash the process, so that it is first loaded in a separate
            process.
    """

    network: Callable[[], HeadNetwork]
    formats: frozenset[str]
    runs_for: Callable[[str], bool] = lambda _architecture: True
    convert: Callable[[Path, int, Path], None] | None = None
    unconverted: frozenset[str] = frozenset()
    can_crash: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A model file format and the functions that its backend uses to handle it.

    Attributes:
        name: Unique name of the format in the catalogue and in JSON output.
        label: The format and the library that runs it, for messages.
        recognise: Returns whether the file or folder at a path is in this format.
        load: Loads the model at a path, given its name for messages.
        open_estimator: Opens a memory estimator for the model at a path.
        load_slots: Loads the model at a path for `LoadOptions.parallel` concurrent replies that share its
            forward passes, and returns one model per reply. None if replies cannot share passes.
        read_info: Returns the metadata of the model at a path. Raises ModelFileError.
        read_tokens: Returns the model's tokens, or None if its files do not list them.
        files: Returns all files of the model at a path. Raises OSError or ModelFileError.
        named_files: Like `files`, but faster, because it looks only at file names. If one of these files
            changes, the model has changed.
        missing_files: Returns the names of files missing from the model at a path.
        one_file_per_quantisation: Whether a Hugging Face repository can contain several quantisations, one
            per file.
        mapped: Whether weights are memory-mapped. If so, the files must not change while in use.
        check_adapters: Checks that adapters can be applied to the model at a path, before it is loaded.
            Raises ModelFileError or OptionError. None if the format does not support adapters.
        online_training: Whether a draft model can be trained between replies (`--learn`).
        preparations: Preparations that `edgespec prepare` supports for this format, such as `lowbit`.
        fixed_exit: Whether the files are split at a single exit layer specified in a manifest.
        measure_exits: Measures the accuracy of every exit layer, given a model, tokens and the index of the
            first token to predict. None if the exit layer is fixed or the model must be prepared first.
        low_bit_copy_format: Name of the format of prepared low-bit copies. Empty if the format does not use
            them.
        low_bit_weights: Whether the loaded weights can also be used at lower precision for drafting, without
            a separate copy.
        trial: Loads the model at a path, given its name, whether to run a few tokens, and a progress callback
            (see `trial_load`). None if no file can crash the process.
        try_head: Loads the model at a path together with a head and runs a few tokens, given the model's name
            and a progress callback (see `trial_load`). None if no head can crash the process.
        try_adapters: Loads the model at a path with adapters and runs a few tokens, given the model's name,
            the adapters and a progress callback (see `trial_load`). None if no adapter can crash the process.
        read_pass_weights: Returns the weights that a pass of the model at a path reads. Raises
            ModelFileError.
        benchmark_models: Models for measuring this machine's speed. None if there are none.
        networks: How the backend runs heads, by `HeadKind.network`.
        load_teacher: Loads the model at a path as the teacher for training drafters, given its name and a
            progress callback. None if drafters cannot be trained for models in this format.
        open_writer: Loads the model at a path for writing training conversations, given its name and a
            progress callback. The model is closed at the end of the `with` block. None if `load_teacher`
            writes them, or if models in this format cannot write several texts at once.
        worker_library: Returns the library that runs the model, whose version must be the same on all
            workers. None if the format does not support `LoadOptions.workers`.
        splits_tensors: Whether the format supports `LoadOptions.split_tensors`.
        projectors: Whether models in this format can see images with a projector (an mmproj file).
        knows_projector: Returns whether projectors of a given type can be loaded.
        is_fast_here: Returns whether this machine has the hardware that the library is made for. If not,
            lists show models in other formats first.
    """

    name: str
    label: str
    recognise: Callable[[Path], bool]
    load: Callable[[str, str, LoadOptions, Progress | None], LanguageModel]
    open_estimator: Callable[[str, str, LoadOptions], MemoryEstimator]
    load_slots: Callable[[str, str, LoadOptions, Progress | None], Sequence[LanguageModel]] | None = None
    read_info: Callable[[Path], ModelInfo] = _no_info
    read_tokens: Callable[[Path], TokenList | None] = lambda _path: None
    files: Callable[[Path], list[Path]] = all_files
    named_files: Callable[[Path], list[Path]] = all_files
    missing_files: Callable[[Path], list[str]] = lambda _path: []
    one_file_per_quantisation: bool = False
    mapped: bool = False
    check_adapters: Callable[[Sequence[Adapter], Path], None] | None = None
    online_training: bool = False
    preparations: frozenset[str] = frozenset()
    fixed_exit: bool = False
    measure_exits: Callable[[LanguageModel, Sequence[int], int], ExitMeasurement] | None = None
    low_bit_copy_format: str = ""
    low_bit_weights: bool = False
    trial: Callable[[str, str, bool, Progress | None], None] | None = None
    try_head: Callable[[str, str, Head, Progress | None], None] | None = None
    try_adapters: Callable[[str, str, Sequence[Adapter], Progress | None], None] | None = None
    read_pass_weights: Callable[[Path], PassWeights] | None = None
    benchmark_models: BenchmarkModels | None = None
    networks: Mapping[str, HeadSupport] = field(default_factory=dict)
    load_teacher: Callable[[str, str, Progress | None], Teacher] | None = None
    open_writer: Callable[[str, str, Progress | None], AbstractContextManager[Writer]] | None = None
    worker_library: Callable[[], Library] | None = None
    splits_tensors: bool = False
    projectors: bool = False
    knows_projector: Callable[[str], bool] = lambda _kind: False
    is_fast_here: Callable[[], bool] = lambda: True

    @property
    def heads(self) -> dict[str, HeadSupport]:
        """How the backend runs the heads of each method that it supports."""
        networks = {**self.networks, **_registered_heads.get(self.name, {})}
        named = {each.name: each.head.network or each.name for each in methods() if each.head}
        return {name: networks[network] for name, network in named.items() if network in networks}

    @property
    def converted_heads(self) -> frozenset[str]:
        """The methods whose heads can be converted to this format (`edgespec prepare head`)."""
        return frozenset(name for name, support in self.heads.items() if support.convert)

    @property
    def runs_here(self) -> bool:
        """Whether the library that runs models in this format is installed."""
        try:
            backend_of(self.name).require("this model")
        except BackendMissingError:
            return False
        return True

    def load_head(self, target: Any, head: Head) -> Any:
        """Load a head for a target in this format. See `HeadNetwork`."""
        return self.heads[head.method].network().load_head(target, head)

    def estimate_head(self, head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
        """Estimate a head's memory. See `HeadNetwork`.

        Raises BackendMissingError if the backend is not installed.
        """
        backend_of(self.name).require(target.name)
        return self.heads[head.method].network().estimate_head(head, target, context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A library that runs models, with the properties needed for planning and loading.

    Attributes:
        name: Name of the library, for messages.
        formats: Formats that it loads.
        process_bytes: Memory used by Python and this library before any model is loaded.
        require: Raises BackendMissingError, naming the given model, if the library is not installed.
        modules: Python modules that are imported when the backend is in use.
        packages: Packages whose versions affect the library's speed and rounding.
        graphics_cards: Returns the name and free bytes of each GPU with dedicated memory.
        preload: Imports the modules needed to load a model, so that memory plans include their size.
        cache_follows_text: Whether the KV cache grows with the sequence automatically, without `resize`.
        ignored_options: LoadOptions fields that the library does not support. Loading rejects them, unless
            the other model of the pair uses a backend that supports them.
        shares_kv_type: Whether a draft model uses the target's `kv_type`, even if their backends differ.
        knows_architecture: Returns whether models with a given architecture can be loaded.
        build_identity: Identifies the installed build of the library and the devices that it uses, both of
            which affect rounding.
        repacks: Whether `LoadOptions.repack` can change the kernels of a model with these files and load
            options.
        streams: Whether models larger than memory can run on this system with this value of
            `LoadOptions.gpu_layers`, with weights read from disk in every pass.
    """

    name: str
    formats: tuple[FileFormat, ...]
    process_bytes: int = 0
    require: Callable[[str], None] = lambda _model: None
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    graphics_cards: Callable[[], Sequence[tuple[str, int]]] = lambda: ()
    preload: Callable[[], None] = lambda: None
    cache_follows_text: bool = False
    ignored_options: frozenset[str] = frozenset()
    shares_kv_type: bool = True
    knows_architecture: Callable[[str], bool] = lambda _architecture: False
    build_identity: Callable[[], str] = lambda: ""
    repacks: Callable[[Path, LoadOptions], bool] = lambda _path, _options: False
    streams: Callable[[int | None], bool] = lambda _gpu_layers: False


_registered: list[Backend] = []
_registered_heads: dict[str, dict[str, HeadSupport]] = {}


@cache
def _built_in() -> tuple[Backend, ...]:
    # Import lazily and by name, because the backends import this module.
    declared: tuple[Backend, ...] = import_module(_BUILT_IN_MODULE).BUILT_IN
    return declared


def register(backend: Backend) -> Callable[[], None]:
    """Register a backend. Its formats take precedence over those of backends registered earlier.

    Returns:
        A function that unregisters the backend.

    Raises:
        ValueError: A format with the same name is already registered.
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


def register_head(format_name: str, network: str, support: HeadSupport) -> Callable[[], None]:
    """Register support for heads that are defined outside edgespec, for targets in one format.

    Returns:
        A function that undoes the registration.

    Raises:
        ValueError: The format already has a network with this name.
    """
    added = _registered_heads.setdefault(format_name, {})
    if network in added or network in format_of(format_name).networks:
        raise ValueError(f"a network named {network!r} is already registered for {format_name}")
    added[network] = support

    def unregister() -> None:
        added.pop(network, None)

    return unregister


def backends() -> tuple[Backend, ...]:
    """Return all backends in registration order."""
    return (*_built_in(), *_registered)


def backend_of(format_name: str) -> Backend:
    """Return the backend that loads a format. Raises KeyError if the format is not registered."""
    return _records()[format_name][0]


def format_of(format_name: str) -> FileFormat:
    """Return the `FileFormat` with a given name. Raises KeyError if the format is not registered."""
    return _records()[format_name][1]


def _records() -> dict[str, tuple[Backend, FileFormat]]:
    return {form.name: (backend, form) for backend in backends() for form in backend.formats}


def is_registered(format_name: str) -> bool:
    """Return whether a format with this name is registered."""
    return format_name in _records()


def format_at(path: Path) -> FileFormat:
    """Return the format of the file or folder at `path`, or GGUF if the format is unknown."""
    return next(form for _, form in reversed(_records().values()) if form.recognise(path))


def same_backend(format_name: str, other_name: str) -> bool:
    """Return whether the same backend loads both formats."""
    return backend_of(format_name) is backend_of(other_name)


def process_bytes() -> int:
    """Return the bytes that Python and the imported backend typically use before a model is loaded."""
    in_use = [each for each in backends() if any(module in sys.modules for module in each.modules)]
    return max((each.process_bytes for each in in_use), default=backends()[0].process_bytes)
