"""Estimate how much memory a GGUF model needs, without loading its weights.

The estimate uses the buffer sizes that llama.cpp logs when it creates a context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.context import MAX_WIDTH, ContextPlan, LlamaContext
from edgespec.backends.llamacpp.context_planning import (
    UNDO_TOKENS,
    States,
    choose_context,
    choose_split_contexts,
    remembers_by_state,
    split_load_options,
)
from edgespec.backends.llamacpp.device_split import device_split
from edgespec.backends.llamacpp.devices import has_own_memory, on_cpu
from edgespec.backends.llamacpp.kv_types import KvTypes
from edgespec.backends.llamacpp.layerskip_files import PARTS, SHARED_BYTES_KEY
from edgespec.backends.llamacpp.loading import load_skeleton, repacks_weights
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.backends.llamacpp.resizing import longrope_switch_tokens
from edgespec.backends.memory_estimate import GPU, MemoryEstimate, MemoryPart
from edgespec.heap import release_free_memory

__all__ = ["ContextBuffers", "GgufMemoryEstimator", "SplitModelMemoryEstimator", "parse_buffers", "simulate"]

_F16 = KvTypes("f16", "f16")
_CACHE = re.compile(r"size = *([\d.]+) MiB \( *\d+ cells")
_STATES = re.compile(r"size = *([\d.]+) MiB \( *\d+ cells.*\), R \(")
_COMPUTE = re.compile(r": +(\S+) compute buffer size = *([\d.]+) MiB")
# The size of the context that is created to measure the bytes per token. llama.cpp rounds logged sizes to
# 0.01 MiB, which is less than 1 byte per token for a context of this size.
_MEASURED_TOKENS = 32768
# The maximum size of a simulated context. The buffers of longer contexts are assumed to be proportional to
# it, because simulating them would need tens of MiB of memory.
_MAX_SIMULATED_TOKENS = 2**18
# The memory of a vocabulary in bytes per token, for its text, its merge rule, the map from text to id and
# Python's tables. Measured with the vocabularies in llama.cpp's test suite.
_TOKEN_BYTES = 300


class ContextBuffers(NamedTuple):
    """The buffer sizes that llama.cpp logged when it created a context.

    Attributes:
        cache_bytes: The total size of KV caches and recurrent states.
        compute: The name of each compute buffer, such as `CPU` or `CUDA0`, and its size in bytes.
    """

    cache_bytes: int
    compute: tuple[tuple[str, int], ...]

    @property
    def compute_bytes(self) -> int:
        """The total size of the compute buffers."""
        return sum(size for _, size in self.compute)


def parse_buffers(lines: Sequence[str]) -> ContextBuffers:
    """Parse the buffer sizes from the lines that llama.cpp logged when it created a context."""
    compute = tuple((match[1], _mib(match[2])) for line in lines if (match := _COMPUTE.search(line)))
    return ContextBuffers(_sum_of(_CACHE, lines), compute)


def _sum_of(size: re.Pattern[str], lines: Sequence[str]) -> int:
    return sum(_mib(match[1]) for line in lines if (match := size.search(line)))


def _mib(text: str) -> int:
    return round(float(text) * 2**20)


def simulate(weights: Any, plan: ContextPlan, options: LoadOptions, **context_options: Any) -> ContextBuffers:
    """Create a context for a model without weight data and return the sizes of its buffers."""
    with captured_log() as lines:
        LlamaContext(weights, options, plan, 1, **context_options).close()
        return parse_buffers(lines)


class GgufMemoryEstimator:
    """Estimates the memory that a GGUF model needs.

    llama.cpp assigns layers to devices when it opens a file, so a change of `gpu_layers` reopens the file.

    Raises:
        ModelFileError: The file cannot be loaded.
    """

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        self._path = path
        self._gpu_layers: int | None = None
        self._weights = load_skeleton(path, name, None)
        self.trained_context_tokens: int = library().llama_model_n_ctx_train(self._weights)
        self.longrope_switch_tokens: int = longrope_switch_tokens(self._weights)
        self.layers: int = library().llama_model_n_layer(self._weights) if has_own_memory() else 0
        self._states: States | None = None
        # Buffers of the longest simulated context, by the options that affect them.
        self._longest: dict[tuple[ContextPlan, int, str], ContextBuffers] = {}

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """See `MemoryEstimator`."""
        if self.layers and options.gpu_layers != self._gpu_layers:
            self._reopen(options.gpu_layers)
        weights = self._weights
        if remembers_by_state(weights) and self._states is None:
            self._states = _simulate_states(weights, options)
        plan = choose_context(weights, options, self._states)
        buffers = self._buffers(plan, options)
        gpu_weights, gpu_cache_share, doubled = device_split(self._path, self.layers, options.gpu_layers)
        gpu_cache = round(buffers.cache_bytes * gpu_cache_share)
        gpu_compute = sum(size for buffer, size in buffers.compute if self.layers and _is_on_gpu(buffer))
        compute = buffers.compute_bytes + _attention_bytes(weights, plan, options)
        weight_bytes = library().llama_model_size(weights) + doubled
        logits_bytes = _logits_bytes(weights, min(plan.rows, options.batch_tokens))
        parts = (
            MemoryPart("weights", weight_bytes - gpu_weights),
            MemoryPart("weights", gpu_weights, GPU),
            MemoryPart("cache", buffers.cache_bytes - gpu_cache),
            MemoryPart("cache", gpu_cache, GPU),
            MemoryPart("compute", compute - gpu_compute),
            MemoryPart("compute", gpu_compute, GPU),
            MemoryPart("output", logits_bytes),
            MemoryPart("vocabulary", _vocabulary_size(weights) * _TOKEN_BYTES),
        )
        return MemoryEstimate(plan.tokens, plan.kv_types.text, tuple(part for part in parts if part.bytes))

    def _buffers(self, plan: ContextPlan, options: LoadOptions) -> ContextBuffers:
        """Simulate the context, or scale the buffers of the longest simulated one if it is longer."""
        if plan.tokens <= _MAX_SIMULATED_TOKENS:
            return simulate(self._weights, plan, options)
        longest = replace(plan, tokens=_MAX_SIMULATED_TOKENS, kv_bytes=0)
        key = longest, options.batch_tokens, options.flash_attention
        if key not in self._longest:
            self._longest[key] = simulate(self._weights, longest, options)
        cache_bytes, compute = self._longest[key]
        scale = Fraction(plan.tokens, _MAX_SIMULATED_TOKENS)
        return ContextBuffers(
            int(cache_bytes * scale), tuple((name, int(size * scale)) for name, size in compute)
        )

    def _reopen(self, gpu_layers: int | None) -> None:
        self.close()
        self._weights = load_skeleton(self._path, self.name, gpu_layers)
        self._gpu_layers = gpu_layers
        self._longest.clear()

    def close(self) -> None:
        """See `MemoryEstimator`."""
        if self._weights:
            library().llama_model_free(self._weights)
            self._weights = None
            release_free_memory()


class SplitModelMemoryEstimator:
    """Estimates the memory that a split GGUF model needs. Its two parts share some of their weights.

    Raises:
        ModelFileError: A file in the folder cannot be loaded.
    """

    layers = 0

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self._parts: list[Any] = []
        try:
            paths = [[str(Path(folder) / file) for file in files] for files in PARTS]
            for files in paths:  # If a later part cannot be opened, `close` must free the earlier ones.
                self._parts.append(load_skeleton(files, name, None))
            self._can_share = not any(repacks_weights(files, None) for files in paths)
        except BaseException:
            self.close()
            raise
        self.trained_context_tokens: int = library().llama_model_n_ctx_train(self._parts[0])
        self.longrope_switch_tokens: int = longrope_switch_tokens(self._parts[0])

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """See `MemoryEstimator`."""
        lower, upper = self._parts
        plans = choose_split_contexts(lower, upper, options)
        part_options = split_load_options(lower, options)
        buffers = [
            simulate(lower, plans[0], part_options[0]),
            simulate(upper, plans[1], part_options[1], takes_hidden=True),
        ]
        weight_bytes = sum(library().llama_model_size(weights) for weights in self._parts)
        if self._can_share and options.mmap and not options.mlock:
            weight_bytes -= int(metadata(lower, SHARED_BYTES_KEY) or 0)
        compute_bytes = sum(
            found.compute_bytes + _attention_bytes(*part)
            for found, *part in zip(buffers, self._parts, plans, part_options, strict=True)
        )
        logits_bytes = sum(_logits_bytes(lower, each.batch_tokens) for each in part_options)
        parts = (
            MemoryPart("weights", weight_bytes),
            MemoryPart("cache", sum(each.cache_bytes for each in buffers)),
            MemoryPart("compute", compute_bytes),
            MemoryPart("output", logits_bytes),
            MemoryPart("vocabulary", 2 * _vocabulary_size(lower) * _TOKEN_BYTES),
        )
        return MemoryEstimate(plans[0].tokens, plans[0].kv_types.text, parts)

    def close(self) -> None:
        """See `MemoryEstimator`."""
        while self._parts:
            library().llama_model_free(self._parts.pop())
        release_free_memory()


def _simulate_states(weights: Any, options: LoadOptions) -> States:
    """Return the sizes of the recurrent states, measured without loading the weights."""
    plan = ContextPlan(_MEASURED_TOKENS, _F16, 1, undo_tokens=UNDO_TOKENS)
    with captured_log() as lines:
        context = LlamaContext(weights, replace(options, batch_tokens=64), plan, 1)
        context.close()
    states = _sum_of(_STATES, lines)
    kv_bytes = parse_buffers(lines).cache_bytes - states
    keeps_earlier = context.undo_tokens > 0 and not context.window
    return States(states // (1 + context.undo_tokens), kv_bytes // _MEASURED_TOKENS, keeps_earlier)


def _is_on_gpu(buffer: str) -> bool:
    """Return whether a buffer is in GPU memory, such as `CUDA0`, unlike `CPU` and `CUDA_Host`."""
    return not (buffer.startswith("CPU") or buffer.endswith("_Host"))


def _attention_bytes(weights: Any, plan: ContextPlan, options: LoadOptions) -> int:
    """Return the bytes for the f16 attention matrix of the largest pass, or 0 if it is not allocated.

    Only the CPU backend allocates this matrix, and only without flash attention.
    """
    lib = library()
    if options.flash_attention != "off" or plan.kv_types.values == "f32" or not on_cpu(options):
        return 0
    if lib.llama_model_is_recurrent(weights):
        return 0
    arch = metadata(weights, "general.architecture") or ""
    # If the number of heads differs between layers, the metadata contains a list.
    heads = re.findall(r"\d+", metadata(weights, f"{arch}.attention.head_count") or "")
    return min(options.batch_tokens, plan.tokens) * plan.tokens * max(map(int, heads), default=0) * 2


def _logits_bytes(weights: Any, batch_tokens: int) -> int:
    return min(MAX_WIDTH, batch_tokens) * _vocabulary_size(weights) * 4


def _vocabulary_size(weights: Any) -> int:
    lib = library()
    return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights)))
