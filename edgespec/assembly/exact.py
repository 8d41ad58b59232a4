"""Implement `--exact`: use only forward passes whose results are bit-identical to single-token passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.bit_exactness import BitExactPasses, find_bit_exact_passes, restricted_to
from edgespec.cores import usable_cores
from edgespec.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["restrict_to_exact"]


def restrict_to_exact(model: LanguageModel, computation: str, progress: Progress | None) -> str:
    """Restrict a loaded target to forward passes that give the same bits as single-token passes.

    How many tokens such a forward pass can have is measured once per model and machine, and saved.

    Args:
        model: The loaded target. Its `facts.capabilities` are replaced.
        computation: Identifies all settings that affect the target's computations.
        progress: Called during the measurement. Returning False cancels it with CancelledError.

    Returns:
        A message for the user about the restriction.
    """
    facts = model.facts
    capabilities = facts.capabilities
    methods = sorted(capabilities.self_draft_methods)
    limits = f"{model.max_threads or usable_cores()} {facts.context_tokens} {capabilities.tree} {methods}"
    model_identity = f"{models_fingerprint(facts)} {facts.cache_variant} {facts.weight_bytes}"
    saved = SavedArrays("agreement", f"{model_identity} {computation} {limits}")
    passes = _load_saved(saved)
    if passes is None:
        passes = find_bit_exact_passes(model, progress)
        saved.save({"agreement": np.array([passes.max_width, passes.trees, passes.prefill])})
    capabilities = restricted_to(capabilities, passes)
    model.facts = replace(facts, capabilities=capabilities)
    if not capabilities.rollback:
        notice = "exact: this model cannot draft"
    else:
        notice = f"exact: passes of up to {capabilities.max_width} tokens"
    if not capabilities.prefix_reuse_exact:
        reread = "each reply is" if capabilities.partial_truncate else "the whole text is"
        notice += f"; {reread} processed again before the next reply"
    return notice


def _load_saved(saved: SavedArrays) -> BitExactPasses | None:
    try:
        width, branches, reading = map(int, saved.load()["agreement"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return BitExactPasses(width, bool(branches), bool(reading)) if width >= 1 else None
