"""The built-in backends, llama.cpp and MLX. Each one is imported on first use."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from edgespec.cluster.machines import LLAMA_CPP, MLX, Library, installed_mlx
from edgespec.errors import CapabilityError
from edgespec.model.base import EarlyExit, LanguageModel, LoadOptions, LowBit, Progress
from edgespec.model.formats.gguf_files import check_gguf_adapters, gguf_files, named_gguf_files
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import (
    read_gguf_info,
    read_pass_weights,
    read_split_info,
)
from edgespec.model.formats.layerskip_files import LOWER_FIRST
from edgespec.model.formats.mlx_files import check_mlx_adapters, missing_files, require_mlx
from edgespec.model.formats.mlx_metadata import read_mlx_info
from edgespec.model.heads.mtp_files import MTP_MODELS, mtp_files
from edgespec.model.registry import (
    Backend,
    BenchmarkModels,
    ExitMeasurement,
    FileFormat,
    HeadNetwork,
    HeadSupport,
    all_files,
)
from edgespec.model.token_list import tokens_of_folder, tokens_of_header
from edgespec.system.openblas import load_openblas

if TYPE_CHECKING:
    from edgespec.model.drafter_training import Teacher
    from edgespec.model.memory_estimate import MemoryEstimator

__all__ = ["BUILT_IN"]

# Bytes of memory that this process uses with llama.cpp imported but no model loaded, measured in the terminal
# chat.
_LLAMA_CPP_PROCESS_BYTES = 80 * 2**20
_MLX_PROCESS_BYTES = 128 * 2**20


def _lazy(name: str) -> Callable[..., Any]:
    """Return a function that imports `module:function` in this package when it is first called."""
    return partial(_call, name)


def _call(name: str, *args: Any) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(f"edgespec.backends.{module}"), function)(*args)


def _network(module: str) -> Callable[[], HeadNetwork]:
    return lambda: cast(HeadNetwork, import_module(f"edgespec.backends.{module}"))


def _load_gguf(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    if options.workers is not None:
        from edgespec.backends.llamacpp.remote_model import load_on_workers

        return load_on_workers(path, name, options, options.workers, progress)
    from edgespec.backends.llamacpp.model import load

    return load(path, name, options, progress)


def _llama_cpp_library() -> Library:
    from edgespec.backends.llamacpp.native import library

    return Library(LLAMA_CPP, str(library().__version__))


def _estimate_gguf(path: str, name: str, _options: LoadOptions) -> MemoryEstimator:
    from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator

    return GgufMemoryEstimator(path, name)


def _estimate_split(path: str, name: str, _options: LoadOptions) -> MemoryEstimator:
    from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator

    return GgufMemoryEstimator(path, name, split=True)


def _lists_target_layers() -> bool:
    from edgespec.backends.llamacpp.state_taps import lists_target_layers

    return lists_target_layers()


def _returns_states(_architecture: str) -> bool:
    from edgespec.backends.llamacpp.state_taps import nextn_api

    return nextn_api() is not None


def _has_mtp_graph(architecture: str) -> bool:
    from edgespec.backends.llamacpp.mtp_files import ASSISTANT_TARGET, MTP_GRAPHS

    return architecture in (*MTP_GRAPHS, ASSISTANT_TARGET) and _returns_states(architecture)


def _load_mlx(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    require_mlx(name)
    from edgespec.backends import mlx

    return mlx.load(path, name, options, progress)


def _estimate_mlx(path: str, name: str, options: LoadOptions) -> MemoryEstimator:
    require_mlx(name)
    from edgespec.backends.mlx.memory_estimate import MlxMemoryEstimator

    return MlxMemoryEstimator(path, name, options)


def _load_mlx_teacher(path: str, name: str, progress: Progress | None) -> Teacher:
    require_mlx(name)
    load_openblas()
    from edgespec.backends.mlx.teacher import load_teacher

    return load_teacher(path, name, progress)


def _try_mlx(path: str, name: str, _runs: bool, _progress: Progress | None) -> None:
    from edgespec.backends.mlx.model_skeleton import read_skeleton

    read_skeleton(path, name, LoadOptions())


def _measure_mlx_exits(model: LanguageModel, tokens: Sequence[int], first: int) -> ExitMeasurement:
    from edgespec.backends.mlx.model import MlxModel

    if not isinstance(model, MlxModel):
        raise CapabilityError(
            f"{model.facts.name} does not support early exit",
            "choose another method",
            code="early_exit_not_supported",
        )
    return model.measure_exits(tokens, first)


def _llama_cpp_cards() -> Sequence[tuple[str, int]]:
    from edgespec.backends.llamacpp.devices import cards

    return [(card.description, card.free_bytes) for card in cards()]


def _llama_cpp_knows(architecture: str) -> bool:
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    return architecture in gguf.MODEL_ARCH_NAMES.values()


def _llama_cpp_repacks(path: Path, options: LoadOptions) -> bool:
    from edgespec.backends.llamacpp.loading import repacks_weights

    # A folder contains a model that was split for early exit.
    if path.is_dir() or options.streamed_layers:
        return False
    return repacks_weights([str(file) for file in gguf_files(path)], options.gpu_layers, options.experts)


def _mlx_build() -> str:
    from edgespec.backends.mlx.build_info import build_info

    return repr(build_info())


# Bits per weight, including scales, for each benchmarked quantisation type.
_BITS_PER_WEIGHT = {
    "F16": 16, "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q4_K": 4.5, "Q4_0": 4.5, "Q3_K": 3.4375,
    "Q2_K": 2.625,
}  # fmt: skip

# Head formats: GGUF files, and folders in the Hugging Face layout.
_GGUF_FILES, _PUBLISHED = frozenset({"gguf"}), frozenset({"mlx"})

_GGUF = FileFormat(
    name="gguf",
    label="GGUF, run by llama.cpp",
    recognise=lambda path: not path.is_dir(),
    load=_load_gguf,
    open_estimator=_estimate_gguf,
    load_slots=_lazy("llamacpp.model:load_slots"),
    open_writer=_lazy("llamacpp.writer:open_writer"),
    worker_library=_llama_cpp_library,
    read_info=read_gguf_info,
    read_tokens=lambda path: tokens_of_header(read_header(gguf_files(path)[0])),
    files=gguf_files,
    named_files=named_gguf_files,
    one_file_per_quantisation=True,
    mapped=True,
    preparations=frozenset({EarlyExit.method, LowBit.method}),
    projectors=True,
    knows_projector=_lazy("llamacpp.image_encoder:knows_projector"),
    low_bit_copy_format="gguf",
    trial=_lazy("llamacpp.trial:try_model"),
    try_head=_lazy("llamacpp.trial:try_head"),
    check_adapters=check_gguf_adapters,
    try_adapters=_lazy("llamacpp.trial:try_adapters"),
    read_pass_weights=read_pass_weights,
    benchmark_models=BenchmarkModels(
        types=_BITS_PER_WEIGHT,
        write=_lazy("llamacpp.benchmark_model:write_benchmark_model"),
        mixtures={
            "Q5_K_M": {"Q5_K": 0.75, "Q6_K": 0.25},
            "Q4_K_M": {"Q4_K": 0.73, "Q6_K": 0.27},
            "Q3_K_M": {"Q3_K": 0.6, "Q4_K": 0.3, "Q6_K": 0.1},
            "Q2_K": {"Q2_K": 0.6, "Q3_K": 0.3, "Q6_K": 0.1},
        },
    ),
    networks={
        "mtp": HeadSupport(network=_network("llamacpp.mtp"), formats=_GGUF_FILES, runs_for=_has_mtp_graph),
        "eagle": HeadSupport(
            network=_network("llamacpp.eagle"),
            formats=_GGUF_FILES,
            runs_for=lambda architecture: _lists_target_layers() and _returns_states(architecture),
            convert=_lazy("llamacpp.gguf_conversion:convert_eagle_head"),
            unconverted=frozenset({"EAGLE-1"}),
        ),
        "dflash": HeadSupport(
            network=_network("llamacpp.dflash"),
            formats=_GGUF_FILES,
            runs_for=lambda _architecture: _lists_target_layers(),
            convert=_lazy("llamacpp.gguf_conversion:convert_dflash_head"),
        ),
        # edgespec runs these heads itself, so any version of llama.cpp works.
        "residual": HeadSupport(network=_network("llamacpp.residual_target"), formats=_PUBLISHED),
    },
)
_SPLIT_GGUF = FileFormat(
    name="layerskip",
    label="GGUF prepared for early exit, run by llama.cpp",
    recognise=lambda _path: False,
    load=_lazy("llamacpp.layerskip:load_layerskip"),
    open_estimator=_estimate_split,
    read_info=read_split_info,
    read_tokens=lambda folder: tokens_of_header(read_header(folder / LOWER_FIRST)),
    mapped=True,
    preparations=frozenset({LowBit.method}),
    fixed_exit=True,
    low_bit_copy_format="gguf",
    trial=_lazy("llamacpp.trial:try_split_model"),
)
_MLX = FileFormat(
    name="mlx",
    is_fast_here=lambda: (platform.system(), platform.machine()) == ("Darwin", "arm64"),
    label="MLX, run by mlx-lm",
    recognise=lambda path: path.is_dir(),
    load=_load_mlx,
    open_estimator=_estimate_mlx,
    read_info=read_mlx_info,
    read_tokens=tokens_of_folder,
    named_files=lambda folder: sorted({*all_files(folder), *mtp_files(folder)}),
    missing_files=missing_files,
    check_adapters=check_mlx_adapters,
    online_training=True,
    measure_exits=_measure_mlx_exits,
    low_bit_weights=True,
    trial=_try_mlx,
    worker_library=lambda: Library(MLX, installed_mlx()),
    splits_tensors=True,
    networks={
        "mtp": HeadSupport(network=_network("mlx.mtp"), formats=_PUBLISHED, runs_for=MTP_MODELS.__contains__),
        "eagle": HeadSupport(network=_network("mlx.eagle"), formats=_PUBLISHED),
        "dflash": HeadSupport(network=_network("mlx.dflash"), formats=_PUBLISHED),
        "residual": HeadSupport(network=_network("mlx.residual_target"), formats=_PUBLISHED),
    },
    load_teacher=_load_mlx_teacher,
)

BUILT_IN = (
    Backend(
        name="llama.cpp",
        formats=(_GGUF, _SPLIT_GGUF),
        process_bytes=_LLAMA_CPP_PROCESS_BYTES,
        modules=("llama_cpp",),
        packages=("llama-cpp-python",),
        preload=_lazy("llamacpp.native:library"),
        graphics_cards=_llama_cpp_cards,
        build_identity=_lazy("llamacpp.build_info:build_identity"),
        repacks=_llama_cpp_repacks,
        streams=_lazy("llamacpp.weight_stream:can_stream"),
        knows_architecture=_llama_cpp_knows,
    ),
    Backend(
        name="MLX",
        formats=(_MLX,),
        process_bytes=_MLX_PROCESS_BYTES,
        require=require_mlx,
        modules=("mlx.core",),
        packages=("mlx", "mlx-lm"),
        preload=_lazy("mlx.build_info:mlx_lm_utils"),
        cache_follows_text=True,
        build_identity=_mlx_build,
        ignored_options=frozenset({"threads", "gpu_layers", "experts", "flash_attention", "mmap", "mlock"}),
        shares_kv_type=False,
    ),
)
