"""Load an MLX model from a folder and test its capabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import psutil

from edgespec.backends.mlx.build_info import mlx_core, use_in_this_process
from edgespec.backends.mlx.model_skeleton import translate_load_errors
from edgespec.backends.mlx.weight_loading import MAX_WIDTH, check_options, load_model
from edgespec.errors import ModelFileError, OptionError
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.model.memory_estimate import BLOCK_TOKENS, cache_too_large_error, requested_context
from edgespec.model.model_facts import Capabilities, ModelFacts
from edgespec.system.heap import unmap_freed_buffers

__all__ = ["load"]

_UNLIMITED_BYTES = 1 << 62


def load(path: str, name: str, options: LoadOptions, progress: Progress | None = None) -> LanguageModel:
    """Load an MLX or Hugging Face model from a folder.

    Args:
        path: Path of the model folder.
        name: Model name for error messages.
        options: Load options. Options that MLX does not support must keep their default values.
        progress: Called with a description and the completed fraction. Returning False cancels loading.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        MemoryBudgetError: The model and its context do not fit in memory.
        OptionError: An option is not supported.
        BackendMissingError: mlx or mlx-lm is not installed.
        CancelledError: `progress` returned False.
    """
    check_options(options)
    use_in_this_process()
    mx = mlx_core()
    from edgespec.backends.mlx.evaluation import freed_buffers_bytes, release_thread_state, reuse_stream

    reuse_stream()
    unmap_freed_buffers()
    # Limit MLX's cache of freed buffers, which could otherwise grow to gigabytes.
    mx.set_cache_limit(freed_buffers_bytes())
    try:
        return _load(path, name, options, progress)
    except BaseException:
        release_thread_state()
        raise


def _load(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    from edgespec.backends.mlx.model import MlxModel, SpreadModel
    from edgespec.backends.mlx.probe import PROBE_TOKENS, probe
    from edgespec.backends.mlx.vocabulary import MlxVocabulary

    placement = None
    if options.workers is not None:
        from edgespec.backends.mlx.memory_estimate import MlxMemoryEstimator

        placement = MlxMemoryEstimator(path, name, options).placement(options)
        # The planner has already checked the memory on all machines.
        options = replace(options, memory_bytes=_UNLIMITED_BYTES, low_bits=False)
    loaded = load_model(path, name, options, progress, placement)
    skeleton = loaded.skeleton
    with translate_load_errors(path):
        vocabulary = MlxVocabulary(loaded.tokenizer, skeleton.vocab_size)
    architecture = skeleton.config["model_type"]
    description = f"{architecture} {skeleton.parameters / 1e6:,.1f}M {skeleton.quantisation}"
    context_tokens = requested_context(options, skeleton.sizes.trained_context_tokens)
    trained = skeleton.sizes.trained_context_tokens or context_tokens
    notice = f"{name} was trained for a context of {trained:,} tokens; replies may get worse beyond that"
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
            result = probe(model, progress)
        except ModelFileError as error:
            if options.kv_type == "auto":
                raise
            raise OptionError(
                f"{name} does not support kv_type {options.kv_type!r}: {error.what}",
                "use --kv-type auto",
                option="kv_type",
                code="option_not_supported",
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


def _checked_kv_bytes(
    kv_bytes_for: Callable[[int], int], weight_bytes: int, options: LoadOptions, context_tokens: int
) -> int:
    """Return the KV cache size in bytes for a full context. Raises MemoryBudgetError if it does not fit."""
    limit = options.memory_bytes
    free_bytes = psutil.virtual_memory().available if limit is None else limit - weight_bytes
    needed_bytes = kv_bytes_for(context_tokens)
    if needed_bytes <= free_bytes:
        return needed_bytes
    fitting_tokens = context_tokens
    while fitting_tokens and kv_bytes_for(fitting_tokens) > free_bytes:
        fitting_tokens = fitting_tokens // 2 // BLOCK_TOKENS * BLOCK_TOKENS
    raise cache_too_large_error(context_tokens, needed_bytes, free_bytes, fitting_tokens)
