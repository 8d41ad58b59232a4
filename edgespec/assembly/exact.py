"""`--exact`: a target held to passes that agree with single steps to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.backends.base import LanguageModel, Progress
from edgespec.backends.bit_exactness import BitExactPasses, find_bit_exact_passes, restricted_to
from edgespec.cores import usable_cores
from edgespec.saved_arrays import SavedArrays, models_fingerprint

__all__ = ["hold_to_exact"]


def hold_to_exact(model: LanguageModel, how: str, progress: Progress | None) -> str:
    """Let a loaded target do only what agrees to the bit; gives what a person should know of it.

    how: all that changes how it computes, beside the weights (`PassCosts.settings_key`). What agrees is
    found out once, and kept. Raises CancelledError.
    """
    facts = model.facts
    able = facts.capabilities
    # As many threads are the default, and as much is tried, as these allow; MLX weights that draft at fewer
    # bits are split, and add up otherwise.
    limits = f"{usable_cores()} {facts.context_tokens} {able.tree} {sorted(able.self_draft_methods)}"
    told = f"{models_fingerprint(facts)} {facts.cache_variant} {facts.weight_bytes} {how} {limits}"
    notes = SavedArrays("agreement", told)
    found = _kept(notes)
    if found is None:
        found = find_bit_exact_passes(model, progress)
        notes.save({"agreement": np.array([found.width, found.branches, found.reading])})
    able = restricted_to(able, found)
    model.facts = replace(facts, capabilities=able)
    said = [
        f"exact: passes of up to {able.max_width} tokens" if able.rollback else "exact: nothing is guessed"
    ]
    if not able.prefix_reuse_exact:
        said.append(f"{'what was written' if able.partial_truncate else 'every text'} is read again")
    return ", ".join(said)


def _kept(notes: SavedArrays) -> BitExactPasses | None:
    """What was found before; None where there is nothing, or nothing that makes sense."""
    try:
        width, branches, reading = map(int, notes.load()["agreement"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return BitExactPasses(width, bool(branches), bool(reading)) if width >= 1 else None
