"""Load GGUF models that run in a single llama.cpp context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.checkpoints import Checkpoint, open_checkpoints
from edgespec.backends.llamacpp.context import LlamaContext, LoraAdapters, adapter_bytes
from edgespec.backends.llamacpp.context_plan import parse_kv_types
from edgespec.backends.llamacpp.context_planning import (
    cache_variant,
    initial_plan,
    plan_context,
    rebuild_context,
)
from edgespec.backends.llamacpp.devices import on_cpu
from edgespec.backends.llamacpp.embedding import Pooling
from edgespec.backends.llamacpp.gguf_model import GgufModel
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHeads
from edgespec.backends.llamacpp.image_encoder import NO_PROJECTOR, ImageEncoder, ImagePart, open_encoder
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.loading import describe, free_weights, load_all, threads_for, with_more_memory
from edgespec.backends.llamacpp.lowbit import load_low_bit_view
from edgespec.backends.llamacpp.metadata import vocabulary_size
from edgespec.backends.llamacpp.mtp_files import unloaded_bytes
from edgespec.backends.llamacpp.probe import probe
from edgespec.backends.llamacpp.state_taps import first_layers_of_each_kind
from edgespec.backends.llamacpp.weight_stream import WeightStream
from edgespec.backends.replay import ReplayModel
from edgespec.engine.logits import HostLogits, Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ContextFullError, ModelFileError
from edgespec.model.base import Head, LanguageModel, LoadOptions, LowBit, Progress
from edgespec.model.base_model import SelfDraftView, check_progress, split_last_batch
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage, contains_image
from edgespec.model.model_facts import ModelFacts

__all__ = ["LlamaCppModel", "load"]


def load(path: str, name: str, options: LoadOptions, progress: Progress | None = None) -> LanguageModel:
    """Load a GGUF model.

    Returns:
        The model, wrapped in a `ReplayModel` if it can only be rolled back with checkpoints.

    Raises:
        ModelFileError: The file is not a GGUF file, is damaged, or has an unsupported architecture.
        MemoryBudgetError: The weights or the context exceed the memory budget or cannot be allocated.
        OptionError: An option is invalid for this model.
        BackendMissingError: llama-cpp-python is not installed.
        CancelledError: `progress` returned False.
    """
    if options.kv_type != "auto":
        # Report an invalid `--kv-type` before loading the model, which can take minutes.
        parse_kv_types(options.kv_type)
    weights, stream = load_all(path, name, options, progress)
    try:
        model = LlamaCppModel(weights, path, name, options, stream)
    except BaseException:
        free_weights(weights, stream)
        raise
    result = model.probe_result
    return ReplayModel(model, result.capabilities.reason, result.undo_tokens) if result.replays else model


class LlamaCppModel(GgufModel, HeadTarget):
    """A GGUF model that runs in a single llama.cpp context.

    A model with recurrent layers cannot verify draft trees, so its extra llama.cpp sequences hold checkpoints
    instead of branches.
    """

    why_blind = NO_PROJECTOR

    def __init__(
        self, weights: Any, path: str, name: str, options: LoadOptions, stream: WeightStream | None = None
    ) -> None:
        if not vocabulary_size(weights):
            raise ModelFileError(
                f"{path} has no vocabulary", "choose a complete language model", code="model_file_incomplete"
            )
        max_plan = plan_context(weights, with_more_memory(path, options, stream))
        plan = initial_plan(weights, max_plan, options)
        self._adapters = LoraAdapters(weights, options.adapters)
        self._pooling = Pooling.of(weights)
        self._path, self._stream = Path(path), stream
        context = LlamaContext(
            *(weights, options, plan, threads_for(weights, options)), adapters=self._adapters, stream=stream
        )
        self._encoder: ImageEncoder | None = None
        try:
            self._encoder = open_encoder(weights, options)
            context.has_wide_images = self._encoder is not None and self._encoder.has_wide_positions
            self.probe_result = result = probe(context, weights, options)
            cells = KvCells(context, options.max_branches, replays=result.replays)
            super().__init__([weights], [context], [cells], max_plan, options)
            self.streamed_layers = stream.layers if stream else ()
            facts = describe(weights, path, name, max_plan, self.vocabulary, result)
            self.facts: ModelFacts = replace(
                facts,
                weight_bytes=facts.weight_bytes
                - (stream.saved_bytes if stream else 0)
                - (0 if options.own_head else unloaded_bytes(Path(path)))
                + adapter_bytes(options.adapters),
                context_tokens=plan.tokens,
                kv_bytes=plan.kv_bytes,
                cache_variant=cache_variant(weights, max_plan),
                adapters=options.adapters,
                sees_images=self._encoder is not None,
            )
        except BaseException:
            context.close()
            if self._encoder:
                self._encoder.close()
            raise
        self._checkpoints = open_checkpoints(context)
        self._heads, self._tree_states = SharedHeads(), []
        # Whether llama.cpp will roll back the recurrent state at the start of the next forward pass.
        self._rollback_pending = False

    def set_adapter_scales(self, scales: Sequence[float]) -> None:
        self._check(0)
        self._adapters.scales = tuple(scales)
        self._context.apply_adapters()

    def _append(self, tokens: Sequence[int]) -> None:
        self._rollback_pending = False
        self._context.append(tokens, self.length)
        if self.logs.states:
            self.logs.append(self.length, self._context.tapped_rows(len(tokens)))

    def prepare_image(self, image: Image) -> PreparedImage:
        self._check(0)
        return self._encoder.prepare(image) if self._encoder else super().prepare_image(image)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        if self._encoder is None or not contains_image(tokens):
            super().prefill(tokens, progress)
            return
        self._check(len(tokens))
        self._end_round()
        for run, part_progress in self._encoder.runs(tokens, progress):
            if isinstance(run, ImagePart):
                self._append_image(run, self._encoder)
                check_progress(part_progress)
            else:
                super().prefill(run, part_progress)

    def _append_image(self, part: ImagePart, encoder: ImageEncoder) -> None:
        self._rollback_pending = False
        rows, size, start = encoder.encode(part), self._context.batch_tokens, self.length
        positions = part.positions_from(self._context.position(start))
        try:
            for at in range(0, len(rows), size):
                self._context.append_image(
                    rows[at : at + size], positions[:, at : at + size], is_causal=part.is_causal
                )
        except (BackendError, ContextFullError, CancelledError):
            self._cut(start)
            raise
        if encoder.has_wide_positions:
            self._context.add_image(start, len(rows), part.position_count)
        self.cells.length += len(rows)

    def prefill_prompt(self, tokens: Sequence[int], progress: Progress | None = None) -> Logits | None:
        # Verify the last token in a separate pass if a head needs the final hidden states of all tokens, or
        # if the model is recurrent and needs a checkpoint before it.
        if self._context.needs_all_rows or self._recurrent:
            return super().prefill_prompt(tokens, progress)
        self._check(len(tokens))
        before, batch, part_progress = split_last_batch(tokens, self._context.batch_tokens, progress)
        self.prefill(before, part_progress)
        positions = range(self.length, self.length + len(batch))
        needs_logits = [position == positions[-1] for position in positions]
        try:
            logits = self._context.run(batch, positions, [(0,)] * len(batch), needs_logits)
            check_progress(progress)
        except (BackendError, ContextFullError, CancelledError):
            self._cut(self.length)
            raise
        if self.logs.states:
            states = self._context.tapped_rows(len(batch))
            self.logs.append(self.length, states[:-1])
            self._tree_states = [states[-1]]
        self.cells.length += len(batch) - 1
        self.cells.place_tree(TokenTree.chain(batch[-1]), 0)
        return HostLogits(logits)

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        text = self._pooling.whole_text(tokens)
        self._check(len(text))
        try:
            return self._pooling.embed(text, self._states, self._context.max_width, progress)
        finally:
            self._cut(0)

    def _states(self, tokens: Sequence[int], position: int) -> NDArray[np.float32]:
        count = len(tokens)
        return self._context.run_states(tokens, range(position, position + count), [(0,)] * count)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        return self._run(tree, first, self._logits)

    def _logits(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        tree = self._padded(tree)
        positions, sequences = self.cells.place_tree(tree, first)
        self._rollback_pending = False
        logits = self._context.run(tree.tokens[first:], positions, sequences)
        if self.logs.states:
            self._tree_states[first:] = self._context.tapped_rows(len(positions))
        return logits

    def _check_shape(self, tree: TokenTree) -> None:
        capabilities = self.facts.capabilities
        replays = self.probe_result.replays
        if not (capabilities.rollback or tree.width == 1 or (replays and tree.is_chain)):
            raise CapabilityError(f"{self.facts.name} cannot verify drafts", capabilities.reason)
        super()._check_shape(tree)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._log_commit(path)
        kept_all = self.cells.commit(path)
        self._rollback_pending = self.probe_result.replays and not kept_all

    def _cut(self, length: int) -> None:
        self._checkpoints.release_dropped()
        super()._cut(length)
        self.logs.truncate(self.length)
        self._rollback_pending = self._rollback_pending and self.length > 0

    def remove_range(self, start: int, end: int) -> None:
        super().remove_range(start, end)
        self.logs.clear()

    @property
    def context(self) -> LlamaContext:
        return self._context

    def close(self) -> None:
        if self._stream:
            self._stream.close()
        if self._encoder and not self._closed:
            self._encoder.close()
        super().close()

    def run_first_layers(self, enabled: bool) -> bool:
        self._check(0)
        self._cut(0)
        # Layers on different devices run different kernels, so the first layers would not be representative.
        can_run = enabled and on_cpu(self.options) and not self._recurrent
        count = first_layers_of_each_kind(self._path) if can_run else 0
        if not count and not self._context.runs_first_layers:
            return False
        self._context.run_first_layers(count)
        if not count:
            return False
        try:
            # Run a token to check that llama.cpp names its layer outputs, which is not the case for all
            # architectures.
            self._context.append([0], 0)
        except BackendError:
            self._context.run_first_layers(0)
            return False
        self._cut(0)
        return True

    def _tap_states(self) -> None:
        self._context.tap_states(self.logs.states)

    def _allocate_for_states(self) -> None:
        if self._context.is_stale:
            if self._context.is_lost:
                self._cut(0)
            rebuild_context(self._context, self._context.plan, self.length, recurrent=self._recurrent)
            self._now_sized(self.facts.context_tokens, self.facts.kv_bytes)

    def _head(self, method: Head) -> SelfDraftView[Any]:
        return self._head_view(method)

    def _low_bit_view(self, method: LowBit) -> SelfDraftView[Any]:
        return load_low_bit_view(self, method)

    def checkpoint(self) -> Checkpoint:
        """Save the state after the committed tokens, and return a checkpoint to pass to `rewind`."""
        self._check(0)
        self._apply_pending_rollback()
        return self._checkpoints.save(self.length)

    def _apply_pending_rollback(self) -> None:
        if self._rollback_pending:
            self._context.apply_rollback()
            self._rollback_pending = False

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Restore the state at a checkpoint, and discard all later tokens."""
        self._check(0)
        self._checkpoints.restore(checkpoint)
        self.cells.length, self._rollback_pending = checkpoint.length, False
        self.cells.clear_round()

    def resize(self, context_tokens: int) -> None:
        self._check(0)
        self._apply_pending_rollback()
        try:
            super().resize(context_tokens)
        finally:
            # Free the llama.cpp sequences of checkpoints that are no longer in use.
            self._checkpoints.release_dropped()
