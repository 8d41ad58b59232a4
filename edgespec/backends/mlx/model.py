"""An MLX model behind the LanguageModel Protocol."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from edgespec.backends.base import (
    LanguageModel,
    ModelFacts,
    Progress,
    SelfDraft,
    SkippedLayers,
    Snapshot,
    Vocabulary,
)
from edgespec.backends.base_model import BaseModel, in_batches
from edgespec.backends.mlx.cache_serialization import from_bytes, to_bytes
from edgespec.backends.mlx.evaluation import release_thread_state
from edgespec.backends.mlx.layer_caches import CacheCheckpoint
from edgespec.backends.mlx.layers import HiddenStateHooks, LayerList
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.partial_model_scoring import Best, PartialModelScorer
from edgespec.backends.mlx.partial_models import PartialModel, PartialModelFactory
from edgespec.backends.mlx.pass_runner import PassRunner
from edgespec.backends.mlx.self_draft_view import MlxSelfDraftView
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.backends.mlx.weight_loading import LoadedModel
from edgespec.backends.optional_features import Trainer
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ContextFullError

__all__ = ["CPU_BATCH_TOKENS", "MlxModel"]

# A pass cannot be stopped half-way, so on a processor prefill goes on in small ones.
CPU_BATCH_TOKENS = 64


class MlxModel(BaseModel):
    """One MLX model with one memory: what may be asked of it, and when.

    How it is run, and what is kept of that, is for `PassRunner`. parts: what of it drafts for the whole.
    kv_bytes_within: bytes of the caches when a context of so many tokens is full; raises MemoryBudgetError
    where there is no room for them.
    """

    def __init__(
        self,
        checkpoint: LoadedModel,
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
        self._passes = PassRunner(self._net, facts.context_tokens, facts.capabilities.max_width, kv_bits)
        self.memory = self._passes.memory
        self._fingerprint = f"{facts.architecture} {facts.quantisation} {kv_bits} {_trace(self._net)}"
        self.kv_bytes_within: Callable[[int], int] = lambda _: 0  # until it is probed
        self.parts = PartialModelFactory(self._net, self._passes.shape, checkpoint.low_bits)
        self._scorer = PartialModelScorer(self._passes.forward_part, self.memory, self._passes.shape)
        on_cpu = mx.default_device() == mx.cpu
        self._batch_tokens = min(batch_tokens, CPU_BATCH_TOKENS) if on_cpu else batch_tokens

    @property
    def length(self) -> int:
        return self._passes.length

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._passes.end_round()
        for batch in in_batches(tokens, self._batch_tokens, progress):
            self._check(0)
            self._check_wanted()
            self._passes.append(list(batch))

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check_pass(tree)
        return self._passes.verify(tree, first)

    def draft(self, part: PartialModel, tree: TokenTree, first: int) -> DeviceLogits:
        """`verify` for a draft of this model itself; the next call that is not the draft's ends the round."""
        self._check_pass(tree)
        return self._passes.draft(part, tree, first)

    def _check_pass(self, tree: TokenTree) -> None:
        """Raises what `verify` does before anything is run; nothing is left of the round then."""
        try:
            self._check(tree.width)
            if tree.width > 1:
                self._check_shape(tree)
            self._check_wanted()
        except (CapabilityError, ContextFullError, CancelledError):
            self._passes.end_round()
            raise

    def _check_shape(self, tree: TokenTree) -> None:
        capabilities = self.facts.capabilities
        if not capabilities.rollback and not self.memory.recurrent:
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", capabilities.reason)
        if tree.width > capabilities.max_width:
            raise CapabilityError(f"a tree of {tree.width} tokens is wider than {capabilities.max_width}")
        if not capabilities.tree and not tree.is_chain:
            raise CapabilityError(f"{self.facts.name} cannot verify trees", capabilities.reason)

    def run_ahead(self, enabled: bool) -> None:
        self._passes.steps_ahead = enabled

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        self._passes.follow(draft._passes if isinstance(draft, MlxModel) else None)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._passes.commit(path)

    def truncate(self, length: int) -> None:
        self._check(0)
        self._passes.cut(length)

    def remove_range(self, start: int, end: int) -> None:
        raise CapabilityError(f"{self.facts.name} cannot turn its keys to other positions ({start} to {end})")

    def taps(self) -> HiddenStateHooks:
        """What reads hidden states. Raises CapabilityError where this model's layers are not to be found."""
        return HiddenStateHooks(self._net)

    def checkpoint(self) -> CacheCheckpoint:
        """The memory now, to `rewind` to; costs no copy."""
        self._check(0)
        self._passes.end_round()
        return self.memory.mark()

    def rewind(self, checkpoint: CacheCheckpoint) -> None:
        """Make the memory what it was. CapabilityError when a window has moved on too far since."""
        self._check(0)
        self._passes.end_round()
        if not self.memory.reaches(checkpoint):
            raise CapabilityError(
                f"{self.facts.name} cannot go back {self.length - checkpoint.length} tokens",
                "compute them again",
            )
        self.memory.restore(checkpoint)
        self._passes.kept = checkpoint

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self._passes.end_round()
        start, end = self._span(start, end)
        return Snapshot(end, to_bytes(self.memory, start, end, self._fingerprint), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._passes.cut(snapshot.start)
        try:
            from_bytes(self.memory, snapshot, self._fingerprint, self.facts.context_tokens)
        except BackendError:
            self._passes.clear()
            raise
        self._passes.kept = self.memory.mark()

    def resize(self, context_tokens: int) -> None:
        """See the Protocol. Its arrays grow with the text by themselves: this says how long it may become."""
        self._check_size(context_tokens)
        self._passes.end_round()
        kv_bytes = self.kv_bytes_within(context_tokens)
        self._passes.context_tokens = context_tokens
        self._now_sized(context_tokens, kv_bytes)

    def trainer(self) -> Trainer:
        """See `Trainable`."""
        from edgespec.backends.mlx.lora_trainer import MlxTrainer

        self._check(0)
        return MlxTrainer(self, self._net, self._passes.shape, self._fingerprint)

    def release_thread_state(self) -> None:
        release_thread_state()

    @property
    def layer_count(self) -> int:
        return self.parts.layer_count

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        self._check(0)
        view = MlxSelfDraftView(self, *self.parts.make(method, self.facts))
        self._views.add(view)
        return view

    def top1_agreement(self, layers: Sequence[int], tokens: Sequence[int]) -> float:
        self._check_trial(0)
        skip, _, _ = self.parts.make(SkippedLayers(tuple(layers)), self.facts)
        start = self.length - len(tokens)
        if not tokens or start < 0 or not all(cache.can_rewind(start) for cache in self.memory.attention):
            raise CapabilityError(f"{self.facts.name} cannot look back on {len(tokens)} tokens")
        try:
            return self._scorer.agreement(self._passes.kept, tokens, skip.drafting(0))
        finally:
            self._passes.end_round()

    def best_by_exit(self, tokens: Sequence[int]) -> list[Best]:
        """The best token after each of these, after what is cached, if the model ended with each layer."""
        self._check_trial(len(tokens))
        try:
            return self._scorer.best_by_exit(self.length, tokens, LayerList(self._net), self.taps())
        finally:
            self._passes.end_round()

    def _check_trial(self, more: int) -> None:
        self._check(more)
        self._check_wanted()
        self._passes.end_round()

    def interrupt(self, enabled: bool) -> None:
        self._passes.interrupted = enabled

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._close_vocabulary()
        mx.synchronize()
        self._passes.close()
        del self._net, self.memory, self.parts, self._scorer
        gc.collect()
        mx.clear_cache()
        release_thread_state()

    def drop_round(self) -> None:
        """End the open round; nothing of it is kept."""
        self._check(0)
        self._passes.end_round()

    def _check_wanted(self) -> None:
        if self._passes.interrupted:
            raise CancelledError("cancelled")


def _trace(net: Any) -> int:
    """A number that other weights would not have: a checksum over a few elements of each."""
    weights: Any = tree_flatten(net.parameters())
    few = [weight.reshape(-1)[:8].astype(mx.float32) for _, weight in weights]
    return zlib.crc32(np.array(mx.concatenate(few)).tobytes())
