"""Run the prefill, verify and draft passes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from operator import eq
from time import perf_counter as now
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.mlx.attention_cache import PassLayout, install_tree_ropes
from edgespec.backends.mlx.evaluation import evaluate, start_evaluation, translate_errors
from edgespec.backends.mlx.layer_caches import CacheCheckpoint, LayerCaches
from edgespec.backends.mlx.layers import LayerList, StateRecorder
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.partial_models import EarlyExitModel, PartialModel
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import BackendError, CancelledError, CapabilityError
from edgespec.model.hidden_states import OpenLogs

__all__ = ["PassRunner"]


class _PrelaunchedPass(NamedTuple):
    """A pass over a chain of tokens, launched before the caller requested it.

    Attributes:
        known: All tokens of the chain except the last.
        source: Logits whose top token is the chain's last token. They may not be computed yet.
        logits: Logits of the pass.
        states: Hidden states of the pass if they are recorded, otherwise None.
        before: Checkpoint of the caches before the pass.
    """

    known: tuple[int, ...]
    source: DeviceLogits
    logits: DeviceLogits
    states: mx.array | None
    before: CacheCheckpoint


class PassRunner:
    """Runs a model's passes, and commits or discards the rows that they append to its caches.

    Invariants:

    - Every pass goes through `_forward`, which processes tokens after the cached ones, as laid out by the
      `PassLayout`.
    - Every method starts its computation before it returns, because MLX can evaluate an array only in the
      thread that created it, and the next call may come from another thread.
    - `committed` excludes rows from the current tree and from prelaunched or interrupted passes. `end_round`
      discards all of these before any new work.

    Attributes:
        context_tokens: Context size in tokens. Passes that would exceed it are not prelaunched.
        committed: Checkpoint of the caches that covers only committed tokens.
        run_ahead: Whether to prelaunch the next step. See `LanguageModel.run_ahead`.
        interrupted: Whether the model was interrupted. If so, no passes are prelaunched.
        recorder: Records the hidden states that heads read. None if no head was ever loaded.
    """

    def __init__(
        self, net: Any, context_tokens: int, max_width: int, kv_bits: int | None, logs: OpenLogs
    ) -> None:
        self.layout = PassLayout()
        install_tree_ropes(net, self.layout)
        self.caches = LayerCaches(net, self.layout, kv_bits)
        self.committed = self.caches.checkpoint()
        self.run_ahead = False
        self.interrupted = False
        self.recorder: StateRecorder | None = None
        self._net = net
        self._logs = logs
        self.context_tokens = context_tokens
        self._max_width = max_width
        self._round = TreeBuilder()
        # The hidden states of the passes in this round, if they are recorded.
        self._round_states: list[mx.array] = []
        # The partial model (with fewer layers or bits) that is drafting for this model, or None.
        self._partial_model: PartialModel | None = None
        self._prelaunched: _PrelaunchedPass | None = None
        self._target: PassRunner | None = None
        self._draft: PassRunner | None = None
        # The model's layers if passes run only the first of them. See `run_first_layers`.
        self._all_layers: list[Any] | None = None
        self._closed = False

    @property
    def length(self) -> int:
        return self.committed.length

    def _forward(self, tokens: mx.array) -> mx.array:
        """Run the model on tokens [n] after the cached ones, and return unevaluated logits [n, vocab]."""
        with translate_errors("the model could not be run"):
            rows: mx.array = self._net(tokens[None], cache=self.caches.layers)[0]
        self.caches.length += tokens.size
        if tokens.size > 1:
            self.caches.detach_states()
        if self._all_layers is not None:
            self.caches.set_offset(self.caches.length)
        return rows.astype(mx.float32)

    def _forward_recorded(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """Run the whole model. Return the logits, and the hidden states if they are being recorded."""
        recorder = self.recorder
        if recorder is None or not self._logs.states:
            return self._forward(tokens), None
        with recorder.recorded():
            rows = self._forward(tokens)
        return rows, recorder.last

    def _forward_partial(self, tokens: mx.array, partial_model: AbstractContextManager[None]) -> mx.array:
        with partial_model:
            rows = self._forward(tokens)
        # Advance the position in every layer's cache explicitly, because skipped layers do not.
        self.caches.set_offset(self.caches.length)
        return rows

    def best_tokens(
        self, tokens: Sequence[int], partial_model: AbstractContextManager[None]
    ) -> NDArray[np.uint32]:
        """Return the most likely next token after each of `tokens`, without changing the KV cache.

        The tokens follow the committed ones. The pass runs inside the context manager `partial_model`.
        """
        try:
            self.caches.set_offset(self.length)
            self.layout.set_chain(self.length)
            self.layout.scratch = True
            best = mx.argmax(self._forward_partial(mx.array(list(tokens)), partial_model), axis=-1)
            evaluate(best)
            return np.array(best)
        finally:
            self.layout.scratch = False
            self.end_round()

    def append(self, tokens: Sequence[int]) -> None:
        """Process tokens and add them to the caches. If MLX fails, raise BackendError and add none."""
        self.layout.set_chain(self.length)
        try:
            _, states = self._forward_recorded(mx.array(list(tokens)))
            self._start_states(len(tokens))
            evaluate(*self.caches.arrays, *([] if states is None else [states]))
        except (BackendError, CancelledError):
            self.end_round()
            raise
        self._log([] if states is None else [states], range(len(tokens)))
        self.committed = self.caches.checkpoint()
        mx.clear_cache()

    def verify(self, tree: TokenTree, first: int) -> DeviceLogits:
        """Run a verify pass over a supported tree. See `LanguageModel.verify`."""
        exit_states = self._end_draft(tree)
        prelaunched = self._take_prelaunched(tree, first)
        try:
            if first == 0 and not prelaunched:
                self.end_round()
            self._round.extend(tree, first)
            if prelaunched:
                states, logits = prelaunched.states, prelaunched.logits
            elif exit_states:
                states, logits = None, self._logits(self._resume(tree, *exit_states), None, first)
            else:
                rows, states = self._run(tree.tokens, first)
                logits = self._logits(rows, states, first)
            if states is not None:
                self._round_states.append(states)
            return logits
        except (BackendError, CancelledError):
            self.end_round()
            raise

    def draft(self, partial_model: PartialModel, tree: TokenTree, first: int) -> DeviceLogits:
        """Draft with a partial model. The drafted tokens are discarded when the full model is used again."""
        if first > 0 and partial_model is not self._partial_model:
            raise BackendError(
                "the draft cannot be extended, because the target model has discarded it", "begin a new draft"
            )
        prelaunched = self._take_prelaunched(tree, first) if first > 0 else None
        try:
            if first == 0:
                self.end_round()
                self._partial_model = partial_model
            self._round.extend(tree, first)
            return prelaunched.logits if prelaunched else self._logits(*self._run(tree.tokens, first), first)
        except BaseException:
            self.end_round()
            raise

    def end_round(self) -> None:
        """Discard uncommitted tokens and the results of prelaunched passes."""
        if self._partial_model:
            self._partial_model.end_round()
        self._partial_model = self._prelaunched = None
        self._round, self._round_states = TreeBuilder(), []
        if self.caches.unsupported and self.caches.length != self.length:
            self.clear()
        elif self.length:
            self.caches.restore(self.committed)
        elif self.caches.length:
            self.caches.clear()

    def clear(self) -> None:
        self.committed = CacheCheckpoint(0, (), ())
        self._logs.truncate(0)
        self.caches.clear()
        self.committed = self.caches.checkpoint()

    def truncate(self, length: int) -> None:
        """Truncate the caches to the first `length` committed tokens, or clear them if that is impossible."""
        self.end_round()
        if 0 < length < self.length and self.caches.can_rewind(length):
            self.caches.set_offset(length)
            self.committed = self.caches.checkpoint()
            self._logs.truncate(length)
        elif length < self.length or length == 0:
            self.clear()

    def commit(self, path: tuple[int, ...]) -> None:
        """See `LanguageModel.commit`.

        Raises CapabilityError if that would require removing tokens from a recurrent state.
        """
        if self._partial_model:
            self.end_round()
            return
        kept, prelaunched = [0, *path], self._prelaunched
        self._log(self._round_states, kept)
        if len(self._round) == 1 and prelaunched:
            self.committed = prelaunched.before
        else:
            if prelaunched:
                self.caches.restore(prelaunched.before)
                self._prelaunched = None
            if kept != list(range(len(kept))):
                self.caches.keep_path(self.length, kept)
                start_evaluation(*self.caches.arrays)
            elif len(kept) < len(self._round):
                if self.caches.recurrent and self._round_states:
                    # Discard the tree without an error, because the caller commits only to log hidden states
                    # before restoring a checkpoint.
                    self.end_round()
                    return
                if self.caches.recurrent:
                    raise CapabilityError(
                        "a recurrent model cannot remove the last tokens from its state",
                        "rewind to a checkpoint instead",
                        code="rollback_not_supported",
                    )
                self.caches.set_offset(self.length + len(kept))
            self.committed = self.caches.checkpoint()
        self._round, self._round_states = TreeBuilder(), []

    def repeat(self, end: int) -> None:
        """Append copies of all cached tokens until the caches hold `end` tokens.

        The caches must be truncatable.
        """
        self.end_round()
        self.caches.repeat(end)
        evaluate(*self.caches.arrays)
        self.committed = self.caches.checkpoint()

    def run_first_layers(self, count: int) -> None:
        """Clear the caches, and make later passes skip all but the first `count` layers, or none if 0."""
        self.end_round()
        self.clear()
        if self._all_layers is not None:
            LayerList(self._net).replace(self._all_layers)
            self._all_layers = None
        if count:
            layers = LayerList(self._net)
            self._all_layers = layers.layers
            layers.replace(layers.without(range(count, len(layers.layers))))

    def rewind(self, checkpoint: CacheCheckpoint) -> None:
        """Roll back to a checkpoint whose tokens are all still cached. Hidden-state logs are kept."""
        self.end_round()
        self.caches.restore(checkpoint)
        self.committed = checkpoint

    def _log(self, passes: Sequence[mx.array], rows: Sequence[int]) -> None:
        """Log the hidden states of tokens that are about to be committed."""
        if self.recorder is not None and passes:
            self.recorder.append(self.length, passes, rows)

    def _run(self, tokens: Sequence[int], first: int) -> tuple[mx.array, mx.array | None]:
        self._set_layout(first)
        return self._pass(mx.array(list(tokens[first:])), first)

    def _set_layout(self, first: int) -> None:
        if self._round.is_chain:
            self.layout.set_chain(self.length)
        else:
            self.layout.set_tree(self.length, self._round.parents, self._round.depths, first)

    def _pass(self, tokens: mx.array, first: int) -> tuple[mx.array, mx.array | None]:
        if self._partial_model is None:
            return self._forward_recorded(tokens)
        return self._forward_partial(tokens, self._partial_model.active(first)), None

    def _start(self, rows: mx.array, states: mx.array | None) -> None:
        arrays = self._partial_model.background_arrays() if self._partial_model else []
        arrays += [] if states is None else [states]
        self._start_states(rows.shape[0])
        start_evaluation(rows, *arrays, *(array for layer in self.caches.states for array in layer))

    def _start_states(self, width: int) -> None:
        """Start computing the recurrent states one layer at a time, to reduce peak memory."""
        if width > 1:
            for layer in self.caches.states:
                start_evaluation(*layer)

    def _logits(self, rows: mx.array, states: mx.array | None, first: int) -> DeviceLogits:
        self._start(rows, states)
        depths = self._round.depths[first:]
        return DeviceLogits(rows, depths, self._prelaunch_next if self._round.is_chain else None)

    def _end_draft(self, tree: TokenTree) -> tuple[EarlyExitModel, mx.array] | None:
        """Discard the draft. Return the early-exit model and its hidden states if `tree` can reuse them."""
        partial_model = self._partial_model
        if partial_model is None:
            return None
        drafted = zip(self._round.tokens, self._round.parents, strict=True)
        requested = zip(tree.tokens, tree.parents, strict=True)
        common = sum(takewhile(bool, map(eq, drafted, requested)))
        exit_states = None
        is_logged = bool(self._logs.states)
        # The states cannot be reused if `length` is 0, because `end_round` would clear the KV cache. Nor can
        # they be reused if a head reads hidden states of the lower layers, which are recorded only while
        # those layers run.
        if isinstance(partial_model, EarlyExitModel) and common and self.length and not is_logged:
            exit_states = partial_model, partial_model.exit_states(common)
        self.end_round()
        return exit_states

    def _resume(self, tree: TokenTree, exit_model: EarlyExitModel, states: mx.array) -> mx.array:
        """Verify a tree by running the layers above the exit layer, given that layer's output `states`."""
        known = states.shape[1]
        if known < tree.width:
            self.caches.set_offset(self.length + known)
            self._set_layout(known)
            self._forward_partial(mx.array(list(tree.tokens[known:])), exit_model.active(known))
            states = mx.concatenate([states, exit_model.exit_states(tree.width)], axis=1)
            exit_model.end_round()
        self.caches.set_offset(self.length)
        self._set_layout(0)
        return self._forward_partial(mx.array(tree.tokens), exit_model.resumed_from(states))

    def pipeline_with(self, draft: PassRunner | None) -> None:
        if self._draft:
            self._draft._target = None
        self._draft = draft
        if draft:
            draft._target = self

    def _prelaunch_next(self, token: mx.array, source: DeviceLogits) -> None:
        """Prelaunch the pass that follows `token`, whose value is not known yet."""
        if self._partial_model.run_ahead if self._partial_model else self.run_ahead:
            self._prelaunch((), token, source)
        elif not self._partial_model and self._target and not len(self._target._round):
            # Skip tokens that are already in the target's cache.
            chain = tuple(self._round.tokens[max(0, self._target.length - self.length) :])
            if 0 < len(chain) < self._target._max_width:
                self._target._prelaunch(chain, token, source)

    def _prelaunch(self, known: tuple[int, ...], token: mx.array, source: DeviceLogits) -> None:
        """Prelaunch a pass over the `known` tokens and `token`, whose value is not known yet."""
        width = len(known) + 1
        if self._prelaunched or self._closed or self.interrupted:
            return
        if self.length + len(self._round) + width > self.context_tokens or self.caches.unsupported:
            return
        started = now()
        before = self.caches.checkpoint()
        self.layout.set_chain(self.length)
        tokens = mx.concatenate([mx.array(known, mx.uint32), token]) if known else token
        rows, states = self._pass(tokens, len(self._round))
        self._start(rows, states)
        logits = DeviceLogits(rows, range(width), self._prelaunch_next)
        logits.overlapped_seconds = now() - started if known else 0.0
        self._prelaunched = _PrelaunchedPass(known, source, logits, states, before)

    def _take_prelaunched(self, tree: TokenTree, first: int) -> _PrelaunchedPass | None:
        """Return the prelaunched pass if it matches the requested one. Otherwise, discard it."""
        prelaunched, self._prelaunched = self._prelaunched, None
        if prelaunched:
            follows = first == len(self._round) and tree.is_chain
            if follows and tree.tokens[first:] == (*prelaunched.known, prelaunched.source.chosen):
                return prelaunched
            self.caches.restore(prelaunched.before)
        return None

    def close(self) -> None:
        """Free the model's weights and caches."""
        self._closed = True
        self.pipeline_with(None)
        if self._target:
            self._target.pipeline_with(None)
        self._prelaunched = self._partial_model = None
        del self._net, self.caches, self.recorder
