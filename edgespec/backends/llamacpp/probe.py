"""What a loaded model can do: what it claims is not what counts, so it is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LoadOptions
from edgespec.backends.llamacpp.checkpoints import StateCheckpoints
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.kv_types import SMALL_KERNEL_MAX_ROWS, prefill_kernel_differs
from edgespec.backends.llamacpp.native import library
from edgespec.errors import BackendError, ModelFileError

__all__ = ["ProbeResult", "probe"]

_BEFORE, _PASS = [0, 1], [1, 0, 1]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """capabilities: of the model as it stands. rollback: in words, how tokens are taken back.

    replays: it goes back to checkpoints, so chains can be verified and replayed. undo_tokens: so many
    tokens at the end of a pass are taken back without.
    """

    capabilities: Capabilities
    rollback: str
    replays: bool = False
    undo_tokens: int = 0


def probe(
    context: LlamaContext,
    weights: Any,
    plan: ContextPlan,
    options: LoadOptions,
    checkpoints: StateCheckpoints,
) -> ProbeResult:
    """Run a few tokens and take some back; the context is left empty. Raises ModelFileError."""
    lib = library()
    if not context.has_memory or not lib.llama_model_has_decoder(weights):
        raise ModelFileError("this model does not generate text", "choose a decoder language model")
    if lib.llama_model_has_encoder(weights) or lib.llama_model_is_diffusion(weights):
        raise ModelFileError(
            "encoder-decoder and diffusion models do not write token by token",
            "choose a decoder-only model",
        )
    try:
        return _replayed(context, plan, checkpoints) if plan.recurrent else _cut_back(context, plan, options)
    finally:
        context.clear()


def _cut_back(context: LlamaContext, plan: ContextPlan, options: LoadOptions) -> ProbeResult:
    context.append([0, 0], 0)
    if not context.drop(0, 1):
        return _plain("its memory cannot be rolled back")
    parts = context.export_cells(0, 0, 1)
    context.clear()
    movable = context.import_cells(parts, 0, 1) and context.export_cells(0, 0, 1) == parts
    tree = options.max_branches > 1
    reason = "" if tree else "it was loaded for one branch"
    continues = not prefill_kernel_differs(plan.kv_types, options, context.threads)
    # A draft of as many would be read as a text is; a draft model may round as it likes.
    width = (
        context.max_width if continues or options.is_draft else min(context.max_width, SMALL_KERNEL_MAX_ROWS)
    )
    return ProbeResult(
        Capabilities(
            True,
            tree,
            reason,
            width,
            options.max_branches,
            # A copy with fewer bits drafts on cells that were moved to it.
            self_draft_methods=frozenset({"lowbit"}) if movable else frozenset(),
            prefix_reuse_exact=continues,
        ),
        "in place; sliding windows are kept whole" if context.window else "in place",
    )


def _replayed(context: LlamaContext, plan: ContextPlan, checkpoints: StateCheckpoints) -> ProbeResult:
    """Go back to a checkpoint and compare, bit for bit; then try the states the library keeps of a pass."""
    context.append(_BEFORE, 0)
    moment = checkpoints.save(len(_BEFORE))
    first = _rows(context, 0)
    checkpoints.restore(moment)
    try:
        exact = np.array_equal(first, _rows(context, 0))
    except BackendError:  # the library saw that something was left over
        exact = False
    if not exact:
        return _plain("its recurrent state does not come back exactly")
    undo_tokens = 0
    if context.undo_tokens and context.drop(0, len(_BEFORE) + 1):
        undone = _rows(context, 1)
        checkpoints.restore(moment)
        context.append(_PASS[:1], len(_BEFORE))
        narrow = _rows(context, 1)
        # Passes of other widths may round otherwise; an earlier state must not differ by more.
        if _distance(undone, narrow) <= 2 * _distance(first[1:], narrow):
            undo_tokens = context.undo_tokens
    rollback = f"checkpoints and replay, {plan.sequences - 1} held"
    if undo_tokens:
        rollback = f"the last {undo_tokens} tokens in place, else {rollback}"
    reason = "its recurrent memory takes chains only"
    able = Capabilities(False, False, reason, context.max_width, 1, partial_truncate=False)
    return ProbeResult(able, rollback, True, undo_tokens)


def _plain(reason: str) -> ProbeResult:
    return ProbeResult(Capabilities(False, False, reason, partial_truncate=False), "none")


def _rows(context: LlamaContext, skipped: int) -> NDArray[np.float32]:
    """The logits of the pass without its first tokens."""
    tokens = _PASS[skipped:]
    start = len(_BEFORE) + skipped
    rows = context.run(tokens, range(start, start + len(tokens)), [[0]] * len(tokens))
    return np.array(rows)


def _distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.abs(a - b).max())
