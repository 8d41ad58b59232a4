"""Probe a loaded model for capabilities that its metadata does not describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.kv_cells import Checkpoints
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import library
from edgespec.backends.replay import MAX_CHECKPOINTS
from edgespec.errors import BackendError, ModelFileError
from edgespec.model.base import LoadOptions, LowBit
from edgespec.model.model_facts import Capabilities
from edgespec.model.registry import format_of

__all__ = ["ProbeResult", "probe"]

# Token ids to run before and after a checkpoint, for testing whether restoring it is exact.
_PREFIX, _PASS = [0, 1], [1, 0, 1]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The capabilities of a model, as determined by `probe`.

    Attributes:
        rollback: A description of how the cache is rolled back.
        replays: Whether restoring a checkpoint reproduces the model's state exactly.
        undo_tokens: The number of recent tokens that can be removed without restoring a checkpoint.
    """

    capabilities: Capabilities
    rollback: str
    replays: bool = False
    undo_tokens: int = 0


def probe(context: LlamaContext, weights: Any, options: LoadOptions) -> ProbeResult:
    """Test a model's capabilities by running a few tokens and rolling some of them back.

    Leaves the context empty.

    Raises:
        ModelFileError: The model is not a decoder-only language model.
    """
    lib = library()
    if not context.has_memory or not lib.llama_model_has_decoder(weights):
        raise ModelFileError(
            "this model does not generate text",
            "choose a model that generates text",
            code="model_file_not_supported",
        )
    if lib.llama_model_has_encoder(weights) or lib.llama_model_is_diffusion(weights):
        raise ModelFileError(
            "encoder-decoder and diffusion models are not supported",
            "choose a decoder-only language model",
            code="model_file_not_supported",
        )
    try:
        result = _probe_replay(context) if context.plan.recurrent else _probe_cells(context, options)
    finally:
        context.clear()
    methods = result.capabilities.self_draft_methods | _head_methods(weights, result)
    return replace(result, capabilities=replace(result.capabilities, self_draft_methods=methods))


def _head_methods(weights: Any, result: ProbeResult) -> frozenset[str]:
    """Return the methods that can draft with a head for this model."""
    if not (result.capabilities.rollback or result.replays):
        return frozenset()
    architecture = metadata(weights, "general.architecture") or ""
    heads = format_of("gguf").heads
    return frozenset(name for name, support in heads.items() if support.runs_for(architecture))


def _probe_cells(context: LlamaContext, options: LoadOptions) -> ProbeResult:
    """Check whether tokens can be removed from the KV cache and whether cells can be copied."""
    context.append([0, 0], 0)
    if not context.drop(0, 1):
        return _without_rollback("its cache cannot be rolled back")
    parts = context.export_cells(0, 0, 1)
    context.clear()
    copyable = context.import_cells(parts, 0, 1) and context.export_cells(0, 0, 1) == parts
    tree = options.max_branches > 1
    reason = "" if tree else "it was loaded with --draft-branches 1"
    return ProbeResult(
        Capabilities(
            True,
            tree,
            reason,
            context.max_width,
            options.max_branches,
            self_draft_methods=frozenset({LowBit.method} if copyable else ()),
        ),
        "in place; sliding windows are kept whole" if context.window else "in place",
    )


def _probe_replay(context: LlamaContext) -> ProbeResult:
    """Check whether restoring a checkpoint is bit-exact, and whether rollback works without one."""
    checkpoints = Checkpoints(context)
    context.append(_PREFIX, 0)
    checkpoint = checkpoints.save(len(_PREFIX))
    first = _rows(context, 0)
    checkpoints.restore(checkpoint)
    try:
        exact = np.array_equal(first, _rows(context, 0))
    except BackendError:  # llama.cpp rejects the tokens if the KV cache still contains later ones.
        exact = False
    if not exact:
        return _without_rollback("restoring its recurrent state is not exact")
    undo_tokens = 0
    if context.undo_tokens and context.drop(0, len(_PREFIX) + 1):
        undone = _rows(context, 1)
        checkpoints.restore(checkpoint)
        context.append(_PASS[:1], len(_PREFIX))
        narrow = _rows(context, 1)
        # Rollback works if the logits after it are correct up to rounding errors.
        if _distance(undone, narrow) <= 2 * _distance(first[1:], narrow):
            undo_tokens = context.undo_tokens
    rollback = f"checkpoints and replay, {MAX_CHECKPOINTS} held"
    if undo_tokens:
        rollback = f"the last {undo_tokens} tokens in place, else {rollback}"
    reason = "its recurrent layers do not support branches"
    capabilities = Capabilities(False, False, reason, context.max_width, 1, partial_truncate=False)
    return ProbeResult(capabilities, rollback, True, undo_tokens)


def _without_rollback(reason: str) -> ProbeResult:
    return ProbeResult(Capabilities(False, False, reason, partial_truncate=False), "none")


def _rows(context: LlamaContext, skipped: int) -> NDArray[np.float32]:
    tokens = _PASS[skipped:]
    start = len(_PREFIX) + skipped
    rows = context.run(tokens, range(start, start + len(tokens)), [[0]] * len(tokens))
    return np.array(rows)


def _distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.abs(a - b).max())
