"""A copy of a model with fewer bits that drafts on the keys and values of the model itself.

Source: QSpec (arXiv 2410.11305): the verified keys and values overwrite what the draft wrote, so that it
never prefills and never runs a token again. With a window it looks at the first few and the last tokens
only, and its memory does not grow with the text (MagicDec, arXiv 2408.11049).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from edgespec.backends.base import LoadOptions, LowBit
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.fingerprint import check_same_model
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_types import kv_bytes_per_token
from edgespec.backends.llamacpp.loading import (
    check_file,
    describe,
    load_vocabulary,
    load_weights,
    threads_for,
)
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.resizing import check_resize_fits, rebuild_context
from edgespec.backends.llamacpp.shared_target import SharedTarget
from edgespec.backends.memory_check import (
    BLOCK_TOKENS,
    cache_too_large_error,
    check_tokens_fit,
    check_weights_fit,
    round_up_to_block,
)
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ContextFullError,
    MemoryBudgetError,
)

__all__ = ["WINDOW_EXTRA_TOKENS", "LowBitView", "check_can_share_cache", "load_low_bit_view"]

# Tokens of drafts that a window leaves room for, at least.
_DRAFT_ROOM_TOKENS = 64
# A window lets go of so many tokens at once.
_WINDOW_STEP_TOKENS = 64
# What a copy's context holds beside sinks and window.
WINDOW_EXTRA_TOKENS = _WINDOW_STEP_TOKENS + _DRAFT_ROOM_TOKENS
_ALL_TOKENS = 1 << 62
# So many tokens are handed over at once: an interrupt waits no longer, and the bytes between are few.
_HANDED_TOKENS = 256


def check_can_share_cache(path: Path) -> None:
    """Raises CapabilityError for a model that could not lend its memory to a copy, and ModelFileError."""
    lib = library()
    model = load_vocabulary(str(path), path.name)
    try:
        if lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model):
            raise CapabilityError(
                f"{path.name} cannot draft with fewer bits: its memory is a state, and a copy can take over"
                " keys and values only",
                "use a method that needs no copy, such as suffix",
            )
    finally:
        lib.llama_model_free(model)


def load_low_bit_view(target: SharedTarget, how: LowBit) -> LowBitView:
    """A view of `target` that drafts with the copy of `how`.

    Raises CapabilityError when this target cannot lend its memory or the file is no copy of it,
    MemoryBudgetError, and ModelFileError for a file that cannot be loaded.
    """
    if how.copy is None:
        raise CapabilityError(
            f"{target.facts.name} holds its weights at one precision",
            "make a copy with fewer bits: edgespec prepare lowbit",
        )
    if how.sink_tokens < 0 or (how.window_tokens is not None and how.window_tokens < 1):
        raise CapabilityError(
            f"a window of {how.window_tokens} tokens after {how.sink_tokens} cannot be drafted from",
            "a window has at least 1 token",
        )
    if "lowbit" not in target.facts.capabilities.self_draft_methods:
        raise CapabilityError(
            f"{target.facts.name} cannot lend its memory: {target.facts.capabilities.reason or 'it failed'}",
            "choose another method",
        )
    options = target.options
    if options.memory_bytes is not None:
        left = options.memory_bytes - target.facts.weight_bytes - target.facts.max_kv_bytes
        options = replace(options, memory_bytes=max(0, left))
    name = f"{target.facts.name} at low bits"
    # Before minutes of loading, not after.
    check_weights_fit(name, check_file(how.copy), options)
    weights = load_weights(how.copy, name, options, None)
    try:
        check_same_model(target.weights, weights, how.copy)
        return LowBitView(target, weights, how.copy, how, replace(options, adapter=None), name)
    except BaseException:
        library().llama_model_free(weights)
        raise


def _plan(target: SharedTarget, weights: Any, how: LowBit, options: LoadOptions) -> ContextPlan:
    """As large a context as the target's may become, or as the window and what is drafted after it."""
    tokens = target.plan.tokens
    if how.window_tokens is not None:
        looked_at = how.sink_tokens + how.window_tokens + WINDOW_EXTRA_TOKENS
        tokens = min(tokens, round_up_to_block(looked_at))
    per_token = kv_bytes_per_token(weights, target.plan.kv_types)
    plan = replace(target.plan, tokens=tokens, kv_bytes=tokens * per_token, token_bytes=per_token)
    limit = options.memory_bytes if options.memory_bytes is not None else psutil.virtual_memory().available
    left = max(0, limit - library().llama_model_size(weights))
    if plan.kv_bytes > left:
        fitting = left // per_token // BLOCK_TOKENS * BLOCK_TOKENS
        raise cache_too_large_error(tokens, plan.kv_bytes, left, fitting)
    return plan


class LowBitView(SelfDraftView[SharedTarget]):
    """The target as its own draft, with the weights of a low-bit copy.

    Its context holds the target's cells [0, sinks) and [begin, held), and the drafts of an open round
    after them. Without a window `begin` stays at the sinks' end, and the context grows with the target's;
    with one `begin` moves on in steps.
    """

    def __init__(
        self, target: SharedTarget, weights: Any, path: str, how: LowBit, options: LoadOptions, name: str
    ) -> None:
        super().__init__(target)
        self._weights = weights
        self.vocabulary = target.model.vocabulary
        plan = _plan(target, weights, how, options)
        whole = self._whole = how.window_tokens is None or plan.tokens == target.plan.tokens
        self._sinks = 0 if whole else how.sink_tokens
        self._window = _ALL_TOKENS if whole or how.window_tokens is None else how.window_tokens
        self._begin = self._sinks
        threads = threads_for(weights, options)
        now = plan.with_tokens(target.facts.context_tokens) if whole else plan
        self._context = LlamaContext(weights, options, now, threads)
        # Its length counts what was dropped between sinks and window too: it is where drafts go on.
        self._cells = KvCells(self._context, options.max_branches)
        self._same = target.cells.track_prefix()
        try:
            self._try()
        except BaseException:
            target.cells.untrack_prefix(self._same)
            self._context.close()
            raise
        able = target.facts.capabilities
        width = (
            self._context.max_width
            if whole
            else plan.tokens - self._sinks - self._window - _WINDOW_STEP_TOKENS
        )
        able = replace(able, max_width=min(width, able.max_width), self_draft_methods=frozenset())
        facts = describe(weights, path, name, plan, self.vocabulary, ProbeResult(able, "overwritten"))
        self.facts = replace(
            facts,
            context_tokens=target.facts.context_tokens,
            requested_context_tokens=target.plan.tokens,
            kv_bytes=now.kv_bytes,
            notice="",
        )
        self._options = options

    @property
    def free_tokens(self) -> int:
        room = self._target.free_tokens
        return max(0, min(room, self._context.tokens - self.length)) if self._whole else room

    def resized(self) -> None:
        """See `SelfDraftView`. Where there is no memory for it, it has the room that it had."""
        super().resized()
        if not self._whole:
            return
        plan = self._context.plan.with_tokens(self.facts.context_tokens)
        try:
            check_resize_fits([self._context.plan], [plan], self.facts.weight_bytes, self._options)
            self._cells.truncate(min(self._cells.length, self._same.until))
            rebuild_context(self._context, plan, self._cells.length)
        except MemoryBudgetError:
            pass
        finally:
            if self._context.is_lost:
                self._cells.length = 0
        self.facts = replace(self.facts, kv_bytes=self._context.plan.kv_bytes)

    def _try(self) -> None:
        """Hand two tokens over and run a third. Raises CapabilityError when they arrive changed."""
        lent = self._target
        if made := lent.length == 0:
            lent.model.prefill([0, 0])
        count = min(2, lent.length)
        try:
            parts = lent.export_cells(0, count)
        finally:
            if made:
                lent.model.truncate(0)
        handed = (
            self._context.import_cells(parts, 0, count) and self._context.export_cells(0, 0, count) == parts
        )
        if not handed or not np.isfinite(self._context.run([0], [count], [[0]])).all():
            raise CapabilityError(
                f"the copy cannot take over what {lent.facts.name} has_memory",
                "make the copy again: edgespec prepare lowbit",
            )
        self._cells.truncate(0)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            if tree.width > self.facts.capabilities.max_width:
                raise CapabilityError(
                    f"a draft of {tree.width} tokens is wider than {self.facts.capabilities.max_width}"
                )
            if first == 0:
                self._take_over()
            positions, sequences = self._cells.place_tree(tree, first)
            return HostLogits(self._context.run(tree.tokens[first:], positions, sequences))
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise

    def _take_over(self) -> None:
        """Take the target's new cells, and drop what it has no longer and what was drafted."""
        cells, length = self._cells, self._target.length
        let_go = (length - self._window - self._sinks) // _WINDOW_STEP_TOKENS * _WINDOW_STEP_TOKENS
        begin = self._sinks + max(0, let_go)
        same = min(cells.length, self._same.until)
        if same < cells.length and self._begin > self._sinks:
            same = 0  # what the window let go may be looked at again
        if begin > self._begin and self._context.window:
            # Layers with a window of their own would fill the hole with drafts too early.
            same = 0
        try:
            cells.truncate(same)  # ends the round too
            if same <= self._sinks:
                self._hand_over(same, min(self._sinks, length))
            elif begin > self._begin:
                self._context.drop(0, self._begin, min(begin, same))
            self._begin = begin
            self._hand_over(max(begin, cells.length), length)
        except BaseException:
            # Stopped between two steps: nothing that is there is counted on.
            self._context.clear()
            cells.truncate(0)
            raise
        cells.length = self._same.until = length

    def _hand_over(self, start: int, end: int) -> None:
        """KvCells [start, end) of the target, after what is there."""
        for begin in range(start, end, _HANDED_TOKENS):
            if self._context.interrupt.requested:
                raise CancelledError("cancelled")
            stop = min(begin + _HANDED_TOKENS, end)
            if not self._context.import_cells(self._target.export_cells(begin, stop), begin, stop):
                raise BackendError(
                    f"{stop - begin} cells of {self._target.facts.name} could not be handed over",
                    "use another method",
                )
            self._cells.length = stop

    def interrupt(self, enabled: bool) -> None:
        self._context.interrupt.requested = enabled

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._target.cells.untrack_prefix(self._same)
        self._context.close()
        library().llama_model_free(self._weights)
