"""The passes of an MLX model over its memory: those of a round, of its own drafts, and steps begun early."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter as now
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.evaluation import evaluate, start_evaluation, translate_errors
from edgespec.backends.mlx.layer_caches import CacheCheckpoint, LayerCaches
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.partial_models import EarlyExitModel, PartialModel
from edgespec.backends.mlx.pass_layout import PassLayout, install_tree_ropes
from edgespec.backends.mlx.rounds import Round
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError

__all__ = ["PassRunner"]

_TIDY_TOKENS = 256


@dataclass(slots=True)
class _Ahead:
    """A chain that was begun before it was asked for: `known` tokens, then the one that `source` chooses."""

    known: tuple[int, ...]
    source: DeviceLogits
    logits: DeviceLogits
    before: CacheCheckpoint


class PassRunner:
    """Runs tokens after the caches of one model, and keeps or drops what that leaves in them.

    Everything comes down to `_forward`: tokens after the cache, in the shape that `PassLayout` tells the
    layers. No call leaves anything unevaluated: MLX evaluates an array in the thread that made it only,
    and calls may come from different threads, one after another.

    context_tokens: nothing is begun early that would not fit. max_width: nor anything wider.
    kept: marks what was committed. Whatever else is in the memory, the rows of a round or of a pass begun
    early, or what an interrupt left there, is dropped by `end_round`, with which all new work begins.
    steps_ahead: the hint of `LanguageModel.run_ahead`. interrupted: begin nothing early.
    """

    def __init__(self, net: Any, context_tokens: int, max_width: int, kv_bits: int | None) -> None:
        self.shape = PassLayout()
        install_tree_ropes(net, self.shape)
        self.memory = LayerCaches(net, self.shape, kv_bits)
        self.kept = self.memory.mark()
        self.steps_ahead = False
        self.interrupted = False
        self._net = net
        self.context_tokens = context_tokens
        self._max_width = max_width
        self._round = Round()
        # How the open round is drafted, where it is a draft of this model itself.
        self._partial_model: PartialModel | None = None
        self._ahead: _Ahead | None = None
        self._follower: PassRunner | None = None
        self._leader: PassRunner | None = None
        self._tidy_at = _TIDY_TOKENS
        self._closed = False

    @property
    def length(self) -> int:
        """Tokens that were committed."""
        return self.kept.length

    def _forward(self, tokens: mx.array) -> mx.array:
        """Run tokens (integers [n]) after the cache: their logits, float32 [n, vocab], not yet computed."""
        with translate_errors("the model could not be run"):
            rows: mx.array = self._net(tokens[None], cache=self.memory.layers)[0]
        self.memory.length += tokens.size
        if tokens.size > 1:
            self.memory.cut_out()
        return rows.astype(mx.float32)

    def forward_part(self, tokens: mx.array, part: AbstractContextManager[None]) -> mx.array:
        """The same with some layers left out, whose caches are only told to go on.

        tokens: integers [n]. Gives logits, float32 [n, vocab], not yet computed. Raises BackendError.
        """
        with part:
            rows = self._forward(tokens)
        self.memory.stand(self.memory.length)
        return rows

    def append(self, tokens: Sequence[int]) -> None:
        """Run tokens outside a round and keep them. Raises BackendError; then none is kept."""
        self.shape.chain(self.length)
        try:
            self._forward(mx.array(list(tokens)))
            self._launch_states(len(tokens))
            # The logits are never asked for, and so never computed.
            evaluate(*self.memory.arrays)
        except BackendError:
            self.end_round()
            raise
        self.kept = self.memory.mark()
        mx.clear_cache()

    def verify(self, tree: TokenTree, first: int) -> DeviceLogits:
        """See `LanguageModel.verify`; the tree is one that this model takes."""
        known = self._end_draft(tree)
        ahead = self._take_ahead(tree, first)
        try:
            if first == 0 and not ahead:
                self.end_round()
                self._tidy()
            self._round.extend(tree, first)
            if ahead:
                return ahead.logits
            rows = self._go_on(tree, *known) if known else self._run(tree.tokens, first)
            return self._logits(rows, first)
        except BackendError:
            self.end_round()
            raise

    def draft(self, part: PartialModel, tree: TokenTree, first: int) -> DeviceLogits:
        """`verify` for a draft of this model itself; the next call that is not the draft's ends the round."""
        if first > 0 and part is not self._partial_model:
            raise BackendError("the round of this draft was ended by its target", "begin another one")
        ahead = self._take_ahead(tree, first) if first > 0 else None
        try:
            if first == 0:
                self.end_round()
                self._tidy()
                self._partial_model = part
            self._round.extend(tree, first)
            return ahead.logits if ahead else self._logits(self._run(tree.tokens, first), first)
        except BaseException:  # of a pass cut short nothing may be taken over
            self.end_round()
            raise

    def end_round(self) -> None:
        """Drop what was not committed."""
        if self._partial_model:
            self._partial_model.let_go()
        self._partial_model = self._ahead = None
        self._round = Round()
        if self.memory.foreign and self.memory.length != self.length:
            self.clear()
        elif self.length:
            self.memory.restore(self.kept)
        elif self.memory.length:
            self.memory.clear()

    def clear(self) -> None:
        """Empty the memory."""
        self.kept = CacheCheckpoint(0, (), ())
        self.memory.clear()
        self.kept = self.memory.mark()
        self._tidy_at = _TIDY_TOKENS

    def cut(self, length: int) -> None:
        """Keep at most the first `length` committed tokens, and none where they cannot be cut back to."""
        self.end_round()
        if 0 < length < self.length and self.memory.can_rewind(length):
            self.memory.rewind(length)
            self.kept = self.memory.mark()
        elif length < self.length or length == 0:
            self.clear()

    def commit(self, path: tuple[int, ...]) -> None:
        """See `LanguageModel.commit`. Raises CapabilityError for a state that cannot be cut back."""
        if self._partial_model:  # nothing of the target's own is in the round
            self.end_round()
            return
        kept, ahead = [0, *path], self._ahead
        if len(self._round) == 1 and ahead:
            self.kept = ahead.before
        else:
            if ahead:
                self.memory.restore(ahead.before)
                self._ahead = None
            if kept != list(range(len(kept))):
                self.memory.keep(self.length, kept)
                start_evaluation(*self.memory.arrays)
            elif len(kept) < len(self._round):
                if self.memory.recurrent:
                    raise CapabilityError("a recurrent state cannot be cut back", "go back to a checkpoint")
                self.memory.rewind(self.length + len(kept))
            self.kept = self.memory.mark()
        self._round = Round()

    def _tidy(self) -> None:
        """Caches that grow leave buffers behind, which MLX would keep for another use."""
        if self.length >= self._tidy_at:
            mx.clear_cache()
            self._tidy_at = self.length + _TIDY_TOKENS

    def _run(self, tokens: Sequence[int], first: int) -> mx.array:
        """Run nodes `first` and up of the round, as the target or as its draft."""
        self._set_shape(first)
        return self._pass(mx.array(list(tokens[first:])), first)

    def _set_shape(self, first: int) -> None:
        if self._round.is_chain:
            self.shape.chain(self.length)
        else:
            self.shape.tree(self.length, self._round.parents, self._round.depths, first)

    def _pass(self, tokens: mx.array, first: int) -> mx.array:
        if self._partial_model is None:
            return self._forward(tokens)
        return self.forward_part(tokens, self._partial_model.drafting(first))

    def _launch(self, rows: mx.array) -> None:
        states = self._partial_model.background_arrays() if self._partial_model else []
        self._launch_states(rows.shape[0])
        start_evaluation(rows, *states, *(array for layer in self.memory.states for array in layer))

    def _launch_states(self, width: int) -> None:
        """Layer by layer: MLX would compute all states last, and keep what they are made of until then."""
        for layer in self.memory.states if width > 1 else ():
            start_evaluation(*layer)

    def _logits(self, rows: mx.array, first: int) -> DeviceLogits:
        self._launch(rows)
        return DeviceLogits(
            rows, self._round.depths[first:], self._start_next if self._round.is_chain else None
        )

    def _end_draft(self, tree: TokenTree) -> tuple[EarlyExitModel, mx.array] | None:
        """End the draft's round, if one is open.

        Where it left at an exit: hidden states [1, nodes, size] of the first nodes that this tree shares.
        """
        part = self._partial_model
        if part is None:
            return None
        same = self._round.shared(tree)
        # A memory in which nothing is committed is made anew when its round ends.
        known = None
        if isinstance(part, EarlyExitModel) and same > 0 and self.length > 0:
            known = part, part.said(same)
        self.end_round()
        return known

    def _go_on(self, tree: TokenTree, exit_: EarlyExitModel, states: mx.array) -> mx.array:
        """Run a tree above an exit. `states`: what was said there of its first nodes."""
        known = states.shape[1]
        if known < tree.width:
            self.memory.stand(self.length + known)
            self._set_shape(known)
            # Its logits are not asked for, and so never computed.
            self.forward_part(mx.array(list(tree.tokens[known:])), exit_.drafting(known))
            states = mx.concatenate([states, exit_.said(tree.width)], axis=1)
            exit_.let_go()
        self.memory.stand(self.length)
        self._set_shape(0)
        return self.forward_part(mx.array(tree.tokens), exit_.going_on(states))

    def follow(self, leader: PassRunner | None) -> None:
        """The hint of `LanguageModel.follow`: a draft's passes, whose chains are verified here."""
        if self._leader:
            self._leader._follower = None
        self._leader = leader
        if leader:
            leader._follower = self

    def _start_next(self, token: mx.array, source: DeviceLogits) -> None:
        """Begin what follows on `token`, which is being computed: a step here, or the pass of a follower."""
        if self._partial_model:
            if self._partial_model.runs_ahead:
                self._begin((), token, source)
        elif self.steps_ahead:
            self._begin((), token, source)
        elif self._follower and not len(self._follower._round):
            # The draft may lag behind: what the target has cached is no part of its pass.
            guessed = tuple(self._round.tokens[max(0, self._follower.length - self.length) :])
            if 0 < len(guessed) < self._follower._max_width:
                self._follower._begin(guessed, token, source)

    def _begin(self, known: tuple[int, ...], token: mx.array, source: DeviceLogits) -> None:
        """Run a chain of known tokens and one that is being computed, before it is asked for."""
        width = len(known) + 1
        if self._ahead or self._closed or self.interrupted:
            return
        if self.length + len(self._round) + width > self.context_tokens:
            return
        if self.memory.foreign:  # what we do not know cannot be taken back
            return
        started = now()
        before = self.memory.mark()
        self.shape.chain(self.length)
        tokens = mx.concatenate([mx.array(known, mx.uint32), token]) if known else token
        rows = self._pass(tokens, len(self._round))
        self._launch(rows)
        logits = DeviceLogits(rows, range(width), self._start_next)
        logits.overlapped_seconds = now() - started if known else 0.0
        self._ahead = _Ahead(known, source, logits, before)

    def _take_ahead(self, tree: TokenTree, first: int) -> _Ahead | None:
        """What was begun, if this is it; else it is taken back."""
        ahead, self._ahead = self._ahead, None
        if not ahead:
            return None
        goes_on = first == len(self._round) and tree.is_chain
        if goes_on and tree.tokens[first:] == (*ahead.known, ahead.source.chosen):
            return ahead
        self.memory.restore(ahead.before)
        return None

    def close(self) -> None:
        """Let go of the weights and the caches; logits that are still held begin nothing more."""
        self._closed = True
        self.follow(None)
        if self._follower:
            self._follower.follow(None)
        self._ahead = self._partial_model = None
        del self._net, self.memory
