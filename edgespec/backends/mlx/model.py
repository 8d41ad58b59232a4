"""An MLX model behind the LanguageModel Protocol."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter as now
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from edgespec.backends.base import (
    LanguageModel,
    Learner,
    ModelFacts,
    Progress,
    SelfDraft,
    SkippedLayers,
    Snapshot,
    Vocabulary,
)
from edgespec.backends.mlx.device import evaluated, launched, leave_thread, translated
from edgespec.backends.mlx.files import Checkpoint
from edgespec.backends.mlx.layers import LayerList, LayerTaps
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.memory import Mark, Memory
from edgespec.backends.mlx.rounds import Round
from edgespec.backends.mlx.saved import from_bytes, to_bytes
from edgespec.backends.mlx.scoring import Best, Scorer
from edgespec.backends.mlx.selfdraft import MlxSelfDraft
from edgespec.backends.mlx.shape import PassShape, let_ropes_follow
from edgespec.backends.mlx.shortcuts import ExitShortcut, Shortcut, Shortcuts
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.backends.room import check_tokens_fit
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ClosedError, ContextFullError

__all__ = ["MlxModel"]

# A pass cannot be stopped half-way, so on a processor prefill goes on in small ones.
_CPU_BATCH_TOKENS = 64
_TIDY_TOKENS = 256


@dataclass(slots=True)
class _Ahead:
    """A chain that was begun before it was asked for: `known` tokens, then the one that `source` chooses."""

    known: tuple[int, ...]
    source: DeviceLogits
    logits: DeviceLogits
    before: Mark


class MlxModel:
    """One MLX model with one memory.

    Everything comes down to `_forward`: tokens after the cache, in the shape that `PassShape` tells the
    layers. No call leaves anything unevaluated: MLX evaluates an array in the thread that made it only,
    and calls may come from different threads, one after another.

    `_kept` marks what was committed. Whatever else is in the memory, the rows of a round or of a pass begun
    early, or what an interrupt left there, is dropped by `_settle`, with which all new work begins.
    `_shortcut` says how the open round is drafted, where it is a draft of this model itself.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        facts: ModelFacts,
        vocabulary: MlxVocabulary,
        *,
        kv_bits: int | None,
        batch_tokens: int,
    ) -> None:
        self.facts = facts
        self.vocabulary: Vocabulary = vocabulary
        self._close_vocabulary = vocabulary.close
        self._net = checkpoint.model
        self.rounding: float = mx.finfo(checkpoint.dtype).eps
        self._shape = PassShape()
        let_ropes_follow(self._net, self._shape)
        self.memory = Memory(self._net, self._shape, kv_bits)
        self._fingerprint = f"{facts.architecture} {facts.quantisation} {kv_bits} {_trace(self._net)}"
        self.shortcuts = Shortcuts(self._net, self._shape, checkpoint.low_bits)
        self._kept = self.memory.mark()
        self._round = Round()
        self._shortcut: Shortcut | None = None
        self._scorer = Scorer(self._forward_part, self.memory, self._shape)
        self._ahead: _Ahead | None = None
        self._runs_ahead = False
        self._follower: MlxModel | None = None
        self._leader: MlxModel | None = None
        on_cpu = mx.default_device() == mx.cpu
        self._batch_tokens = min(batch_tokens, _CPU_BATCH_TOKENS) if on_cpu else batch_tokens
        self._tidy_at = _TIDY_TOKENS
        self._interrupted = False
        self._closed = False

    @property
    def length(self) -> int:
        return self._kept.length

    @property
    def room(self) -> int:
        return self.facts.context_tokens - self.length

    def _forward(self, tokens: mx.array) -> mx.array:
        """Run tokens (integers [n]) after the cache: their logits, float32 [n, vocab], not yet computed."""
        with translated("the model could not be run"):
            rows: mx.array = self._net(tokens[None], cache=self.memory.layers)[0]
        self.memory.length += tokens.size
        return rows.astype(mx.float32)

    def _forward_part(self, tokens: mx.array, part: AbstractContextManager[None]) -> mx.array:
        """The same with some layers left out, whose caches are only told to go on."""
        with part:
            rows = self._forward(tokens)
        self.memory.stand(self.memory.length)
        return rows

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._settle()
        step = self._batch_tokens
        for start in range(0, len(tokens), step):
            self._check(0)
            if self._interrupted:
                raise CancelledError("cancelled")
            chunk = list(tokens[start : start + step])
            self._shape.chain(self.length)
            try:
                self._forward(mx.array(chunk))
                # The logits are never asked for, and so never computed.
                evaluated(*self.memory.arrays)
            except BackendError:
                self._settle()
                raise
            self._kept = self.memory.mark()
            mx.clear_cache()
            if progress and not progress("prefill", (start + len(chunk)) / len(tokens)):
                raise CancelledError("cancelled")

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        known = self._end_draft(tree)
        ahead = self._take_ahead(tree, first)
        try:
            self._check_pass(tree)
            if first == 0 and not ahead:
                self._settle()
                self._tidy()
            self._round.add(tree, first)
            if ahead:
                return ahead.logits
            rows = self._go_on(tree, *known) if known else self._run(tree.tokens, first)
            return self._logits(rows, first)
        except (BackendError, CapabilityError, ContextFullError, CancelledError):
            self._settle()
            raise

    def draft(self, shortcut: Shortcut, tree: TokenTree, first: int) -> DeviceLogits:
        """`verify` for a draft of this model itself; the next call that is not the draft's ends the round."""
        if first > 0 and shortcut is not self._shortcut:
            raise BackendError("the round of this draft was ended by its target", "begin another one")
        ahead = self._take_ahead(tree, first) if first > 0 else None
        try:
            self._check_pass(tree)
            if first == 0:
                self._settle()
                self._tidy()
                self._shortcut = shortcut
            self._round.add(tree, first)
            return ahead.logits if ahead else self._logits(self._run(tree.tokens, first), first)
        except BaseException:  # of a pass cut short nothing may be taken over
            self._settle()
            raise

    def _check_pass(self, tree: TokenTree) -> None:
        self._check(tree.width)
        if tree.width > 1:
            self._check_shape(tree)
        if self._interrupted:
            raise CancelledError("cancelled")

    def _check_shape(self, tree: TokenTree) -> None:
        capabilities = self.facts.capabilities
        if not capabilities.rollback and not self.memory.recurrent:
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", capabilities.reason)
        if tree.width > capabilities.max_width:
            raise CapabilityError(f"a tree of {tree.width} tokens is wider than {capabilities.max_width}")
        if not capabilities.tree and not tree.is_chain:
            raise CapabilityError(f"{self.facts.name} cannot verify trees", capabilities.reason)

    def _settle(self) -> None:
        """Drop what was not committed."""
        if self._shortcut:
            self._shortcut.forget()
        self._shortcut = self._ahead = None
        self._round = Round()
        if self.memory.foreign and self.memory.length != self.length:
            self._forget()
        elif self.length:
            self.memory.restore(self._kept)
        elif self.memory.length:
            self.memory.clear()

    def _forget(self) -> None:
        """Empty the memory."""
        self._kept = Mark(0, (), ())
        self.memory.clear()
        self._kept = self.memory.mark()
        self._tidy_at = _TIDY_TOKENS

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
            self._shape.chain(self.length)
        else:
            self._shape.tree(self.length, self._round.parents, self._round.depths, first)

    def _pass(self, tokens: mx.array, first: int) -> mx.array:
        if self._shortcut is None:
            return self._forward(tokens)
        return self._forward_part(tokens, self._shortcut.drafting(first))

    def _launch(self, rows: mx.array) -> None:
        states = self._shortcut.background_arrays() if self._shortcut else []
        launched(rows, *states, *self.memory.background_arrays)

    def _logits(self, rows: mx.array, first: int) -> DeviceLogits:
        self._launch(rows)
        return DeviceLogits(
            rows, self._round.depths[first:], self._start_next if self._round.is_chain else None
        )

    def _end_draft(self, tree: TokenTree) -> tuple[ExitShortcut, mx.array] | None:
        """End the draft's round, if one is open.

        Where it left at an exit: hidden states [1, nodes, size] of the first nodes that this tree shares.
        """
        shortcut = self._shortcut
        if shortcut is None:
            return None
        same = self._round.shared(tree)
        # A memory in which nothing is committed is made anew when it is settled.
        known = None
        if isinstance(shortcut, ExitShortcut) and same > 0 and self.length > 0:
            known = shortcut, shortcut.said(same)
        self._settle()
        return known

    def _go_on(self, tree: TokenTree, exit_: ExitShortcut, states: mx.array) -> mx.array:
        """Run a tree above an exit. `states`: what was said there of its first nodes."""
        known = states.shape[1]
        if known < tree.width:
            self.memory.stand(self.length + known)
            self._set_shape(known)
            # Its logits are not asked for, and so never computed.
            self._forward_part(mx.array(list(tree.tokens[known:])), exit_.drafting(known))
            states = mx.concatenate([states, exit_.said(tree.width)], axis=1)
            exit_.forget()
        self.memory.stand(self.length)
        self._set_shape(0)
        return self._forward_part(mx.array(tree.tokens), exit_.going_on(states))

    def _start_next(self, token: mx.array, source: DeviceLogits) -> None:
        """Begin what follows on `token`, which is being computed: a step here, or the pass of a follower."""
        if self._shortcut:
            if self._shortcut.runs_ahead:
                self._begin((), token, source)
        elif self._runs_ahead:
            self._begin((), token, source)
        elif self._follower and not len(self._follower._round):
            # The draft may lag behind: what the target has cached is no part of its pass.
            guessed = tuple(self._round.tokens[max(0, self._follower.length - self.length) :])
            if 0 < len(guessed) < self._follower.facts.capabilities.max_width:
                self._follower._begin(guessed, token, source)

    def _begin(self, known: tuple[int, ...], token: mx.array, source: DeviceLogits) -> None:
        """Run a chain of known tokens and one that is being computed, before it is asked for."""
        width = len(known) + 1
        if self._ahead or self._closed or self._interrupted or len(self._round) + width > self.room:
            return
        if self.memory.foreign:  # what we do not know cannot be taken back
            return
        started = now()
        before = self.memory.mark()
        self._shape.chain(self.length)
        tokens = mx.concatenate([mx.array(known, mx.uint32), token]) if known else token
        rows = self._pass(tokens, len(self._round))
        self._launch(rows)
        logits = DeviceLogits(rows, range(width), self._start_next)
        logits.begun_seconds = now() - started if known else 0.0
        self._ahead = _Ahead(known, source, logits, before)

    def _take_ahead(self, tree: TokenTree, first: int) -> _Ahead | None:
        """What was begun, if this is it; else it is taken back."""
        ahead, self._ahead = self._ahead, None
        if not ahead:
            return None
        goes_on = first == len(self._round) and tree.is_chain and not self._closed
        if goes_on and tree.tokens[first:] == (*ahead.known, ahead.source.chosen):
            return ahead
        self.memory.restore(ahead.before)
        return None

    def run_ahead(self, wanted: bool) -> None:
        self._runs_ahead = wanted

    def follow(self, draft: LanguageModel | None) -> None:
        if self._leader:
            self._leader._follower = None
        self._leader = draft if isinstance(draft, MlxModel) else None
        if self._leader:
            self._leader._follower = self

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        if self._shortcut:  # nothing of the target's own is in the round
            self._settle()
            return
        kept, ahead = [0, *path], self._ahead
        if len(self._round) == 1 and ahead:
            self._kept = ahead.before
        else:
            if ahead:
                self.memory.restore(ahead.before)
                self._ahead = None
            if kept != list(range(len(kept))):
                self.memory.keep(self.length, kept)
                launched(*self.memory.arrays)
            elif len(kept) < len(self._round):
                if self.memory.recurrent:
                    reason = self.facts.capabilities.reason
                    raise CapabilityError("a recurrent state cannot be cut back", reason)
                self.memory.rewind(self.length + len(kept))
            self._kept = self.memory.mark()
        self._round = Round()

    def truncate(self, length: int) -> None:
        self._check(0)
        self._settle()
        if 0 < length < self.length and self.memory.can_rewind(length):
            self.memory.rewind(length)
            self._kept = self.memory.mark()
        elif length < self.length or length == 0:
            self._forget()

    def forget(self, start: int, end: int) -> None:
        raise CapabilityError(f"{self.facts.name} cannot turn its keys to other positions ({start} to {end})")

    def taps(self) -> LayerTaps:
        """What reads hidden states. Raises CapabilityError where this model's layers are not to be found."""
        return LayerTaps(self._net)

    def checkpoint(self) -> Mark:
        """The memory now, to `rewind` to; costs no copy."""
        self._check(0)
        self._settle()
        return self.memory.mark()

    def rewind(self, checkpoint: Mark) -> None:
        """Make the memory what it was. CapabilityError when a window has moved on too far since."""
        self._check(0)
        self._settle()
        if not self.memory.reaches(checkpoint):
            raise CapabilityError(
                f"{self.facts.name} cannot go back {self.length - checkpoint.length} tokens",
                "compute them again",
            )
        self.memory.restore(checkpoint)
        self._kept = checkpoint

    def snapshot(self) -> Snapshot:
        self._check(0)
        self._settle()
        return Snapshot(self.length, to_bytes(self.memory, self._fingerprint))

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._forget()
        from_bytes(self.memory, snapshot.data, self._fingerprint, self.facts.context_tokens)
        self._kept = self.memory.mark()

    def learner(self) -> Learner:
        """See `Teachable`."""
        from edgespec.backends.mlx.online import MlxLearner

        self._check(0)
        return MlxLearner(self, self._net, self._shape, self._fingerprint)

    def leave_thread(self) -> None:
        leave_thread()

    @property
    def layer_count(self) -> int:
        return self.shortcuts.layer_count

    def self_draft(self, how: SelfDraft) -> LanguageModel:
        self._check(0)
        return MlxSelfDraft(self, *self.shortcuts.make(how, self.facts))

    def agreement(self, layers: Sequence[int], tokens: Sequence[int]) -> float:
        self._check_trial(0)
        skip, _, _ = self.shortcuts.make(SkippedLayers(tuple(layers)), self.facts)
        start = self.length - len(tokens)
        if not tokens or start < 0 or not all(cache.can_rewind(start) for cache in self.memory.attention):
            raise CapabilityError(f"{self.facts.name} cannot look back on {len(tokens)} tokens")
        try:
            return self._scorer.agreement(self._kept, tokens, skip.drafting(0))
        finally:
            self._settle()

    def best_by_exit(self, tokens: Sequence[int]) -> list[Best]:
        """The best token after each of these, after what is cached, if the model ended with each layer."""
        self._check_trial(len(tokens))
        try:
            return self._scorer.best_by_exit(self.length, tokens, LayerList(self._net), self.taps())
        finally:
            self._settle()

    def _check_trial(self, more: int) -> None:
        self._check(more)
        if self._interrupted:
            raise CancelledError("cancelled")
        self._settle()

    def interrupt(self, wanted: bool) -> None:
        self._interrupted = wanted

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_vocabulary()
        mx.synchronize()
        self.follow(None)
        if self._follower:
            self._follower.follow(None)
        self._ahead = self._shortcut = None
        del self._net, self.memory, self.shortcuts, self._scorer
        gc.collect()
        mx.clear_cache()
        leave_thread()

    def check_open(self) -> None:
        """Raises ClosedError."""
        self._check(0)

    def drop_round(self) -> None:
        """End the open round; nothing of it is kept."""
        self._check(0)
        self._settle()

    def _check(self, more: int) -> None:
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
        check_tokens_fit(self, more)


def _trace(net: Any) -> int:
    """A number that other weights would not have: a checksum over a few elements of each."""
    weights: Any = tree_flatten(net.parameters())
    few = [weight.reshape(-1)[:8].astype(mx.float32) for _, weight in weights]
    return zlib.crc32(np.array(mx.concatenate(few)).tobytes())
