"""An MLX model behind the LanguageModel Protocol."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter as now

import mlx.core as mx

from edgespec.backends.base import LanguageModel, ModelFacts, Progress, Snapshot, Vocabulary
from edgespec.backends.mlx.device import evaluated, launched, leave_thread, translated
from edgespec.backends.mlx.files import Checkpoint
from edgespec.backends.mlx.layers import LayerTaps
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.memory import Mark, Memory
from edgespec.backends.mlx.saved import from_bytes, to_bytes
from edgespec.backends.mlx.shape import PassShape, let_ropes_follow
from edgespec.backends.mlx.vocabulary import MlxVocabulary
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
        self._fingerprint = f"{facts.architecture} {facts.parameters} {facts.quantisation} {kv_bits}"
        self._length = 0
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._tokens: list[int] = []
        self._before_round: Mark | None = None
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
        return self._length

    @property
    def room(self) -> int:
        return self.facts.context_tokens - self._length

    def _forward(self, tokens: mx.array) -> mx.array:
        """Run tokens (integers [n]) after the cache: their logits, float32 [n, vocab], not yet computed."""
        with translated("the model could not be run"):
            rows: mx.array = self._net(tokens[None], cache=self.memory.layers)[0]
        self.memory.length += tokens.size
        return rows.astype(mx.float32)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._end_round()
        step = self._batch_tokens
        for start in range(0, len(tokens), step):
            self._check(0)
            if self._interrupted:
                raise CancelledError("cancelled")
            chunk = list(tokens[start : start + step])
            before = self.memory.mark()
            self._shape.chain(self._length)
            try:
                self._forward(mx.array(chunk))
                # The logits are never asked for, and so never computed.
                evaluated(*self.memory.arrays)
            except BackendError:
                self.memory.restore(before)
                raise
            self._length += len(chunk)
            mx.clear_cache()
            if progress and not progress("prefill", (start + len(chunk)) / len(tokens)):
                raise CancelledError("cancelled")

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        ahead = self._take_ahead(tree, first)
        try:
            self._check(tree.width)
            if tree.width > 1:
                self._check_shape(tree)
            if self._interrupted:
                raise CancelledError("cancelled")
            if first == 0:
                self._begin_round(ahead)
            self._add_nodes(tree, first)
            return ahead.logits if ahead else self._run(tree, first)
        except (BackendError, CapabilityError, ContextFullError, CancelledError):
            self._ahead = ahead
            self._end_round()
            raise

    def _check_shape(self, tree: TokenTree) -> None:
        capabilities = self.facts.capabilities
        if not capabilities.rollback and not self.memory.recurrent:
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", capabilities.reason)
        if tree.width > capabilities.max_width:
            raise CapabilityError(f"a tree of {tree.width} tokens is wider than {capabilities.max_width}")
        if not capabilities.tree and not tree.is_chain:
            raise CapabilityError(f"{self.facts.name} cannot verify trees", capabilities.reason)

    def _begin_round(self, ahead: _Ahead | None) -> None:
        if not ahead:
            self._end_round()
        self._before_round = ahead.before if ahead else self.memory.mark()
        if self._length >= self._tidy_at:
            # Caches that grow leave buffers behind, which MLX would keep for another use.
            mx.clear_cache()
            self._tidy_at = self._length + _TIDY_TOKENS

    def _add_nodes(self, tree: TokenTree, first: int) -> None:
        for parent in tree.parents[first:]:
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1 if parent >= 0 else 0)
        self._tokens.extend(tree.tokens[first:])

    @property
    def _is_chain(self) -> bool:
        """Whether the round so far has no branches."""
        return all(parent == node - 1 for node, parent in enumerate(self._parents))

    def _run(self, tree: TokenTree, first: int) -> DeviceLogits:
        chain = self._is_chain
        if chain:
            self._shape.chain(self._length)
        else:
            self._shape.tree(self._length, self._parents, self._depths, first)
        rows = self._forward(mx.array(tree.tokens[first:]))
        launched(rows, *self.memory.background_arrays)
        return DeviceLogits(rows, self._depths[first:], self._start_next if chain else None)

    def _start_next(self, token: mx.array, source: DeviceLogits) -> None:
        """Begin what follows on `token`, which is being computed: a step here, or the pass of a follower."""
        if self._runs_ahead:
            self._begin((), token, source)
        elif self._follower and not self._follower._parents:
            # The draft may lag behind: what the target has cached is no part of its pass.
            guessed = tuple(self._tokens[max(0, self._follower._length - self._length) :])
            if 0 < len(guessed) < self._follower.facts.capabilities.max_width:
                self._follower._begin(guessed, token, source)

    def _begin(self, known: tuple[int, ...], token: mx.array, source: DeviceLogits) -> None:
        """Run a chain of known tokens and one that is being computed, before it is asked for."""
        width = len(known) + 1
        if self._ahead or self._closed or self._interrupted or len(self._parents) + width > self.room:
            return
        started = now()
        before = self.memory.mark()
        self._shape.chain(self._length)
        tokens = mx.concatenate([mx.array(known, mx.uint32), token]) if known else token
        rows = self._forward(tokens)
        launched(rows, *self.memory.background_arrays)
        logits = DeviceLogits(rows, range(width), self._start_next)
        logits.begun_seconds = now() - started if known else 0.0
        self._ahead = _Ahead(known, source, logits, before)

    def _take_ahead(self, tree: TokenTree, first: int) -> _Ahead | None:
        """What was begun, if this is it; else it is taken back."""
        ahead, self._ahead = self._ahead, None
        if not ahead:
            return None
        goes_on = first == len(self._parents) and tree.is_chain and not self._closed
        if goes_on and tree.tokens[first:] == (*ahead.known, ahead.source.chosen):
            return ahead
        self.memory.restore(ahead.before)
        return None

    def _drop_ahead(self) -> None:
        if self._ahead:
            self.memory.restore(self._ahead.before)
            self._ahead = None

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
        kept = [0, *path]
        if len(self._parents) > 1 or path:
            self._drop_ahead()
        end = self._length + len(kept)
        if kept != list(range(len(kept))):
            self.memory.keep(self._length, kept)
            launched(*self.memory.arrays)
        elif len(kept) < len(self._parents):
            if self.memory.recurrent:
                raise CapabilityError("a recurrent state cannot be cut back", self.facts.capabilities.reason)
            self.memory.rewind(end)
        self._length = end
        self._parents, self._depths, self._tokens = [], [], []

    def _end_round(self) -> None:
        """Drop what was not committed."""
        self._drop_ahead()
        if self._parents and self._before_round:
            self.memory.restore(self._before_round)
        self._parents, self._depths, self._tokens = [], [], []

    def truncate(self, length: int) -> None:
        self._check(0)
        self._end_round()
        if 0 < length < self._length and self.memory.can_rewind(length):
            self.memory.rewind(length)
            self._length = length
        elif length < self._length or length == 0:
            self.memory.clear()
            self._length, self._tidy_at = 0, _TIDY_TOKENS

    def taps(self) -> LayerTaps:
        """What reads hidden states. Raises CapabilityError where this model's layers are not to be found."""
        return LayerTaps(self._net)

    def checkpoint(self) -> Mark:
        """The memory now, to `rewind` to; costs no copy."""
        self._check(0)
        self._end_round()
        return self.memory.mark()

    def rewind(self, checkpoint: Mark) -> None:
        """Make the memory what it was. CapabilityError when a window has moved on too far since."""
        self._check(0)
        self._end_round()
        if not self.memory.reaches(checkpoint):
            raise CapabilityError(
                f"{self.facts.name} cannot go back {self._length - checkpoint.length} tokens",
                "compute them again",
            )
        self.memory.restore(checkpoint)
        self._length = checkpoint.length

    def snapshot(self) -> Snapshot:
        self._check(0)
        self._end_round()
        return Snapshot(self._length, to_bytes(self.memory, self._fingerprint))

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._end_round()
        self.memory.clear()
        self._length = 0
        from_bytes(self.memory, snapshot.data, self._fingerprint)
        self._length = self.memory.length = snapshot.length

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
        self._ahead = self._before_round = None
        del self._net, self.memory
        gc.collect()
        mx.clear_cache()
        leave_thread()

    def _check(self, more: int) -> None:
        if self._closed:
            raise ClosedError(f"{self.facts.name} is closed")
        if more > self.room:
            raise ContextFullError(
                f"{self._length} + {more} tokens do not fit the context of {self.facts.context_tokens}",
                "use a larger --context",
            )
