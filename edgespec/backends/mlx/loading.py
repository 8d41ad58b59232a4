"""Load an MLX model from a folder and test its capabilities."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from edgespec.backends.base import LanguageModel, LoadOptions, Progress
from edgespec.backends.memory_check import (
    BLOCK_TOKENS,
    cache_too_large_error,
    check_weights_fit,
    requested_context,
)
from edgespec.backends.mlx.build_info import mlx_core, mlx_lm_utils, runs_on_cpu
from edgespec.backends.mlx.model_skeleton import (
    ModelSkeleton,
    named_arrays,
    parameter_bytes,
    read_skeleton,
    translate_load_errors,
)
from edgespec.backends.mlx_files import missing_files, read_json_object
from edgespec.backends.model_facts import Capabilities, ModelFacts
from edgespec.errors import CancelledError, ModelFileError, OptionError
from edgespec.heap import unmap_freed_buffers

if TYPE_CHECKING:
    from edgespec.backends.mlx.layer_placement import LayerPlacement
    from edgespec.backends.mlx.remote_block import RemoteBlock
    from edgespec.backends.mlx.remote_shards import RemoteShards

__all__ = [
    "KV_BITS",
    "MAX_WIDTH",
    "LoadedMlxModel",
    "check_options",
    "load",
    "load_model",
    "prefill_batch_tokens",
]

# Maximum number of tokens in a verify pass. Memory estimates include the buffers for a pass of this size.
MAX_WIDTH = 64
# Bits per element in the KV cache, keyed by `LoadOptions.kv_type`. None means that the cache is not quantised
# and uses the model's compute data type.
KV_BITS = {"auto": None, "q8_0": 8, "q4_0": 4}


_UNLIMITED_BYTES = 1 << 62
# Maximum number of tokens in a prefill batch on a CPU. Small, because a batch cannot be interrupted.
_CPU_BATCH_TOKENS = 64


class LoadedMlxModel(NamedTuple):
    """A model with all weights in memory.

    Attributes:
        skeleton: The model with its loaded weights, and its properties.
        tokenizer: mlx_lm's TokenizerWrapper.
        weight_bytes: Size of the weights in bytes, excluding the arrays added for low-bit drafting.
        widened: Whether 16-bit weights were widened to float32.
        dtype: Compute data type (`mx.Dtype`).
        blocks: The layers that are on workers, or the parts of all layers.
    """

    skeleton: ModelSkeleton
    tokenizer: Any
    weight_bytes: int
    widened: bool
    dtype: Any
    blocks: Sequence[RemoteBlock | RemoteShards] = ()


def load(path: str, name: str, options: LoadOptions, progress: Progress | None = None) -> LanguageModel:
    """Load an MLX or Hugging Face model from a folder.

    Args:
        path: Path of the model folder.
        name: Model name for error messages.
        options: Load options. Those that MLX does not support must have their default values.
        progress: Called with a description and the completed fraction. Returning False cancels loading.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        MemoryBudgetError: The model and its context do not fit in memory.
        OptionError: An option is not supported.
        BackendMissingError: mlx or mlx-lm is not installed.
        CancelledError: `progress` returned False.
    """
    check_options(options)
    mx = mlx_core()
    from edgespec.backends.mlx.evaluation import freed_buffers_bytes, release_thread_state
    from edgespec.backends.mlx.streams import reuse_stream

    reuse_stream()
    unmap_freed_buffers()
    # Limit MLX's cache of freed buffers, which can otherwise grow to gigabytes.
    mx.set_cache_limit(freed_buffers_bytes())
    try:
        return _load(path, name, options, progress)
    except BaseException:
        release_thread_state()
        raise


def _load(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    from edgespec.backends.mlx.model import MlxModel
    from edgespec.backends.mlx.probe import PROBE_TOKENS, probe
    from edgespec.backends.mlx.spread_model import SpreadModel
    from edgespec.backends.mlx.vocabulary import MlxVocabulary

    placement = None
    if options.workers is not None:
        from edgespec.backends.mlx.memory_estimate import MlxMemoryEstimator

        placement = MlxMemoryEstimator(path, name, options).placement(options)
        # The planner has checked the memory of all machines.
        options = replace(options, memory_bytes=_UNLIMITED_BYTES, low_bits=False)
    loaded = load_model(path, name, options, progress, placement)
    skeleton = loaded.skeleton
    with translate_load_errors(path):
        vocabulary = MlxVocabulary(loaded.tokenizer, skeleton.vocab_size)
    architecture = skeleton.config["model_type"]
    description = f"{architecture} {skeleton.parameters / 1e6:,.1f}M {skeleton.quantisation}"
    context_tokens = requested_context(options, skeleton.sizes.trained_context_tokens)
    trained = skeleton.sizes.trained_context_tokens or context_tokens
    notice = f"{name} was trained for a context of {trained:,} tokens; longer text may be incoherent"
    facts = ModelFacts(
        name=name,
        path=path,
        architecture=architecture,
        description=f"{description}, computed in float32" if loaded.widened else description,
        parameters=skeleton.parameters,
        file_bytes=skeleton.file_bytes,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=0,
        quantisation=skeleton.quantisation,
        trained_context_tokens=trained,
        context_tokens=context_tokens,
        vocab_size=skeleton.vocab_size,
        chat_template=vocabulary.chat_template is not None,
        capabilities=Capabilities(True, True, "", MAX_WIDTH),
        notice=notice if context_tokens > trained else "",
        adapters=options.adapters,
    )
    probed_facts = replace(facts, context_tokens=max(context_tokens, PROBE_TOKENS))
    model = (SpreadModel if placement else MlxModel)(loaded, probed_facts, vocabulary, options)
    try:
        try:
            result = probe(model)
        except ModelFileError as error:
            if options.kv_type == "auto":
                raise
            raise OptionError(
                f"{name} does not support kv_type {options.kv_type!r}: {error.what}", "use --kv-type auto"
            ) from error
        model.partial_models.unavailable = result.unavailable_self_drafts
        weight_bytes = loaded.weight_bytes + (skeleton.low_bits.nbytes if skeleton.low_bits else 0)
        model.kv_bytes_for = partial(_checked_kv_bytes, result.kv_bytes_for, weight_bytes, options)
        model.facts = replace(
            facts,
            kv_bytes=model.kv_bytes_for(context_tokens),
            capabilities=result.capabilities,
            rollback=result.rollback,
        )
        if not result.needs_replay:
            return model
        from edgespec.backends.replay import ReplayModel

        return ReplayModel(model, result.capabilities.reason)
    except BaseException:
        model.close()
        raise


def prefill_batch_tokens(options: LoadOptions) -> int:
    """Return the maximum number of tokens in a prefill pass."""
    return min(options.batch_tokens, _CPU_BATCH_TOKENS) if runs_on_cpu() else options.batch_tokens


def check_options(options: LoadOptions) -> None:
    """Raise OptionError for options that MLX does not support."""
    if options.kv_type not in KV_BITS:
        raise OptionError(
            f"kv_type {options.kv_type!r} is not available for MLX models",
            f"choose one of {', '.join(KV_BITS)} (auto uses the model's compute data type)",
        )
    for name, is_set, reason in (
        ("threads", options.threads is not None, "MLX chooses the number of threads itself"),
        ("gpu_layers", options.gpu_layers is not None, "MLX runs the whole model on one device"),
        ("flash_attention", options.flash_attention != "auto", "MLX has only one attention kernel"),
        ("mlock", options.mlock, "MLX always keeps the weights in memory"),
        ("mmap", not options.mmap, "MLX always reads the weights into memory"),
    ):
        if is_set:
            raise OptionError(f"{name} has no effect on an MLX model: {reason}", f"omit {name}")


def _checked_kv_bytes(
    kv_bytes_for: Callable[[int], int], weight_bytes: int, options: LoadOptions, context_tokens: int
) -> int:
    """Return the size of the KV cache at full context in bytes.

    Raise MemoryBudgetError if it does not fit.
    """
    limit = options.memory_bytes
    free_bytes = psutil.virtual_memory().available if limit is None else limit - weight_bytes
    needed_bytes = kv_bytes_for(context_tokens)
    if needed_bytes <= free_bytes:
        return needed_bytes
    fitting_tokens = context_tokens
    while fitting_tokens and kv_bytes_for(fitting_tokens) > free_bytes:
        fitting_tokens = fitting_tokens // 2 // BLOCK_TOKENS * BLOCK_TOKENS
    raise cache_too_large_error(context_tokens, needed_bytes, free_bytes, fitting_tokens)


def load_model(
    path: str,
    name: str,
    options: LoadOptions,
    progress: Progress | None,
    placement: LayerPlacement | None = None,
) -> LoadedMlxModel:
    """Load a model's weights and tokenizer from a folder. See `load`. With `placement`, use workers."""

    def report(fraction: float) -> None:
        if progress is not None and not progress(f"loading {name}", fraction):
            raise CancelledError(f"loading {name} was cancelled")

    report(0.0)
    skeleton = read_skeleton(path, name, options)
    if missing := missing_files(Path(path)):
        raise ModelFileError(f"{path} has no {', '.join(missing[:3])}", "download the model again")
    with translate_load_errors(path), contextlib.redirect_stdout(sys.stderr):
        tokenizer = _load_tokenizer(Path(path), skeleton.config)
    with translate_load_errors(path):
        check_weights_fit(name, skeleton.sizes.tensor_bytes, options)
        widen = placement.widened if placement else skeleton.sizes.widens(options)
        blocks: Sequence[RemoteBlock | RemoteShards] = ()
        if placement and options.workers:
            from edgespec.backends.mlx.remote_block import send_blocks
            from edgespec.backends.mlx.remote_shards import send_shards

            kv_bits, folder, model = KV_BITS[options.kv_type], Path(path), skeleton.model
            if options.split_tensors:
                blocks = (send_shards(folder, name, model, kv_bits, widen, options.workers, report),)
            else:
                blocks = send_blocks(folder, model, placement.blocks, kv_bits, widen, options.workers, report)
        widened = _evaluate_weights(skeleton.model, widen, report)
        added_bytes = skeleton.low_bits.array_bytes if skeleton.low_bits else 0
        weight_bytes = parameter_bytes(skeleton.model) - added_bytes
    dtype = _compute_dtype(skeleton.model)
    return LoadedMlxModel(skeleton, tokenizer, weight_bytes, widened, dtype, blocks)


def _load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """Load the tokenizer, with the end-of-sequence tokens from all of the model's configuration files."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    eos_ids: set[int] = set()
    sources = [config, config.get("text_config")]
    if (folder / "generation_config.json").exists():
        sources.append(read_json_object(folder / "generation_config.json"))
    for source in sources:
        eos = source.get("eos_token_id") if isinstance(source, dict) else None
        eos_ids.update(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))
    offline = {"local_files_only": True, "trust_remote_code": False}
    return mlx_lm_utils().load_tokenizer(folder, offline, eos_token_ids=sorted(eos_ids))


def _evaluate_weights(model: Any, widen: bool, report: Callable[[float], None]) -> bool:
    """Load all weights into memory, one at a time.

    All weights must be evaluated here, because MLX can evaluate an array only in the thread that created it,
    and the model can run in another thread.

    Returns:
        Whether 16-bit weights were widened to float32.
    """
    from mlx.utils import tree_unflatten

    mx = mlx_core()
    # Start with the largest weights, while there is still enough memory to hold both their original and their
    # float32 version.
    waiting = sorted(named_arrays(model.parameters()), key=lambda each: each[1].nbytes)
    total_bytes, loaded_bytes, widened = parameter_bytes(model), 0, False
    while waiting:
        name, weight = waiting.pop()
        loaded_bytes += weight.nbytes
        if widen and weight.dtype in (mx.float16, mx.bfloat16):
            weight, widened = weight.astype(mx.float32), True
        mx.eval(weight)
        model.update(tree_unflatten([(name, weight)]))
        report(loaded_bytes / total_bytes)
    # Also evaluate arrays that are not parameters, such as rotary embedding frequencies.
    mx.eval([array for _, array in named_arrays(model)])
    return widened


def _compute_dtype(model: Any) -> Any:
    """Return the most common floating-point data type of the weights, or of their scales if quantised."""
    mx = mlx_core()
    floating: Counter[Any] = Counter()
    for _, weight in named_arrays(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            floating[weight.dtype] += weight.nbytes
    return floating.most_common(1)[0][0] if floating else mx.float32
