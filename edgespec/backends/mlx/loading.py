"""From a folder to a model behind the Protocol, with what it can do found out by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import psutil

from edgespec.backends.base import Capabilities, LanguageModel, LoadOptions, ModelFacts, Progress
from edgespec.backends.memory_check import BLOCK_TOKENS, cache_too_large, context_wanted
from edgespec.backends.mlx.build_info import mlx_core
from edgespec.backends.mlx.weight_loading import LoadedModel, load_model
from edgespec.errors import ModelFileError, OptionError
from edgespec.heap import unmap_freed_buffers

if TYPE_CHECKING:
    from edgespec.backends.mlx.model import MlxModel
    from edgespec.backends.mlx.probe import ProbeResult

__all__ = ["KV_BITS", "MAX_WIDTH", "check_options", "load"]

# As many rows as any policy asks for. What a pass computes in grows with them, and is part of the plan.
MAX_WIDTH = 64
KV_BITS = {"auto": None, "q8_0": 8, "q4_0": 4}


def load(path: str, name: str, options: LoadOptions, progress: Progress | None = None) -> LanguageModel:
    """Load the MLX or Hugging Face model in a folder.

    Raises ModelFileError (no such model, damaged, a GGUF, unknown architecture), MemoryBudgetError,
    OptionError, BackendMissingError, and CancelledError when `progress` returns False.
    """
    check_options(options)
    mlx_core()  # says so where mlx is missing; what is imported from here on needs it
    from edgespec.backends.mlx.evaluation import limit_freed_buffers, release_thread_state

    unmap_freed_buffers()
    limit_freed_buffers()
    try:
        return _load(path, name, options, progress)
    except BaseException:
        release_thread_state()
        raise


def _load(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LanguageModel:
    from edgespec.backends.mlx.model import MlxModel
    from edgespec.backends.mlx.probe import PROBE_TOKENS
    from edgespec.backends.mlx.vocabulary import MlxVocabulary

    checkpoint = load_model(path, name, options, progress)
    context_tokens = context_wanted(options, checkpoint.trained_context_tokens)
    facts = _facts(checkpoint, path, name, context_tokens)
    vocabulary = MlxVocabulary(checkpoint.tokenizer, checkpoint.vocab_size)
    facts = replace(facts, vocab_size=vocabulary.size, chat_template=vocabulary.chat_template is not None)
    model = MlxModel(
        checkpoint,
        # A context may be smaller than what is tried in it.
        replace(facts, context_tokens=max(context_tokens, PROBE_TOKENS)),
        vocabulary,
        kv_bits=KV_BITS[options.kv_type],
        batch_tokens=options.batch_tokens,
    )
    try:
        found = _probed(model, options)
        model.parts.missing = found.no_self_draft
        weight_bytes = checkpoint.weight_bytes + checkpoint.low_bits_bytes
        model.kv_bytes_within = partial(_kv_bytes_within, found.kv_bytes_for, weight_bytes, options)
        model.facts = replace(
            facts,
            kv_bytes=model.kv_bytes_within(context_tokens),
            capabilities=found.capabilities,
            rollback=found.rollback,
        )
        if not found.replays:
            return model
        from edgespec.backends.replay import ReplayModel

        return ReplayModel(model, found.capabilities.reason)
    except BaseException:
        model.close()
        raise


def _probed(model: MlxModel, options: LoadOptions) -> ProbeResult:
    from edgespec.backends.mlx.probe import probe

    try:
        return probe(model)
    except ModelFileError as error:
        if options.kv_type == "auto":
            raise
        raise OptionError(
            f"{model.facts.name} does not run with kv_type {options.kv_type!r}: {error.what}",
            "use --kv-type auto",
        ) from error


def check_options(options: LoadOptions) -> None:
    """Refuse what would have no effect."""
    if options.kv_type not in KV_BITS:
        raise OptionError(
            f"kv_type is {options.kv_type!r}",
            f"with MLX choose one of {', '.join(KV_BITS)}; auto keeps the type the model computes in",
        )
    for name, given, hint in (
        ("threads", options.threads is not None, "MLX chooses its threads itself"),
        ("gpu_layers", options.gpu_layers is not None, "MLX runs the whole model on one device"),
        ("flash_attention", options.flash_attention != "auto", "MLX has one kernel"),
        ("mlock", options.mlock, "MLX keeps the weights in memory anyway"),
        ("mmap", not options.mmap, "MLX reads the weights once"),
    ):
        if given:
            raise OptionError(f"{name} has no meaning for an MLX model: {hint}", f"leave {name} out")


def _facts(checkpoint: LoadedModel, path: str, name: str, context_tokens: int) -> ModelFacts:
    trained = checkpoint.trained_context_tokens or context_tokens
    notice = ""
    if context_tokens > trained:
        notice = f"{name} was trained for {trained} tokens of context; beyond them it may ramble"
    return ModelFacts(
        name=name,
        path=path,
        architecture=checkpoint.architecture,
        description=checkpoint.description,
        parameters=checkpoint.parameters,
        file_bytes=checkpoint.file_bytes,
        weight_bytes=checkpoint.weight_bytes,
        kv_bytes=0,
        quantisation=checkpoint.quantisation,
        trained_context_tokens=trained,
        context_tokens=context_tokens,
        vocab_size=0,
        chat_template=False,
        capabilities=Capabilities(True, True, "", MAX_WIDTH),  # until it is probed
        notice=notice,
    )


def _kv_bytes_within(
    kv_bytes_for: Callable[[int], int], weight_bytes: int, options: LoadOptions, context_tokens: int
) -> int:
    """Bytes of a full context. Raises MemoryBudgetError when it would not fit what is there for it."""
    limit = options.memory_bytes
    left = psutil.virtual_memory().available if limit is None else limit - weight_bytes
    wanted = kv_bytes_for(context_tokens)
    if wanted <= left:
        return wanted
    fits = context_tokens
    while fits and kv_bytes_for(fits) > left:
        fits = fits // 2 // BLOCK_TOKENS * BLOCK_TOKENS
    raise cache_too_large(context_tokens, wanted, left, fits)
