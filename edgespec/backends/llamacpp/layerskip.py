"""A GGUF model in two halves that drafts with its lower layers (LayerSkip, arXiv 2404.16710)."""

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
from edgespec.backends.base_model import BaseModel, in_batches
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

# Of llama.cpp's kinds of rotary positions those with one number a token, or none.
_PLAIN_ROPES = (-1, 0, 2)
_SIZE = struct.Struct("<Q")


def load_layerskip(
    folder: str, name: str, options: LoadOptions, progress: Progress | None = None
) -> LayerSkipModel:
    """Load the two halves of a model from the folder that `edgespec prepare layerskip` made.

    Both map the same files, so that the weights are in memory once; but for weights that llama.cpp arranges
    anew, see `load_weights`: then what both use is there twice. Raises what `load` does.
    """
    if options.kv_type != "auto":
        parse_kv_types(options.kv_type)
    paths = {file: str(Path(folder) / file) for file in FILES}
    check_weights_fit(name, sum(map(check_file, paths.values())), options)
    both = [[paths[part] for part in parts] for parts in PARTS]
    if options.mmap and any(repacks_weights(parts, options.gpu_layers) for parts in both):
        options = replace(options, mmap=False)
    with ExitStack() as undo:
        halves = []
        for i, parts in enumerate(both):
            weights = load_parts(parts, name, options, progress and _half_of(progress, i))
            undo.callback(library().llama_model_free, weights)
            halves.append(weights)
        model = LayerSkipModel(halves[0], halves[1], folder, name, options)
        undo.pop_all()
        return model


def _half_of(progress: Progress, half: int) -> Progress:
    return lambda what, fraction: progress(what, (half + fraction) / 2)


class LayerSkipModel(BaseModel):
    """One model whose layers run in two contexts: the lower ones, then the upper ones on their results.

    Drafting runs the lower half alone; verifying runs of it what the draft has not, and the upper half.
    Both hold the same tokens. exit_layer: how many layers the lower half has.
    """

    def __init__(self, lower: Any, upper: Any, folder: str, name: str, options: LoadOptions) -> None:
        lib = library()
        self._weights = (lower, upper)
        self.exit_layer: int = lib.llama_model_n_layer(lower)
        self._vocabulary = LlamaVocabulary(lower)
        self.vocabulary: Vocabulary = self._vocabulary
        _check_kind(lower, name)
        weight_bytes = lib.llama_model_size(lower) + lib.llama_model_size(upper)
        if _mapped(options):
            weight_bytes -= int(metadata(lower, SHARED_BYTES_KEY) or 0)
        wholes = plan_split_contexts(lower, upper, weight_bytes, options)
        plans = [initial_plan(lower, whole, options) for whole in wholes]
        threads = options.threads or default_threads(weight_bytes)
        with ExitStack() as undo:
            exit_name = layer_output(self.exit_layer - 1)
            hook = HiddenStateHook([exit_name], lib.llama_model_n_embd(lower))
            first, second = split_load_options(lower, options)
            below = LlamaContext(lower, first, plans[0], threads, hook=hook)
            undo.callback(below.close)
            self._context = LlamaContext(upper, second, plans[1], threads, takes_hidden=True)
            undo.callback(self._context.close)
            _probed(below, lower, plans[0], options)
            # A pass may be as wide as the upper half takes it: the lower one runs it in pieces.
            found = _probed(self._context, upper, plans[1], options)
            self._lower = LowerSplit(below, hook, exit_name, options.max_branches)
            self._cells = KvCells(self._context, options.max_branches)
            facts = describe(lower, str(Path(folder) / LOWER_FIRST), name, wholes[0], self.vocabulary, found)
            self._options, self._whole = options, wholes[0]
            if options.memory_bytes is not None:
                # What a copy may take is reckoned from this.
                left = max(0, options.memory_bytes - work_bytes(lower, options))
                self._options = replace(options, memory_bytes=left)
            able = replace(found.capabilities, self_draft_methods=frozenset({"layerskip"}))
            self.facts: ModelFacts = replace(
                facts,
                path=folder,
                description=metadata(lower, DESCRIPTION_KEY) or facts.description,
                parameters=int(metadata(lower, PARAMETERS_KEY) or facts.parameters),
                file_bytes=sum(check_file(str(Path(folder) / file)) for file in FILES),
                weight_bytes=weight_bytes,
                context_tokens=plans[0].tokens,
                kv_bytes=plans[0].kv_bytes + plans[1].kv_bytes,
                requested_kv_bytes=wholes[0].kv_bytes + wholes[1].kv_bytes,
                capabilities=able,
                cache_variant=cache_variant(lower, wholes[0]),
            )
            self._merge_error = self._why_cells_stay_apart()
            if self._merge_error is None:
                able = replace(able, self_draft_methods=able.self_draft_methods | {"lowbit"})
                self.facts = replace(self.facts, capabilities=able)
            undo.pop_all()

    def _why_cells_stay_apart(self) -> CapabilityError | None:
        """Put the cells of both halves together as those of one model; leaves both empty."""
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
            self._whole,
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
        """Run nodes `first` and up on the lower layers alone; the target's next `verify` takes them over."""
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
            raise CapabilityError(f"a tree of {tree.width} tokens is wider than {self._context.max_width}")

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
        """Drop what was drafted or verified and not committed."""
        self._lower.end_round()
        self._cells.end_round()

    def remove_range(self, start: int, end: int) -> None:
        self._check(0)
        if self._cells.is_tracked:
            raise CapabilityError(f"{self.facts.name} has lent its keys to a draft", "close the draft first")
        halves = ((self._lower.context, self._lower.cells), (self._context, self._cells))
        if not all(context.can_shift for context, _ in halves):
            raise CapabilityError(f"{self.facts.name} cannot move its keys to other positions")
        self.end_round()
        end = min(end, self.length)
        if start < end:
            for context, cells in halves:
                context.remove_range(start, end)
                cells.length -= end - start

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        self._check(0)
        self.end_round()
        start, end = self._span(start, end)
        below = snapshot_to_bytes(self._lower.context, start, end, False)
        above = snapshot_to_bytes(self._context, start, end, False)
        return Snapshot(end, b"".join((_SIZE.pack(len(below)), below, above)), start)

    def restore(self, snapshot: Snapshot) -> None:
        self._check(0)
        self.end_round()
        if not snapshot.start:
            self._cut(0)
        if not self._put_down(snapshot):
            self._cut(min(snapshot.start, self.length))
            raise BackendError("the saved state does not fit this model and context", "compute it again")
        self._lower.cells.length = self._cells.length = snapshot.length

    def _put_down(self, snapshot: Snapshot) -> bool:
        data = memoryview(snapshot.data)
        fits = self.length == snapshot.start <= snapshot.length <= self._context.tokens
        if len(data) < _SIZE.size or not fits:
            return False
        end = _SIZE.size + _SIZE.unpack_from(data)[0]
        below, above = data[_SIZE.size : end], data[end:]
        halves = ((self._lower.context, below), (self._context, above))
        start, length = snapshot.start, snapshot.length
        return all(snapshot_from_bytes(context, half, start, length, False) for context, half in halves)

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
            # One of them failed, and is what it was.
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
            copy = load_low_bit_view(self._shared_target(), method)
            self._views.add(copy)
            return copy
        if isinstance(method, SkippedLayers):
            raise CapabilityError(
                f"{self.facts.name} cannot draft for itself without some layers: that takes an MLX model",
                "choose another method",
            )
        if method.exit_layer != self.exit_layer:
            raise CapabilityError(
                f"{self.facts.name} was loaded for exit layer {self.exit_layer}, not {method.exit_layer}",
                f"run `edgespec prepare layerskip --exit {method.exit_layer}` on the model",
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


def _mapped(options: LoadOptions) -> bool:
    """Whether weights are used where the files are mapped, and those of both halves are in memory once.

    An Apple GPU reads them there too; others have a copy of their own. (On a processor, the output head alone
    may be copied: where llama.cpp arranges weights of its type anew.)
    """
    return options.mmap and in_main_memory(options)


def _check_kind(weights: Any, name: str) -> None:
    """Raises ModelFileError for models that cannot be run in halves."""
    lib = library()
    reason = ""
    if lib.llama_model_is_recurrent(weights) or lib.llama_model_is_hybrid(weights):
        reason = "it has_memory by a state that cannot be cut back"
    elif lib.llama_model_rope_type(weights) not in _PLAIN_ROPES:
        reason = "its tokens have positions in several directions"
    if reason:
        raise ModelFileError(f"{name} cannot be run in two halves: {reason}", "load the model's own file")


def _probed(context: LlamaContext, weights: Any, plan: ContextPlan, options: LoadOptions) -> ProbeResult:
    return probe(context, weights, plan, options, StateCheckpoints(context, range(1, plan.sequences)))
