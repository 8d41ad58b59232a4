"""Load and run GGUF models that are split at an exit layer and draft with their lower layers.

The method is LayerSkip (arXiv 2404.16710).
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.backends.base import (
    LanguageModel,
    LoadOptions,
    LowBit,
    ModelFacts,
    Progress,
    SelfDraft,
    SkippedLayers,
    Snapshot,
    Vocabulary,
)
from edgespec.backends.base_model import BaseModel, in_batches, scaled_progress
from edgespec.backends.llamacpp.checkpoints import StateCheckpoints
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.context_planning import plan_split_contexts, split_load_options, work_bytes
from edgespec.backends.llamacpp.devices import in_main_memory
from edgespec.backends.llamacpp.early_exit import EarlyExitView
from edgespec.backends.llamacpp.hidden_state_hook import HiddenStateHook, layer_output
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.kv_types import parse_kv_types
from edgespec.backends.llamacpp.layerskip_files import (
    DESCRIPTION_KEY,
    FILES,
    LOWER_FIRST,
    PARAMETERS_KEY,
    PARTS,
    SHARED_BYTES_KEY,
)
from edgespec.backends.llamacpp.loading import (
    check_file,
    default_threads,
    describe,
    load_parts,
    repacks_weights,
)
from edgespec.backends.llamacpp.lowbit import load_low_bit_view
from edgespec.backends.llamacpp.lower_split import LowerSplit
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import ProbeResult, probe
from edgespec.backends.llamacpp.resizing import (
    cache_variant,
    check_resize_fits,
    initial_plan,
    rebuild_context,
)
from edgespec.backends.llamacpp.shared_target import SharedTarget
from edgespec.backends.llamacpp.snapshots import snapshot_from_bytes, snapshot_to_bytes
from edgespec.backends.llamacpp.vocabulary import LlamaVocabulary
from edgespec.backends.memory_check import check_weights_fit, round_up_to_block
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ContextFullError,
    ModelFileError,
)

__all__ = ["LayerSkipModel", "load_layerskip"]

# llama.cpp's RoPE types with at most one position per token: LLAMA_ROPE_TYPE_NONE, NORM and NEOX.
_SINGLE_POSITION_ROPES = (-1, 0, 2)
# The header of a snapshot, which stores the size of the lower split's cells in bytes.
_SIZE = struct.Struct("<Q")


def load_layerskip(
    folder: str, name: str, options: LoadOptions, progress: Progress | None = None
) -> LayerSkipModel:
    """Load the lower and the upper split of a model.

    Both splits memory-map the tensors they share from the same file, so these tensors are in memory only
    once. If llama.cpp repacks the weights, they cannot be mapped, and the shared tensors are in memory twice.

    Args:
        folder: The folder written by `edgespec prepare layerskip`.
        name: The model's name, used in progress reports and error messages.
        options: The load options.
        progress: Called repeatedly while the weights are loaded. Returns False to cancel.

    Raises:
        EdgespecError: The model cannot be loaded. See `edgespec.backends.llamacpp.load`.
    """
    if options.kv_type != "auto":
        parse_kv_types(options.kv_type)
    paths = {file: str(Path(folder) / file) for file in FILES}
    check_weights_fit(name, sum(map(check_file, paths.values())), options)
    splits = [[paths[part] for part in parts] for parts in PARTS]
    if options.mmap and any(repacks_weights(parts, options.gpu_layers) for parts in splits):
        options = replace(options, mmap=False)
    with ExitStack() as undo:
        loaded = []
        for i, parts in enumerate(splits):
            weights = load_parts(parts, name, options, progress and scaled_progress(progress, i / 2, 1 / 2))
            undo.callback(library().llama_model_free, weights)
            loaded.append(weights)
        model = LayerSkipModel(loaded[0], loaded[1], folder, name, options)
        undo.pop_all()
        return model


class LayerSkipModel(BaseModel):
    """A model that runs its lower and upper layers in two separate contexts.

    The upper split takes the hidden states of the lower split as input. Drafting runs only the lower split. A
    verify pass runs the lower split for nodes that were not drafted, then the upper split for all nodes. Both
    contexts always contain the same committed tokens.

    Args:
        lower: The llama_model handle of the lower split.
        upper: The llama_model handle of the upper split.
        folder: The folder that contains both splits.
        name: The model's name.
        options: The load options.

    Attributes:
        exit_layer: The number of layers in the lower split.
    """

    def __init__(self, lower: Any, upper: Any, folder: str, name: str, options: LoadOptions) -> None:
        lib = library()
        self._weights = (lower, upper)
        self.exit_layer: int = lib.llama_model_n_layer(lower)
        self._vocabulary = LlamaVocabulary(lower)
        self.vocabulary: Vocabulary = self._vocabulary
        _check_supported(lower, name)
        weight_bytes = lib.llama_model_size(lower) + lib.llama_model_size(upper)
        if options.mmap and in_main_memory(options):
            # Both splits share the mapped pages in main memory, so count the shared tensors once. A GPU
            # with its own memory stores a separate copy for each split.
            weight_bytes -= int(metadata(lower, SHARED_BYTES_KEY) or 0)
        max_plans = plan_split_contexts(lower, upper, weight_bytes, options)
        plans = [initial_plan(lower, plan, options) for plan in max_plans]
        threads = options.threads or default_threads(weight_bytes)
        with ExitStack() as undo:
            exit_name = layer_output(self.exit_layer - 1)
            hook = HiddenStateHook([exit_name], lib.llama_model_n_embd(lower))
            lower_options, upper_options = split_load_options(lower, options)
            lower_context = LlamaContext(lower, lower_options, plans[0], threads, hook=hook)
            undo.callback(lower_context.close)
            self._context = LlamaContext(upper, upper_options, plans[1], threads, takes_hidden=True)
            undo.callback(self._context.close)
            _probe(lower_context, lower, plans[0], options)
            # Report the limits of the upper split. The lower split can run a wide tree in several passes.
            result = _probe(self._context, upper, plans[1], options)
            self._lower = LowerSplit(lower_context, hook, exit_name, options.max_branches)
            self._cells = KvCells(self._context, options.max_branches)
            first_file = str(Path(folder) / LOWER_FIRST)
            facts = describe(lower, first_file, name, max_plans[0], self.vocabulary, result)
            self._options, self._max_plan = options, max_plans[0]
            if options.memory_bytes is not None:
                # Reserve memory for the lower split's logits. A low-bit copy may use the rest of the budget.
                left = max(0, options.memory_bytes - work_bytes(lower, options))
                self._options = replace(options, memory_bytes=left)
            capabilities = replace(result.capabilities, self_draft_methods=frozenset({"layerskip"}))
            self.facts: ModelFacts = replace(
                facts,
                path=folder,
                description=metadata(lower, DESCRIPTION_KEY) or facts.description,
                parameters=int(metadata(lower, PARAMETERS_KEY) or facts.parameters),
                file_bytes=sum(check_file(str(Path(folder) / file)) for file in FILES),
                weight_bytes=weight_bytes,
                context_tokens=plans[0].tokens,
                kv_bytes=plans[0].kv_bytes + plans[1].kv_bytes,
                requested_kv_bytes=max_plans[0].kv_bytes + max_plans[1].kv_bytes,
                capabilities=capabilities,
                cache_variant=cache_variant(lower, max_plans[0]),
            )
            # The reason that a low-bit copy cannot draft for this model, or None if it can.
            self._merge_error = self._try_merging_cells()
            if self._merge_error is None:
                methods = capabilities.self_draft_methods | {"lowbit"}
                capabilities = replace(capabilities, self_draft_methods=methods)
                self.facts = replace(self.facts, capabilities=capabilities)
            undo.pop_all()

    def _try_merging_cells(self) -> CapabilityError | None:
        """Clear the cache, and return an error if the KV cells of both splits cannot be merged."""
        self.prefill([0, 0])
        try:
            self._shared_target().export_cells(0, 2)
        except CapabilityError as error:
            return error
        finally:
            self.truncate(0)
        return None

    def _shared_target(self) -> SharedTarget:
        return SharedTarget(
            self,
            self._weights,
            (self._lower.context, self._context),
            self._cells,
            self._max_plan,
            self._options,
            self.check_open,
        )

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def free_tokens(self) -> int:
        return min(self._lower.context.tokens, self._context.tokens) - self.length

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check(len(tokens))
        self.end_round()
        batch_tokens = min(self._context.batch_tokens, self._context.max_width)
        for batch in in_batches(tokens, batch_tokens, progress):
            try:
                self._context.append(self._lower.append(batch), self.length)
            except (BackendError, ContextFullError, CancelledError):
                self._cut(self.length)
                raise
            self._cells.length += len(batch)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        try:
            self._check_pass(tree)
            if first == 0:
                self._cells.end_round()
            hidden = self._lower.hidden_of(tree, first)
            positions, sequences = self._cells.place_tree(tree, first)
            rows = self._context.run(hidden, positions, sequences)
        except (BackendError, ContextFullError, CancelledError):
            self.end_round()
            raise
        return HostLogits(rows)

    def draft(self, tree: TokenTree, first: int) -> HostLogits:
        """Run the tree's nodes, starting at index `first`, through the lower split.

        The next call to `verify` reuses their hidden states.
        """
        try:
            self._check_pass(tree)
            if first == 0:
                self._cells.end_round()
            return HostLogits(self._lower.draft(tree, first))
        except (BackendError, ContextFullError, CancelledError):
            self.end_round()
            raise

    def _check_pass(self, tree: TokenTree) -> None:
        self._check(tree.width)
        if tree.width > self._context.max_width:
            raise CapabilityError(
                f"a draft of {tree.width} tokens exceeds the limit of {self._context.max_width} per pass",
                "use a shorter --draft-length or fewer --draft-branches",
            )

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self._cells.commit(path)
        self._lower.commit(path)

    def truncate(self, length: int) -> None:
        self._check(0)
        self._cut(min(length, self.length))

    def _cut(self, length: int) -> None:
        self.end_round()
        self._lower.cells.truncate(length)
        self._cells.truncate(length)

    def end_round(self) -> None:
        """Remove drafted and verified tokens that were not committed."""
        self._lower.end_round()
        self._cells.end_round()

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        if self._cells.is_tracked:
            raise CapabilityError(
                f"the KV cache of {self.facts.name} is in use by a low-bit draft", "close the draft first"
            )
        splits = ((self._lower.context, self._lower.cells), (self._context, self._cells))
        if not all(context.can_shift for context, _ in splits):
            raise CapabilityError(
                f"{self.facts.name} cannot move cached keys to other positions",
                "truncate the cache and prefill the rest again",
            )
        self.end_round()
        end = min(end, self.length)
        if start < end:
            for context, cells in splits:
                context.remove_range(start, end)
                cells.length -= end - start

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self.end_round()
        start, end = self._span(start, end)
        lower = snapshot_to_bytes(self._lower.context, start, end, False)
        upper = snapshot_to_bytes(self._context, start, end, False)
        return Snapshot(end, b"".join((_SIZE.pack(len(lower)), lower, upper)), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self.end_round()
        if not snapshot.start:
            self._cut(0)
        if not self._append_snapshot(snapshot):
            self._cut(min(snapshot.start, self.length))
            raise BackendError("the snapshot does not fit this model and context", "prefill the tokens again")
        self._lower.cells.length = self._cells.length = snapshot.length

    def _append_snapshot(self, snapshot: Snapshot) -> bool:
        data = memoryview(snapshot.data)
        fits = self.length == snapshot.start <= snapshot.length <= self._context.tokens
        if len(data) < _SIZE.size or not fits:
            return False
        end = _SIZE.size + _SIZE.unpack_from(data)[0]
        splits = ((self._lower.context, data[_SIZE.size : end]), (self._context, data[end:]))
        start, length = snapshot.start, snapshot.length
        return all(snapshot_from_bytes(context, part, start, length, False) for context, part in splits)

    def resize(self, context_tokens: int) -> None:
        self._check_size(context_tokens)
        self.end_round()
        contexts = (self._lower.context, self._context)
        before = [context.plan for context in contexts]
        after = [plan.with_tokens(round_up_to_block(context_tokens)) for plan in before]
        check_resize_fits(before, after, self.facts.weight_bytes, self._options)
        try:
            for context, plan in zip(contexts, after, strict=True):
                rebuild_context(context, plan, self.length)
        except BaseException:
            # `rebuild_context` has restored the context that failed. Restore the other one too.
            for context, plan in zip(contexts, before, strict=True):
                if not context.is_lost:
                    rebuild_context(context, plan, self.length)
            raise
        finally:
            if any(context.is_lost for context in contexts):
                self._cut(0)
                self._now_sized(0, 0)
        self._now_sized(after[0].tokens, sum(plan.kv_bytes for plan in after))

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        self._check(0)
        if isinstance(method, LowBit):
            if self._merge_error is not None:
                raise self._merge_error
            low_bit_view = load_low_bit_view(self._shared_target(), method)
            self._views.add(low_bit_view)
            return low_bit_view
        if isinstance(method, SkippedLayers):
            raise CapabilityError(
                f"{self.facts.name} cannot skip layers, because the method swift requires an MLX model",
                "choose another method or load an MLX version of the model",
            )
        if method.exit_layer != self.exit_layer:
            raise CapabilityError(
                f"{self.facts.name} was loaded for exit layer {self.exit_layer}, not {method.exit_layer}",
                f"run `edgespec prepare layerskip --exit {method.exit_layer}` for this model",
            )
        view = EarlyExitView(self)
        self._views.add(view)
        return view

    def interrupt(self, enabled: bool) -> None:
        self._lower.context.interrupt.requested = self._context.interrupt.requested = enabled

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._vocabulary.close()
        self._lower.context.close()
        self._context.close()
        for weights in self._weights:
            library().llama_model_free(weights)
        gc.collect()


def _check_supported(weights: Any, name: str) -> None:
    """Raise ModelFileError if the architecture cannot run as two splits."""
    lib = library()
    reason = ""
    if lib.llama_model_is_recurrent(weights) or lib.llama_model_is_hybrid(weights):
        reason = "its recurrent state cannot be rolled back"
    elif lib.llama_model_rope_type(weights) not in _SINGLE_POSITION_ROPES:
        reason = "it uses more than one position per token"
    if reason:
        raise ModelFileError(f"{name} does not support layerskip: {reason}", "load the original model file")


def _probe(context: LlamaContext, weights: Any, plan: ContextPlan, options: LoadOptions) -> ProbeResult:
    return probe(context, weights, plan, options, StateCheckpoints(context, range(1, plan.sequences)))
