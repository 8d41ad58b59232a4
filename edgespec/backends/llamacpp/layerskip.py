"""Run GGUF models that were split into lower and upper layers, and draft with the lower layers.

This implements LayerSkip (arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import choose_kv_types
from edgespec.backends.llamacpp.context_planning import (
    cache_variant,
    initial_plan,
    plan_context,
    plan_split_contexts,
    split_load_options,
    work_bytes,
)
from edgespec.backends.llamacpp.devices import experts_per_part, in_main_memory
from edgespec.backends.llamacpp.gguf_model import GgufModel
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.loading import (
    default_threads,
    describe,
    load_files,
    load_weights,
    repacks_weights,
    threads_for,
)
from edgespec.backends.llamacpp.lowbit import load_low_bit_view
from edgespec.backends.llamacpp.metadata import has_state, metadata
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import probe
from edgespec.backends.llamacpp.state_taps import HiddenStateHook, layer_output
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.base import EarlyExit, LoadOptions, LowBit, Progress
from edgespec.model.base_model import SelfDraftView, scaled_progress
from edgespec.model.formats.layerskip_files import (
    DESCRIPTION_KEY,
    FILES,
    PARAMETERS_KEY,
    PARTS,
    SHARED_BYTES_KEY,
)
from edgespec.model.memory_estimate import check_weights_fit
from edgespec.model.model_facts import ModelFacts

__all__ = ["LayerSkipModel", "hidden_states", "load_layerskip"]

# llama.cpp's RoPE types for models with at most one position per token: LLAMA_ROPE_TYPE_NONE, NORM and NEOX.
_SINGLE_POSITION_ROPES = (-1, 0, 2)


def load_layerskip(
    folder: str, name: str, options: LoadOptions, progress: Progress | None = None
) -> LayerSkipModel:
    """Load a model whose lower and upper layers were split into separate files.

    Tensors used by both parts are in memory once if the files are memory-mapped, and twice if llama.cpp
    repacks the weights for this CPU.

    Raises:
        EdgespecError: The model cannot be loaded. See `edgespec.backends.llamacpp.load`.
    """
    choose_kv_types(options)
    paths = {file: str(Path(folder) / file) for file in FILES}
    check_weights_fit(name, sum(Path(file).stat().st_size for file in paths.values()), options)
    splits = [[paths[part] for part in parts] for parts in PARTS]
    experts = experts_per_part(splits, options.experts)
    if (
        options.mmap
        and options.repack
        and any(
            repacks_weights(parts, options.gpu_layers, count)
            for parts, count in zip(splits, experts, strict=True)
        )
    ):
        options = replace(options, mmap=False)
    with ExitStack() as undo:
        loaded = []
        for i, parts in enumerate(splits):
            part_options = replace(options, experts=experts[i])
            part_progress = progress and scaled_progress(progress, i / 2, 1 / 2)
            weights = load_files(parts, name, part_options, part_progress)
            undo.callback(library().llama_model_free, weights)
            loaded.append(weights)
        model = LayerSkipModel(loaded[0], loaded[1], folder, name, options)
        undo.pop_all()
        return model


class LayerSkipModel(GgufModel):
    """A model that runs its lower and upper layers in two separate llama.cpp contexts.

    Drafting runs only the lower layers. To verify a draft, the upper layers continue from the hidden states
    computed while drafting, so the lower layers run only for tokens that were not drafted.
    """

    _context: LlamaContext
    why_blind = (
        "it was prepared for early exit",
        "use another --method to load the original model file",
    )

    def __init__(self, lower: Any, upper: Any, folder: str, name: str, options: LoadOptions) -> None:
        lib = library()
        self.exit_layer: int = lib.llama_model_n_layer(lower)
        _check_supported(lower, name)
        weight_bytes = lib.llama_model_size(lower) + lib.llama_model_size(upper)
        if options.mmap and in_main_memory(options):
            # Count memory-mapped tensors only once if the lower and upper models share them.
            weight_bytes -= int(metadata(lower, SHARED_BYTES_KEY) or 0)
        max_plans = plan_split_contexts(lower, upper, weight_bytes, options)
        plans = [initial_plan(lower, plan, options) for plan in max_plans]
        threads = options.threads or default_threads(weight_bytes)
        with ExitStack() as undo:
            exit_name = layer_output(self.exit_layer - 1)
            hook = HiddenStateHook([exit_name], lib.llama_model_n_embd(lower))
            lower_options, upper_options = split_load_options(lower, options)
            below = LlamaContext(lower, lower_options, plans[0], threads, hook=hook)
            undo.callback(below.close)
            above = LlamaContext(upper, upper_options, plans[1], threads, takes_hidden=True)
            undo.callback(above.close)
            probe(below, lower, options)
            result = probe(above, upper, options)
            self._lower = LowerSplit(below, hook, exit_name, options.max_branches)
            if options.memory_bytes is not None:
                left = max(0, options.memory_bytes - work_bytes(lower, options))
                options = replace(options, memory_bytes=left)
            cells = [self._lower.cells, KvCells(above, options.max_branches)]
            super().__init__([lower, upper], [below, above], cells, max_plans[0], options)
            file_bytes = sum((Path(folder) / file).stat().st_size for file in FILES)
            facts = describe(lower, folder, name, max_plans[0], self.vocabulary, result, file_bytes)
            capabilities = replace(result.capabilities, self_draft_methods=frozenset({EarlyExit.method}))
            self.facts: ModelFacts = replace(
                facts,
                description=metadata(lower, DESCRIPTION_KEY) or facts.description,
                parameters=int(metadata(lower, PARAMETERS_KEY) or facts.parameters),
                weight_bytes=weight_bytes,
                context_tokens=plans[0].tokens,
                kv_bytes=plans[0].kv_bytes + plans[1].kv_bytes,
                requested_kv_bytes=max_plans[0].kv_bytes + max_plans[1].kv_bytes,
                capabilities=capabilities,
                cache_variant=cache_variant(lower, max_plans[0]),
            )
            # Export the KV cells of two tokens to check whether the model can draft with a low-bit copy of
            # itself.
            self.prefill([0, 0])
            try:
                self.export_cells(0, 2)
                capabilities = replace(
                    capabilities, self_draft_methods=frozenset({EarlyExit.method, LowBit.method})
                )
                self.facts = replace(self.facts, capabilities=capabilities)
            except CapabilityError as error:
                self.low_bit_error = error
            self.truncate(0)
            undo.pop_all()

    def _append(self, tokens: Sequence[int]) -> None:
        self._context.append(self._lower.append(tokens), self.length)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        return self._run(tree, first, self._logits)

    def _logits(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        tree = self._padded(tree)
        hidden = self._lower.hidden_of(tree, first, can_branch=self.facts.capabilities.tree)
        positions, sequences = self.cells.place_tree(tree, first)
        return self._context.run(hidden, positions, sequences)

    def draft(self, tree: TokenTree, first: int) -> HostLogits:
        """Return the lower layers' logits for a draft tree, starting at the node `first`."""
        return self._run(tree, first, self._lower.draft)

    def commit(self, path: tuple[int, ...]) -> None:
        self._check(0)
        self.cells.commit(path)
        self._lower.commit(path)

    def _cut(self, length: int) -> None:
        self._lower.end_round()
        super()._cut(length)

    def _end_round(self) -> None:
        self._lower.end_round()
        self.cells.end_round()

    def _low_bit_view(self, method: LowBit) -> SelfDraftView[Any]:
        return load_low_bit_view(self, method)

    def _early_exit_view(self, exit_layer: int) -> SelfDraftView[Any]:
        self.check_can_draft(EarlyExit.method)
        if exit_layer != self.exit_layer:
            raise CapabilityError(
                f"{self.facts.name} was loaded for exit layer {self.exit_layer}, not {exit_layer}",
                f"run `edgespec prepare layerskip --exit {exit_layer}` for this model",
                code="early_exit_not_supported",
            )
        return EarlyExitView(self)


class EarlyExitView(SelfDraftView[LayerSkipModel]):
    """A draft model that runs the lower layers of its target and shares the target's KV cache."""

    def __init__(self, target: LayerSkipModel) -> None:
        super().__init__(target)
        self.vocabulary = target.vocabulary
        name = f"{target.facts.name}, first {target.exit_layer} layers"
        self.facts = replace(target.facts, name=name, weight_bytes=0, kv_bytes=0)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        return self._target.draft(tree, first)

    def interrupt(self, enabled: bool) -> None:
        self._target.interrupt(enabled)


class LowerSplit:
    """Runs a model's lower layers, and keeps the hidden states of drafted tokens for verification."""

    def __init__(
        self, context: LlamaContext, hook: HiddenStateHook, exit_name: str, max_branches: int
    ) -> None:
        self.context = context
        self.cells = KvCells(context, max_branches)
        self._hook = hook
        self._exit_name = exit_name
        self._max_branches = max_branches
        self._reset()

    def _reset(self) -> None:
        self._tree = TreeBuilder()
        # For each node of the token tree to verify, its index in `self._tree`.
        self._nodes: list[int] = []
        self._hidden: list[NDArray[np.float32]] = []

    def end_round(self) -> None:
        """Discard the KV cells and hidden states of uncommitted tokens."""
        self.cells.end_round()
        self._reset()

    def append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the KV cache and return their hidden states, float32 [tokens, embedding size]."""
        count, length = len(tokens), self.cells.length
        hidden = self._run(tokens, range(length, length + count), [(0,)] * count)
        self.cells.length += count
        return hidden

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        parts = []
        for rows in self._split_rows(len(tokens)):
            self.context.run_to_hook(tokens[rows], positions[rows], sequences[rows])
            parts.append(self._hook.take(self._exit_name, len(tokens[rows])))
        return np.concatenate(parts)

    def _split_rows(self, count: int) -> list[slice]:
        """Divide `count` tokens into slices that each fit in one forward pass."""
        step = self.context.max_width
        return [slice(start, start + step) for start in range(0, count, step)]

    def draft(self, tree: TokenTree, first: int) -> NDArray[np.float32]:
        """Run a draft tree, starting at the node `first`, and return the logits of its tokens."""
        if first == 0:
            self.end_round()
        positions, sequences = self.cells.place_tree(tree, first)
        self._tree.extend(tree, first)
        tokens, parts = tree.tokens[first:], []
        for rows in self._split_rows(len(tokens)):
            logits = self.context.run(tokens[rows], positions[rows], sequences[rows])
            self._hidden += list(self._hook.take(self._exit_name, len(logits)))
            parts.append(logits if len(logits) == len(tokens) else logits.copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def hidden_of(self, tree: TokenTree, first: int, *, can_branch: bool) -> NDArray[np.float32]:
        """Return the hidden states of a tree to be verified, starting at the node `first`.

        Tokens that were already run, by drafting or an earlier call, are not rerun.

        Args:
            tree: The tree to be verified.
            first: The first node whose hidden state to return.
            can_branch: Whether drafted tokens may stay in the KV cache next to other tokens to verify. If
                attention rounds differently in trees, such a branch would change the hidden states.

        Returns:
            The hidden states as a float32 array [nodes, embedding size].
        """
        if first == 0:
            self._nodes = []
            if self._tree.tokens[:1] != [tree.tokens[0]]:
                self.end_round()
        done = len(self._tree)
        self._map_nodes(tree, first)
        whole = self._tree.build()
        if first == 0 and done and not (self._fits(whole) and (can_branch or whole.is_chain)):
            # Discard the draft, because the drafted tokens and the tokens to verify cannot be in the KV cache
            # at the same time.
            self.end_round()
            return self.hidden_of(tree, 0, can_branch=can_branch)
        if whole.width > done:
            positions, sequences = self.cells.place_tree(whole, done)
            self._hidden += list(self._run(whole.tokens[done:], positions, sequences))
        return np.stack([self._hidden[node] for node in self._nodes[first:]])

    def _map_nodes(self, tree: TokenTree, first: int) -> None:
        for node in range(first, tree.width):
            parent = self._nodes[tree.parents[node]] if node else -1
            self._nodes.append(self._tree.add_path(parent, tree.tokens[node : node + 1]))

    def _fits(self, tree: TokenTree) -> bool:
        room = self.context.tokens - self.cells.length
        return tree.width <= room and tree.leaf_count <= self._max_branches

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the KV cells of the verified tree's root and the nodes in `path`, and discard all others."""
        self.cells.commit(tuple(self._nodes[node] for node in path))
        self._reset()


def _check_supported(weights: Any, name: str) -> None:
    reason = ""
    if has_state(weights):
        reason = "its recurrent state cannot be rolled back"
    elif library().llama_model_rope_type(weights) not in _SINGLE_POSITION_ROPES:
        reason = "each of its tokens has more than one position"
    if reason:
        raise ModelFileError(
            f"{name} does not support layerskip: {reason}",
            "load the original model file",
            code="model_file_not_supported",
        )


def hidden_states(
    path: str, name: str, tokens: Sequence[int], options: LoadOptions, progress: Progress | None = None
) -> NDArray[np.float32]:
    """Load a model, run `tokens`, and return the hidden states after each layer.

    Returns:
        The hidden states as a float32 array [layers, tokens, embedding size].

    Raises:
        BackendError: llama.cpp does not expose the layer outputs of this architecture.
        EdgespecError: The model cannot be loaded. See `edgespec.backends.llamacpp.load`.
    """
    lib = library()
    weights = load_weights(path, name, options, progress)
    try:
        names = [layer_output(layer) for layer in range(lib.llama_model_n_layer(weights))]
        hook = HiddenStateHook(names, lib.llama_model_n_embd(weights))
        threads = threads_for(weights, options)
        context = LlamaContext(weights, options, plan_context(weights, options), threads, hook=hook)
        try:
            parts = []
            for start in range(0, len(tokens), context.max_width):
                chunk = tokens[start : start + context.max_width]
                context.run(chunk, range(start, start + len(chunk)), [(0,)] * len(chunk))
                parts.append(np.stack([hook.take(name, len(chunk)) for name in names]))
            return np.concatenate(parts, axis=1)
        finally:
            context.close()
    finally:
        lib.llama_model_free(weights)
