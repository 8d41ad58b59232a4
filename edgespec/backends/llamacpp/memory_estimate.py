"""What a GGUF model takes in memory: llama.cpp sets all up without taking it, and says how large it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.computing import converted_bytes, logits_bytes, unused_bytes
from edgespec.backends.llamacpp.context import ContextPlan, LlamaContext
from edgespec.backends.llamacpp.context_planning import (
    UNDO_TOKENS,
    States,
    choose_context,
    choose_split_contexts,
    remembers_by_state,
    split_load_options,
)
from edgespec.backends.llamacpp.device_split import device_split
from edgespec.backends.llamacpp.devices import has_own_memory
from edgespec.backends.llamacpp.kv_types import KvTypes
from edgespec.backends.llamacpp.layerskip_files import PARTS, SHARED_BYTES_KEY
from edgespec.backends.llamacpp.loading import load_skeleton, repacks_weights
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.backends.llamacpp.resizing import longrope_switch_tokens
from edgespec.backends.memory_estimate import DEVICE, MEMORY, MemoryEstimate, Part, PartKind, Pool
from edgespec.heap import address_space_is_limited, release_free_memory

__all__ = ["Buffers", "GgufMemoryEstimator", "SplitModelMemoryEstimator", "buffers_in", "simulated"]

_F16 = KvTypes("f16", "f16")
_CACHE = re.compile(r"size = *([\d.]+) MiB \( *(\d+) cells")
_STATES = re.compile(r"size = *([\d.]+) MiB \( *\d+ cells.*\), R \(")
_COMPUTE = re.compile(r": +(\S+) compute buffer size = *([\d.]+) MiB")
_NODES = re.compile(r"max_nodes = (\d+)")
# The library rounds to hundredths of a MiB: of so many tokens a size is known to a byte a token.
_MANY_TOKENS = 32768
_LONG_TOKENS = 2**18
_FEW_STATES_BYTES, _MANY_STATES = 2**20, 64
# What llama.cpp notes of a cell: position, place in an image, shift, sequences; and a node in the set of
# those used, and in that of each sequence that holds it (llama-kv-cells.h).
_NODE_OF_SET_BYTES = 48
_CELL_BYTES = 4 + 12 + 4 + 32 + 2 * _NODE_OF_SET_BYTES
# Checkpoints of a text that was read share its cells: put together, so many times the whole text at most
# (of four that are spread as `ReplayModel` spreads them).
_CHECKPOINTS_SHARE = 3
# Weights for which processors hold tiles (ggml-cpu/tiled), but for those that they arrange anew.
_TILED = re.compile(r"- type +(q\d_K|iq[123]\w+|iq4_xs): +(\d+) tensors")
_REPACKED = "_REPACK model buffer"
# Graphs are kept: of what is reserved, of passes with logits and of others (llama-context.h, gf_res_*).
# A node takes a tensor and its header, and places among the nodes and the leaves; a place in the set of
# them takes its key, a count and a bit. Each graph has the model's settings three times (llama_hparams).
_GRAPHS, _NODE_BYTES, _PLACE_BYTES, _GRAPH_BYTES = 3, 368 + 16, 12 + 1 / 8, 3 * 36 * 2**10
# Of a node where it is computed, and where what it reads and gives lies (ggml_backend_sched, ggml_gallocr);
# and what the library notes of a context, its batches and its model.
_SCHEDULED_BYTES, _NOTES_BYTES = 20 + 100, 256 * 2**10
# Of what is kept for passes between several devices addresses are taken, and next to nothing is written to:
# of each node 30 inputs of a split, twice (GGML_SCHED_MAX_SPLIT_INPUTS), as tensors and as four numbers.
_SPLIT_BYTES = 60 * (336 + 4 * 4)
# A token as text, its number by its text, and a few numbers of each in Python; and two tokens that are put
# together to one: measured over the vocabularies that llama.cpp is tested with.
_TOKEN_BYTES, _MERGE_BYTES = 148 + 44, 112
_MERGES = re.compile(r"tokenizer\.ggml\.merges +arr\[str,(\d+)\]")


@dataclass(frozen=True, slots=True)
class Buffers:
    """What llama.cpp said of a context while it made one.

    cells: places for tokens, of all its caches. compute: by the name of the buffer's kind. nodes: of a graph.
    """

    cache_bytes: int
    cells: int
    compute: tuple[tuple[str, int], ...]
    nodes: int

    @property
    def graph_bytes(self) -> int:
        """What is noted of the passes it makes, and where addresses count, what nothing is written to."""
        places = 1 << (2 * self.nodes - 1).bit_length()
        graph = self.nodes * _NODE_BYTES + int(places * _PLACE_BYTES) + _GRAPH_BYTES
        split = self.nodes * _SPLIT_BYTES if address_space_is_limited() else 0
        return _GRAPHS * graph + self.nodes * _SCHEDULED_BYTES + _NOTES_BYTES + split


@dataclass(frozen=True, slots=True)
class _Said:
    """What the library says of a model when it opens it.

    tiled: how many of its tensors are of a type for which tiles are held. merges: of its vocabulary.
    """

    tiled: int
    merges: int


def buffers_in(lines: Sequence[str]) -> Buffers:
    """The sizes in what the library logged of one context."""
    caches = [found for line in lines if (found := _CACHE.search(line))]
    compute = tuple((found[1], _mib(found[2])) for line in lines if (found := _COMPUTE.search(line)))
    nodes = max((int(found[1]) for line in lines if (found := _NODES.search(line))), default=0)
    cells = sum(int(found[2]) for found in caches)
    return Buffers(sum(_mib(found[1]) for found in caches), cells, compute, nodes)


def _mib(text: str) -> int:
    return round(float(text) * 2**20)


class GgufMemoryEstimator:
    """The metadata of a GGUF model. Raises ModelFileError, as loading it would.

    Which layers are where depends on `gpu_layers`, so it is opened anew for another number of those.
    """

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        self._path = path
        self._gpu_layers: int | None = None
        self._weights, self._said = _opened(path, name, None)
        self.trained_context_tokens: int = library().llama_model_n_ctx_train(self._weights)
        self.longrope_switch_tokens: int = longrope_switch_tokens(self._weights)
        own = has_own_memory()
        self.layers: int = library().llama_model_n_layer(self._weights) if own else 0
        self._states: States | None = None
        # What long contexts are told from, by what they are made of: asked for again and again.
        self._long: dict[tuple[ContextPlan, int, str], tuple[Buffers, Buffers]] = {}

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """See `MemoryEstimator`."""
        if self.layers and options.gpu_layers != self._gpu_layers:
            self._open(options.gpu_layers)
        weights = self._weights
        if remembers_by_state(weights) and self._states is None:
            self._states = _simulated_states(weights, options)
        plan = choose_context(weights, options, self._states)
        buffers = self._buffers(plan, options)
        lib = library()
        size: int = lib.llama_model_size(weights)
        weights_there, cache_there, twice = device_split(self._path, self.layers, options.gpu_layers)
        converted = converted_bytes(weights, plan, options, tiled=self._said.tiled)
        compute: Counter[Pool] = Counter({MEMORY: converted})
        for kind, bytes_ in buffers.compute:
            compute[_pool(kind) if self.layers else MEMORY] += bytes_
        held = _CHECKPOINTS_SHARE * _NODE_OF_SET_BYTES if plan.recurrent else 0
        compute[MEMORY] -= unused_bytes(weights, plan, options)
        parts = (
            *_split("weights", size + twice, weights_there),
            *_split("cache", buffers.cache_bytes, round(buffers.cache_bytes * cache_there)),
            Part("cells", buffers.cells * (_CELL_BYTES + held)),
            *(Part("compute", bytes_, pool) for pool, bytes_ in compute.items()),
            Part("graphs", buffers.graph_bytes),
            Part("output", logits_bytes(weights, min(plan.rows, options.batch_tokens))),
            Part("vocabulary", _vocabulary_bytes(weights, self._said)),
        )
        return MemoryEstimate(plan.tokens, plan.kv_types.text, parts)

    def _buffers(self, plan: ContextPlan, options: LoadOptions) -> Buffers:
        """`simulated`, and for contexts whose bookkeeping alone would fill the memory, what it grows to."""
        if plan.tokens <= _LONG_TOKENS:
            return simulated(self._weights, plan, options)
        asked = replace(plan, tokens=_LONG_TOKENS, kv_bytes=0), options.batch_tokens, options.flash_attention
        if asked not in self._long:
            half, whole = (
                simulated(self._weights, replace(plan, tokens=tokens), options)
                for tokens in (_LONG_TOKENS // 2, _LONG_TOKENS)
            )
            self._long[asked] = half, whole
        return _grown(*self._long[asked], plan.tokens)

    def _open(self, gpu_layers: int | None) -> None:
        self.close()
        self._weights, self._said = _opened(self._path, self.name, gpu_layers)
        self._gpu_layers = gpu_layers
        self._long.clear()

    def close(self) -> None:
        """See `MemoryEstimator`."""
        if self._weights:
            library().llama_model_free(self._weights)
            self._weights = None
            release_free_memory()  # metadata that was looked at is large


class SplitModelMemoryEstimator:
    """The metadata of a GGUF model that was prepared for early exit: two models on one set of weights.

    Raises ModelFileError.
    """

    layers = 0

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self._halves: list[Any] = []
        self._said: list[_Said] = []
        try:
            paths = [[str(Path(folder) / file) for file in files] for files in PARTS]
            for half in paths:
                weights, told = _opened(half, name, None)
                self._halves.append(weights)
                self._said.append(told)
            self._maps = not any(repacks_weights(half, None) for half in paths)
        except BaseException:
            self.close()
            raise
        self.trained_context_tokens: int = library().llama_model_n_ctx_train(self._halves[0])
        self.longrope_switch_tokens: int = longrope_switch_tokens(self._halves[0])

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """See `MemoryEstimator`."""
        lower, upper = self._halves
        plans = choose_split_contexts(lower, upper, options)
        first, second = split_load_options(lower, options)
        buffers = [
            simulated(lower, plans[0], first),
            simulated(upper, plans[1], second, takes_hidden=True),
        ]
        weight_bytes = sum(library().llama_model_size(half) for half in self._halves)
        if self._maps and options.mmap and not options.mlock:
            weight_bytes -= int(metadata(lower, SHARED_BYTES_KEY) or 0)
        converted = sum(
            converted_bytes(half, plan, how, tiled=told.tiled)
            for half, plan, how, told in zip(self._halves, plans, (first, second), self._said, strict=True)
        )
        compute = converted + sum(bytes_ for each in buffers for _, bytes_ in each.compute)
        # The upper half is given hidden states, of which there is a batch as large as what it does not use.
        compute -= unused_bytes(lower, plans[0], first)
        logits = logits_bytes(lower, first.batch_tokens) + logits_bytes(upper, second.batch_tokens)
        parts = (
            Part("weights", weight_bytes),
            Part("cache", sum(each.cache_bytes for each in buffers)),
            Part("cells", sum(each.cells for each in buffers) * _CELL_BYTES),
            Part("compute", compute),
            Part("graphs", sum(each.graph_bytes for each in buffers)),
            Part("output", logits),
            Part("vocabulary", sum(map(_vocabulary_bytes, self._halves, self._said))),
        )
        return MemoryEstimate(plans[0].tokens, plans[0].kv_types.text, parts)

    def close(self) -> None:
        """See `MemoryEstimator`."""
        while self._halves:
            library().llama_model_free(self._halves.pop())
        release_free_memory()


def _opened(paths: str | Sequence[str], name: str, gpu_layers: int | None) -> tuple[Any, _Said]:
    """See `load_skeleton`."""
    with captured_log() as lines:
        weights = load_skeleton(paths, name, gpu_layers)
    merges = max((int(found[1]) for line in lines if (found := _MERGES.search(line))), default=0)
    tensors = {found[1]: int(found[2]) for line in lines if (found := _TILED.search(line))}
    if any(_REPACKED in line for line in lines):
        tensors.pop("q4_K", None)
    return weights, _Said(sum(tensors.values()), merges)


def _grown(half: Buffers, whole: Buffers, tokens: int) -> Buffers:
    """What contexts of half and all of `_LONG_TOKENS` grow to."""

    def grown(first: int, second: int) -> int:
        return second + (second - first) * (tokens - _LONG_TOKENS) // (_LONG_TOKENS // 2)

    pairs = zip(half.compute, whole.compute, strict=True)
    return Buffers(
        grown(half.cache_bytes, whole.cache_bytes),
        grown(half.cells, whole.cells),
        tuple((kind, grown(first, second)) for (kind, first), (_, second) in pairs),
        whole.nodes,
    )


def simulated(weights: Any, plan: ContextPlan, options: LoadOptions, **how: Any) -> Buffers:
    """What a context of weights that are not there would take."""
    with captured_log() as lines:
        LlamaContext(weights, options, plan, 1, **how).close()
        return buffers_in(lines)


def _simulated_states(weights: Any, options: LoadOptions) -> States:
    """As `sizing` measures them on real weights. States are made even where nothing else is."""

    def look(sequences: int) -> tuple[int, int, LlamaContext]:
        plan = ContextPlan(_MANY_TOKENS, _F16, sequences, undo_tokens=UNDO_TOKENS)
        with captured_log() as lines:
            context = LlamaContext(weights, replace(options, batch_tokens=64), plan, 1)
            context.close()
        states = sum(_mib(found[1]) for line in lines if (found := _STATES.search(line)))
        return states, buffers_in(lines).cache_bytes - states, context

    states, keys_values, context = look(1)
    rows = 1 + context.undo_tokens
    if states < _FEW_STATES_BYTES:  # too small to be told exactly from one
        states = look(_MANY_STATES)[0] // _MANY_STATES
    return States(states // rows, keys_values // _MANY_TOKENS, context.undo_tokens > 0 and not context.window)


def _split(kind: PartKind, size: int, there: int) -> tuple[Part, ...]:
    parts = (Part(kind, size - there), Part(kind, there, DEVICE))
    return tuple(part for part in parts if part.bytes) or parts[:1]


def _pool(buffer: str) -> Pool:
    """Where a buffer of that kind lies: `CUDA0` on the card, `CPU` and `CUDA_Host` not."""
    return MEMORY if buffer.startswith("CPU") or buffer.endswith("_Host") else DEVICE


def _vocabulary_bytes(weights: Any, said: _Said) -> int:
    return _tokens(weights) * _TOKEN_BYTES + said.merges * _MERGE_BYTES


def _tokens(weights: Any) -> int:
    lib = library()
    return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights)))
