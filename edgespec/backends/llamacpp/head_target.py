"""Base class for GGUF models that run in one llama.cpp context, and that draft heads can draft for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext, adapter_bytes
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.backends.llamacpp.context_planning import cache_variant
from edgespec.backends.llamacpp.gguf_model import GgufModel
from edgespec.backends.llamacpp.image_encoder import NO_PROJECTOR, ImageEncoder, ImagePart
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.loading import describe
from edgespec.backends.llamacpp.metadata import architecture_metadata
from edgespec.backends.llamacpp.mtp_files import unloaded_bytes
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.shared_context import ContextSlot
from edgespec.backends.llamacpp.weight_stream import WeightStream
from edgespec.engine.logits import HostLogits, Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ContextFullError, EdgespecError
from edgespec.model.base import Head, LoadOptions, Progress
from edgespec.model.base_model import SelfDraftView, check_progress, in_batches, scaled_progress
from edgespec.model.hidden_states import HiddenStateLog, HiddenStateSource
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage, contains_image, end_of_images
from edgespec.model.model_facts import ModelFacts
from edgespec.model.registry import format_of

__all__ = ["HeadTarget", "SharedHead", "SharedHeads", "describe_target"]

# Values of `pooling_type` in the metadata. Text-generation models have no `pooling_type`.
_NONE, _MEAN, _CLS, _LAST = "0", "1", "2", "3"


class SharedHead(Protocol):
    """A head's weights and context, shared by its views. Each concurrent reply has its own view."""

    def view(self, target: HeadTarget, release: Callable[[], None]) -> SelfDraftView[Any]:
        """Open a view of this head that drafts for one reply.

        Args:
            target: The model that verifies the drafts.
            release: Called once, when the view is closed.

        Raises:
            EdgespecError: The view cannot be created.
        """

    def close(self) -> None:
        """Free the weights. All views must already be closed."""


class SharedHeads:
    """The heads of a target. Opening the first view of a head loads it, and closing the last one frees it.

    Only the thread that loads and closes models uses this class.
    """

    def __init__(self) -> None:
        # The loaded heads, with one object per open view.
        self._loaded: dict[Head, tuple[SharedHead, set[object]]] = {}

    def view(self, target: HeadTarget, head: Head) -> SelfDraftView[Any]:
        """Return a view of a head for one reply, loading the head first if necessary.

        Raises the same errors as loading the head.
        """
        if head not in self._loaded:
            self._loaded[head] = format_of("gguf").load_head(target, head), set()
        (loaded, views), own = self._loaded[head], object()
        views.add(own)

        def release() -> None:
            if own in views:
                views.remove(own)
                if not views:
                    del self._loaded[head]
                    loaded.close()

        try:
            return loaded.view(target, release)
        except BaseException:
            release()
            raise


class Pooling(NamedTuple):
    """A model's pooling method, which reduces the hidden states of a text to one vector.

    edgespec does the pooling itself, because llama.cpp can pool only texts that fit in one pass.

    Attributes:
        kind: The value of `pooling_type` in the metadata. If it is missing, mean pooling is used.
        eos: The token that the model expects at the end of a text, or None.
    """

    kind: str
    eos: int | None

    @classmethod
    def of(cls, weights: Any) -> Pooling:
        """Read a model's pooling method from its metadata."""
        lib = library()
        vocab = lib.llama_model_get_vocab(weights)
        eos = lib.llama_vocab_eos(vocab) if lib.llama_vocab_get_add_eos(vocab) else None
        return cls(architecture_metadata(weights, "pooling_type") or _NONE, eos)

    def whole_text(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens, followed by the EOS token if the model expects one."""
        return tokens if self.eos in (None, tokens[-1]) else [*tokens, self.eos]

    def embed(
        self,
        tokens: Sequence[int],
        run: Callable[[Sequence[int], int], NDArray[np.float32]],
        batch_tokens: int,
        progress: Progress | None,
    ) -> NDArray[np.float32]:
        """Return the embedding of a text as float32 [size].

        Args:
            tokens: The text's tokens, as returned by `whole_text`.
            run: Appends tokens at a position and returns the last layer's hidden states.
            batch_tokens: Maximum number of tokens per call to `run`.
            progress: Called after each batch. Returning False cancels the computation.

        Raises:
            CapabilityError: The model's vectors serve another purpose, such as ranking.
            CancelledError: `progress` returned False.
        """
        if self.kind not in (_NONE, _MEAN, _CLS, _LAST):
            raise CapabilityError(
                f"the model was trained to rank texts, not to compute embeddings (pooling_type {self.kind})",
                "choose an embedding model",
                code="embeddings_not_supported",
            )
        position, first, last, total = 0, None, None, 0.0
        for batch in in_batches(tokens, batch_tokens, progress):
            states = run(batch, position)
            first, last = states[0] if first is None else first, states[-1]
            total = total + states.sum(axis=0, dtype=np.float64)
            position += len(batch)
        pooled = {_CLS: first, _LAST: last}.get(self.kind, total / position)
        return np.asarray(pooled, np.float32)


def describe_target(
    weights: Any,
    path: str,
    name: str,
    plan: ContextPlan,
    result: ProbeResult,
    model: HeadTarget,
    stream: WeightStream | None,
) -> ModelFacts:
    """Return a model's facts at its maximum context length. See `describe`."""
    options, facts = model.options, describe(weights, path, name, plan, model.vocabulary, result)
    return replace(
        facts,
        weight_bytes=facts.weight_bytes
        - (stream.saved_bytes if stream else 0)
        - (0 if options.own_head else unloaded_bytes(Path(path)))
        + adapter_bytes(options.adapters),
        cache_variant=cache_variant(weights, plan),
        adapters=options.adapters,
        sees_images=model.encoder is not None,
    )


class HeadTarget(GgufModel, HiddenStateSource):
    """A GGUF model that runs in one llama.cpp context, or in a slot of one, and that heads can draft for.

    Each concurrent reply has its own instance.

    Args:
        weights: The llama_model handle.
        context: The context, or the reply's slot in it.
        cells: The KV cells of the reply.
        max_plan: The size and layout of the reply's KV cache at the maximum context length.
        options: The options that the model was loaded with.
        heads: The heads loaded for the model.
        encoder: The model's image projector, or None if it has none.

    Attributes:
        slot: The index of the reply's slot in the context.
        encoder: The image projector.
    """

    why_blind = NO_PROJECTOR
    slot: int = 0
    _context: LlamaContext | ContextSlot

    def __init__(
        self,
        weights: Any,
        context: LlamaContext | ContextSlot,
        cells: KvCells,
        max_plan: ContextPlan,
        options: LoadOptions,
        heads: SharedHeads,
        encoder: ImageEncoder | None,
    ) -> None:
        super().__init__([weights], [context], [cells], max_plan, options)
        self._heads, self.encoder, self._pooling = heads, encoder, Pooling.of(weights)
        # Hidden states of the nodes in the tree being verified.
        self._tree_states: list[NDArray[np.float32]] = []

    @property
    @abstractmethod
    def context(self) -> LlamaContext:
        """The context that runs the model. Several replies can share it."""

    @abstractmethod
    def _allocate_for_states(self) -> None:
        """Reallocate the context if copying the chosen hidden states requires it."""

    def _append(self, tokens: Sequence[int]) -> None:
        self._context.append(tokens, self.length)
        if self.logs.states:
            self.logs.append(self.length, self._context.tapped_rows(len(tokens)))

    def prepare_image(self, image: Image) -> PreparedImage:
        self._check(0)
        return self.encoder.prepare(image) if self.encoder else super().prepare_image(image)

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        if self.encoder is None or not contains_image(tokens):
            super().prefill(tokens, progress)
            return
        self._check(len(tokens))
        self._end_round()
        for run, part_progress in self.encoder.runs(tokens, progress):
            if isinstance(run, ImagePart):
                self._append_image(run, self.encoder)
                check_progress(part_progress)
            else:
                super().prefill(run, part_progress)

    def _append_image(self, part: ImagePart, encoder: ImageEncoder) -> None:
        rows, size, start = encoder.encode(part), self.context.batch_tokens, self.length
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
        # Compute the logits in the pass over the last batch, which must not contain an image.
        size, text_start = self._context.batch_tokens, end_of_images(tokens)
        start = text_start + (len(tokens) - text_start - 1) // size * size
        if start:
            share = start / len(tokens)
            self.prefill(tokens[:start], progress and scaled_progress(progress, 0.0, share))
        else:
            self._end_round()
        batch = tokens[start:]
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
        return HostLogits(logits, self._context.other_tokens)

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        text = self._pooling.whole_text(tokens)
        self._check(len(text))
        batch_tokens = min(self._context.batch_tokens, self._context.max_width)
        try:
            return self._pooling.embed(text, self._states, batch_tokens, progress)
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
        logits = self._context.run(tree.tokens[first:], positions, sequences)
        if self.logs.states:
            self._tree_states[first:] = self._context.tapped_rows(len(positions))
        return logits

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        # Log the hidden states of the tree's root and of the nodes in `path`.
        if self.logs.states:
            self.logs.append(self.length, np.array([self._tree_states[node] for node in (0, *path)]))
        self._commit_cells(path)

    def _commit_cells(self, path: tuple[int, ...]) -> None:
        self.cells.commit(path)

    def remove_range(self, start: int, end: int) -> None:
        super().remove_range(start, end)
        self.logs.clear()

    def log_hidden_states(self, states: Sequence[int]) -> HiddenStateLog:
        """Start a log of hidden states. If the model is recurrent, its cache must be empty."""
        self._check(0)
        self._end_round()
        log = self.logs.open(states, library().llama_model_n_embd(self.weights[0]))
        try:
            self._tap_states()
            self._allocate_for_states()
            self._check_states_readable()
        except BaseException:
            self.stop_logging(log)
            # If the larger context could not be allocated, go back to one that does not copy these states.
            # Otherwise, the model would have no KV cache.
            with suppress(EdgespecError):
                self._allocate_for_states()
            raise
        return log

    def _check_states_readable(self) -> None:
        """Run one token to check that llama.cpp computes all chosen hidden states for this architecture."""
        if not self.free_tokens:
            return
        try:
            self.verify(TokenTree.chain(0))
        except BackendError as error:
            raise CapabilityError(
                f"the hidden states of {self.facts.name} cannot be read: {error.what}", error.next_step
            ) from error
        self.truncate(self.length)

    def stop_logging(self, log: HiddenStateLog) -> None:
        """Stop updating a log. See `HiddenStateSource`."""
        self.logs.close(log)
        self._tap_states()

    def _tap_states(self) -> None:
        self._context.tap_states(self.logs.states)

    def _head(self, method: Head) -> SelfDraftView[Any]:
        self.check_can_draft(method.method)
        if method.method not in self.facts.capabilities.self_draft_methods:
            raise CapabilityError(
                f"{self.facts.name} does not support draft heads for the {method.method} method, because of"
                f" its architecture ({self.facts.architecture!r}) or this version of llama.cpp",
                "choose another method, such as model or suffix",
                code="head_not_supported",
            )
        return self._heads.view(self, method)
