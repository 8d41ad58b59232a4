"""The MLX implementation of `LanguageModel`, including self-drafting."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.evaluation import release_thread_state, reuse_stream
from edgespec.backends.mlx.layer_caches import CacheCheckpoint, deserialize_caches, serialize_caches
from edgespec.backends.mlx.layers import (
    HiddenStateHooks,
    LayerList,
    StateRecorder,
    first_layers_of_each_kind,
)
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.model_skeleton import named_arrays
from edgespec.backends.mlx.partial_models import (
    PartialModel,
    PartialModelFactory,
)
from edgespec.backends.mlx.pass_runner import PassRunner
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.backends.mlx.weight_loading import KV_BITS, LoadedMlxModel, prefill_batch_tokens
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ContextFullError, MemoryBudgetError
from edgespec.model.base import (
    EarlyExit,
    Head,
    LanguageModel,
    LoadOptions,
    Progress,
    SelfDraft,
    Snapshot,
    Vocabulary,
)
from edgespec.model.base_model import BaseModel, SelfDraftView, in_batches
from edgespec.model.drafter_training import Trainer
from edgespec.model.hidden_states import HiddenStateLog, HiddenStateSource
from edgespec.model.model_facts import ModelFacts
from edgespec.model.registry import format_of

__all__ = ["MlxModel", "SpreadModel"]


class MlxModel(BaseModel, HiddenStateSource):
    """A loaded MLX model. Checks the arguments of each call, and runs passes with a `PassRunner`.

    Attributes:
        memory_bytes: Memory limit in bytes for the model, its KV cache and its head, or None if there is no
            limit.
        rounding: Machine epsilon of the model's compute data type.
        caches: The caches of all layers.
        why_chains_only: Why the model supports neither token trees nor self-drafting. Empty if it supports
            both.
        partial_models: Factory for the partial models used for self-drafting.
        kv_bytes_for: Maps a context length in tokens to the size of all caches in bytes. Raises
            MemoryBudgetError if the caches do not fit in memory.
    """

    why_chains_only = ""

    def __init__(
        self, loaded: LoadedMlxModel, facts: ModelFacts, vocabulary: MlxVocabulary, options: LoadOptions
    ) -> None:
        kv_bits = KV_BITS[options.kv_type]
        self.facts = facts
        self.vocabulary: Vocabulary = vocabulary
        self._close_vocabulary = vocabulary.close
        self._net = loaded.skeleton.model
        self.memory_bytes = options.memory_bytes
        self.rounding: float = mx.finfo(loaded.dtype).eps
        self._runner = PassRunner(
            self._net, facts.context_tokens, facts.capabilities.max_width, kv_bits, self.logs
        )
        self.caches = self._runner.caches
        self._fingerprint = f"{facts.architecture} {facts.quantisation} {kv_bits} {_weights_crc(self._net)}"
        # Replaced by the loader once it has measured the model's KV cache.
        self.kv_bytes_for: Callable[[int], int] = lambda _: 0
        self.partial_models = PartialModelFactory(self._net, self._runner.layout, loaded.skeleton.low_bits)
        self._batch_tokens = prefill_batch_tokens(options)

    @property
    def length(self) -> int:
        return self._runner.length

    def _check(self, more: int) -> None:
        # Every operation calls this method, on whichever thread it runs. See `evaluation.py`.
        reuse_stream()
        super()._check(more)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self._runner.end_round()
        for batch in in_batches(tokens, self._batch_tokens, progress):
            self._check(0)
            self._check_not_interrupted()
            self._runner.append(list(batch))

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check_pass(tree)
        return self._runner.verify(self._padded(tree), first)

    def draft(self, partial_model: PartialModel, tree: TokenTree, first: int) -> DeviceLogits:
        """Draft with a partial model. The drafted tokens are discarded when the full model is used again."""
        self._check_pass(tree)
        return self._runner.draft(partial_model, tree, first)

    def _check_pass(self, tree: TokenTree) -> None:
        name, capabilities = self.facts.name, self.facts.capabilities
        try:
            self._check(tree.width)
            if tree.width > 1 and not capabilities.rollback and not self.caches.recurrent:
                raise CapabilityError(f"{name} cannot verify drafts: {capabilities.reason}")
            if tree.width > capabilities.max_width:
                raise CapabilityError(
                    f"verifying {tree.width} tokens at once exceeds the maximum of {capabilities.max_width}",
                    code="draft_too_wide",
                )
            if not capabilities.tree and not tree.is_chain:
                raise CapabilityError(f"{name} cannot verify token trees: {capabilities.reason}")
            self._check_not_interrupted()
        except (CapabilityError, ContextFullError, CancelledError):
            self._runner.end_round()
            raise

    def run_ahead(self, enabled: bool) -> None:
        self._runner.run_ahead = enabled and not self.facts.capabilities.pass_widths

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        self._runner.pipeline_with(draft._runner if isinstance(draft, MlxModel) else None)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._runner.commit(path)

    def truncate(self, length: int) -> None:
        self._check(0)
        self._runner.truncate(length)

    def repeat_cached(self, end: int) -> bool:
        self._check(0)
        if not (self.length and self.caches.truncatable):
            return False
        self._runner.repeat(end)
        return True

    def run_first_layers(self, enabled: bool) -> bool:
        self._check(0)
        # The probe has shown that models with early exit can skip their upper layers.
        can_run = (
            enabled
            and self.caches.truncatable
            and EarlyExit.method in self.facts.capabilities.self_draft_methods
        )
        count = first_layers_of_each_kind(self._net) if can_run else 0
        self._runner.run_first_layers(count)
        return count > 0

    def remove_range(self, start: int, end: int) -> None:
        raise CapabilityError(
            f"tokens {start} to {end} cannot be removed from the cache of {self.facts.name}, because"
            " edgespec cannot move cached keys to other positions with MLX",
            code="rollback_not_supported",
        )

    def log_hidden_states(self, states: Sequence[int]) -> HiddenStateLog:
        return self._recorder().open(states)

    def stop_logging(self, log: HiddenStateLog) -> None:
        if not self._closed:
            # The passes of this round have recorded the hidden states of all logs, including this one.
            self.end_round()
        super().stop_logging(log)

    def _recorder(self) -> StateRecorder:
        self.end_round()
        runner = self._runner
        runner.layout.set_chain(self.length)
        if runner.recorder is None:
            runner.recorder = StateRecorder(self._net, self.logs)
        return runner.recorder

    @property
    def state_size(self) -> int:
        """Number of values per hidden state."""
        return self._recorder().state_size

    def checkpoint(self) -> CacheCheckpoint:
        """Discard uncommitted tokens, and save the state of the caches for `rewind`."""
        self.end_round()
        return self.caches.checkpoint()

    def rewind(self, checkpoint: CacheCheckpoint) -> None:
        """Roll the model's caches back to a state saved by `checkpoint`.

        Raises:
            CapabilityError: A sliding-window layer has already dropped keys and values that this state needs.
        """
        self.end_round()
        if not self.caches.can_restore(checkpoint.length):
            raise CapabilityError(
                f"{self.facts.name} cannot roll back {self.length - checkpoint.length} tokens",
                "clear the cache and process the text again",
                code="rollback_not_supported",
            )
        self._runner.rewind(checkpoint)

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self.end_round()
        start, end = self._span(start, end)
        return Snapshot(end, serialize_caches(self.caches, start, end, self._fingerprint), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self._runner.truncate(snapshot.start)
        try:
            deserialize_caches(self.caches, snapshot, self._fingerprint, self.facts.context_tokens)
        except BackendError:
            self._runner.clear()
            raise
        self._runner.committed = self.caches.checkpoint()

    def resize(self, context_tokens: int) -> None:
        """Set the maximum number of tokens in the KV cache, which grows on demand."""
        self._check_size(context_tokens)
        self._runner.end_round()
        kv_bytes = self.kv_bytes_for(context_tokens)
        self._runner.context_tokens = context_tokens
        self._now_sized(context_tokens, kv_bytes)

    def trainer(self) -> Trainer:
        from edgespec.backends.mlx.lora_trainer import MlxTrainer

        self._check(0)
        return MlxTrainer(self._net, self._runner.layout, self.facts.name, self._fingerprint, self.end_round)

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.partial_models.layer_count

    @property
    def net(self) -> Any:
        """The mlx-lm model."""
        return self._net

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        self._check(0)
        self.partial_models.check(method.method, self.facts)
        view: SelfDraftView[Any]
        if isinstance(method, Head):
            view = format_of("mlx").load_head(self, method)
        else:
            view = MlxSelfDraftView(self, self.partial_models.create(method, self.facts.name))
        self._views.add(view)
        return view

    def measure_exits(self, tokens: Sequence[int], first: int = 0) -> tuple[dict[int, float], list[int], int]:
        """Measure how often each early exit agrees with the full model on the next token.

        The tokens are processed after the cached ones, but are not added to the cache.

        Args:
            tokens: 64 to 256 tokens of ordinary text. They must fit in the context.
            first: Index of the first token to compare.

        Returns:
            The agreement rate (0 to 1) keyed by exit layer, the size of each layer in bytes, and the size in
            bytes of the weights that a pass reads after the last layer.

        Raises:
            CapabilityError: The model has no early exits.
            ContextFullError: The tokens do not fit in the context.
        """
        self.partial_models.check(EarlyExit.method, self.facts)
        self._check(len(tokens))
        self._check_not_interrupted()
        self.end_round()
        layers, hooks, best_tokens = (
            LayerList(self._net),
            HiddenStateHooks(self._net),
            self._runner.best_tokens,
        )
        whole = best_tokens(tokens, hooks.on(range(hooks.count)))
        agreements = {}
        for layer in range(1, hooks.count):
            resumed = layers.resumed_at(hooks.count, hooks.states[layer])
            best = best_tokens(tokens, layers.replaced(resumed))
            agreements[layer] = float(np.mean((best == whole)[first:]))
        return agreements, *self.partial_models.layer_bytes()

    def interrupt(self, enabled: bool) -> None:
        self._runner.interrupted = enabled

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        reuse_stream()
        self._close_vocabulary()
        mx.synchronize()
        self._runner.close()
        del self._net, self.caches, self.partial_models
        gc.collect()
        mx.clear_cache()
        release_thread_state()

    def end_round(self) -> None:
        """Discard all tokens that have not been committed."""
        self._check(0)
        self._runner.end_round()

    def _check_not_interrupted(self) -> None:
        if self._runner.interrupted:
            raise CancelledError("the model's computation was cancelled")


class SpreadModel(MlxModel):
    """An MLX model whose layers are distributed across workers.

    Once a worker is lost, passes raise WorkerLostError. After an interrupt, they raise CancelledError without
    waiting for the workers.
    """

    why_chains_only = "only drafts without branches are supported, because its layers are on workers"

    def __init__(
        self, loaded: LoadedMlxModel, facts: ModelFacts, vocabulary: MlxVocabulary, options: LoadOptions
    ) -> None:
        super().__init__(loaded, facts, vocabulary, options)
        self._blocks, self._workers = loaded.blocks, options.workers

    def run_ahead(self, enabled: bool) -> None:
        """Do nothing, because a pass waits for the workers, so it cannot overlap with other work."""

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        """Do nothing. See `run_ahead`."""

    def repeat_cached(self, end: int) -> bool:  # noqa: ARG002
        """Return False, because the workers' caches cannot be copied."""
        self._check(0)
        return False

    def snapshot(self, start: int = 0, end: int | None = None) -> NoReturn:  # noqa: ARG002
        raise CapabilityError(
            f"the cache of {self.facts.name} cannot be copied, because it is on workers",
            "process the prompt again",
            code="workers_not_supported",
        )

    def restore(self, snapshot: Snapshot) -> NoReturn:  # noqa: ARG002
        raise CapabilityError(
            f"the cache of {self.facts.name} cannot be restored, because it is on workers",
            "process the prompt again",
            code="workers_not_supported",
        )

    def resize(self, context_tokens: int) -> None:
        raise MemoryBudgetError(
            f"cannot change the context of {self.facts.name} to {context_tokens:,} tokens, because its"
            " layers are on workers",
            "load the model again with another --context",
            code="context_fixed",
        )

    def interrupt(self, enabled: bool) -> None:
        super().interrupt(enabled)
        if self._workers is not None:
            self._workers.interrupt(enabled)

    def close(self) -> None:
        super().close()
        for block in self._blocks:
            block.close()
        if self._workers is not None:
            self._workers.close()


class MlxSelfDraftView(SelfDraftView[MlxModel]):
    """Draft model that reuses the target's weights and KV cache."""

    def __init__(self, target: MlxModel, partial_model: PartialModel) -> None:
        super().__init__(target)
        self._partial_model = partial_model
        self.facts = replace(
            target.facts,
            name=f"{target.facts.name} ({partial_model.description})",
            weight_bytes=partial_model.extra_bytes,
            file_bytes=0,
            kv_bytes=0,
            notice="",
        )
        self.vocabulary = target.vocabulary

    def verify(self, tree: TokenTree, first: int = 0) -> DeviceLogits:
        self._check()
        if self._interrupted:
            self._target.end_round()
            raise CancelledError("the model's computation was cancelled")
        return self._target.draft(self._partial_model, tree, first)

    def run_ahead(self, enabled: bool) -> None:
        self._partial_model.run_ahead = enabled


def _weights_crc(net: Any) -> int:
    """Return a checksum over the first elements of every weight, to tell models apart."""
    few = [weight.reshape(-1)[:8].astype(mx.float32) for _, weight in named_arrays(net.parameters())]
    return zlib.crc32(np.array(mx.concatenate(few)).tobytes())
