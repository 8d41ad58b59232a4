"""A head that llama.cpp runs: its weights, and one context for the views of all replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.base import LoadOptions
from edgespec.backends.head_trial import check_finite
from edgespec.backends.hidden_state_log import HiddenStateLog
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.head_context import HeadContext
from edgespec.backends.llamacpp.head_target import HeadTarget
from edgespec.backends.llamacpp.shared_head_context import HeadSlot, SharedHeadContext
from edgespec.backends.self_draft_view import SelfDraftView

__all__ = ["HeadFile", "HeadParts", "HeadWeights"]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a head, and how they are used.

    Attributes:
        handle: The llama_model handle that contains the head.
        path: The head's file.
        name: The head's name, for messages.
        options: See `head_options`.
        max_plan: The plan of the head's context for the target's maximum context length and all replies.
        free: Frees the weights that were loaded for the head.
        shown_path: The path to show to the user.
    """

    handle: Any
    path: Path
    name: str
    options: LoadOptions
    max_plan: ContextPlan
    free: Callable[[], None]
    shown_path: Path

    def plan_for(self, target: HeadTarget) -> ContextPlan:
        """Return the plan of the head's context for the target's current context length."""
        return self.max_plan.with_tokens(target.facts.context_tokens * self.max_plan.slots)


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The parts of a reply's view of a head.

    Attributes:
        weights: The head's weights.
        target: The target.
        context: Runs the head. If several replies share its passes, the reply's slot in the context.
        log: The log of the target's hidden states that the head reads.
        release: Called when the view is closed. See `SharedHead.view`.
    """

    weights: HeadWeights
    target: HeadTarget
    context: HeadContext | HeadSlot
    log: HiddenStateLog
    release: Callable[[], None]


class HeadFile:
    """A loaded head, whose context the first view opens. Implements `SharedHead`.

    Args:
        weights: The head's weights.
        states: The hidden states of the target that the head reads, numbered as in `HiddenStateSource`.
        open_context: Opens the context, given the target and the number of hidden state values per token.
        make_view: Creates a view.
    """

    def __init__(
        self,
        weights: HeadWeights,
        states: Sequence[int],
        open_context: Callable[[HeadTarget, int], HeadContext],
        make_view: Callable[[HeadParts], SelfDraftView[HeadTarget]],
    ) -> None:
        self._weights, self._states = weights, states
        self._open_context, self._make_view = open_context, make_view
        # One for each view: slots in a shared context, or a context of its own for the only view.
        self._contexts: Sequence[HeadContext | HeadSlot] = ()
        self._close_context: Callable[[], None] = lambda: None

    def view(self, target: HeadTarget, release: Callable[[], None]) -> SelfDraftView[HeadTarget]:
        """See `SharedHead`. Raises ModelFileError if the head's logits are not finite."""
        log = target.log_hidden_states(self._states)
        try:
            if not self._contexts:
                self._open(target, log.row_size)
            context = self._contexts[target.slot]
            view = self._make_view(HeadParts(self._weights, target, context, log, release))
        except BaseException:
            target.stop_logging(log)
            raise
        try:
            check_finite(view, self._weights.shown_path)
        except BaseException:
            view.close()
            raise
        return view

    def _open(self, target: HeadTarget, row_size: int) -> None:
        context = self._open_context(target, row_size)
        self._contexts, self._close_context = [context], context.close
        if context.plan.slots > 1:
            shared = SharedHeadContext(context, self._weights.name)
            self._contexts, self._close_context = shared.slots, shared.close

    def close(self) -> None:
        """See `SharedHead`."""
        self._close_context()
        self._weights.free()
