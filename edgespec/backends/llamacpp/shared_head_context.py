"""Share the context of a head between several replies, whose passes of the head run together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.head_context import HeadContext, HeadPass, HeadRows
from edgespec.backends.llamacpp.pass_scheduler import PassPart
from edgespec.backends.llamacpp.shared_context import ContextSlot, JoinedParts, SharedContext
from edgespec.errors import CapabilityError

__all__ = ["HeadSlot", "SharedHeadContext"]


class SharedHeadContext(SharedContext):
    """A head's context that several replies share, each in its own slot. See `SharedContext`.

    Raises:
        CapabilityError: Replies cannot share the head's passes.
    """

    _context: HeadContext
    slots: tuple[HeadSlot, ...]

    def __init__(self, context: HeadContext, name: str) -> None:
        if context.window:
            # llama.cpp would use the cells of a reply outside the window for tokens of other replies.
            raise CapabilityError(
                f"{name} cannot draft for several replies at once, because it has sliding-window attention",
                "omit --parallel, or choose another method, such as suffix",
            )
        # `HeadFile` frees the weights.
        super().__init__(context, lambda: None)

    def _make_slot(self, context: LlamaContext, slot: int) -> HeadSlot:
        return HeadSlot(self, context, slot)

    def _run_together(self, parts: Sequence[PassPart]) -> None:
        kind = parts[0].kind
        assert kind in ("encode", "prefill", "draft")
        tokens, positions, sequences = JoinedParts.of(parts)
        inputs = np.concatenate([part.inputs for part in parts])
        rows = self._context.compute(HeadPass(kind, tokens, inputs, positions, sequences))
        start = 0
        for part in parts:
            end = start + len(part.tokens)
            # Copy the logits, because the next pass overwrites them.
            part.rows, part.states = rows.logits[start:end].copy(), rows.states[start:end]
            start = end


class HeadSlot(ContextSlot):
    """One reply's slot in the shared context of a head, with the methods of `HeadContext` that heads need."""

    def compute(self, head_pass: HeadPass) -> HeadRows:
        """Run a pass of the head together with other replies. See `HeadContext.compute`."""
        kind, tokens, inputs, positions, sequences = head_pass
        outputs = len(tokens) if kind == "draft" else 0
        part = self._run(tokens, positions, sequences, outputs, kind, inputs)
        return HeadRows(part.rows, part.states)
