"""Estimate how much memory a GGUF model needs, without loading its weights.

The estimate uses the buffer sizes that llama.cpp logs when it creates a context.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.llamacpp.context import LlamaContext, adapter_bytes
from edgespec.backends.llamacpp.context_plan import ContextPlan, KvTypes
from edgespec.backends.llamacpp.context_planning import (
    UNDO_TOKENS,
    States,
    choose_context,
    choose_split_contexts,
    logits_bytes,
    longrope_switch_tokens,
    measure_compressed_keys,
    split_load_options,
)
from edgespec.backends.llamacpp.devices import (
    LayerPlacement,
    Paths,
    amx_bytes,
    device_split,
    expert_bytes,
    expert_shares,
    experts_per_part,
    has_own_memory,
    in_main_memory,
    mtp_layer_count,
    offloaded_bytes,
    on_cpu,
    place_layers,
    unusable_bytes,
)
from edgespec.backends.llamacpp.expert_stream import ExpertTable, expert_table
from edgespec.backends.llamacpp.loading import load_skeleton, named_layouts
from edgespec.backends.llamacpp.metadata import (
    architecture_metadata,
    has_compressed_keys,
    has_state,
    metadata,
    vocabulary_size,
)
from edgespec.backends.llamacpp.mtp_files import unloaded_bytes
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.backends.llamacpp.shared_context import check_slots, why_not_shared
from edgespec.backends.llamacpp.weight_layouts import AMX
from edgespec.backends.llamacpp.weight_stream import (
    LayerRanges,
    can_stream,
    choose_streamed,
    saved_bytes,
    streamable_layers,
)
from edgespec.errors import CapabilityError
from edgespec.model.base import LoadOptions
from edgespec.model.formats.layerskip_files import PARTS, SHARED_BYTES_KEY
from edgespec.model.memory_estimate import (
    GPU,
    THIS_MACHINE,
    ExpertReads,
    ExpertShares,
    MachineShare,
    MemoryEstimate,
    MemoryPart,
)
from edgespec.system.heap import release_free_memory

__all__ = ["ContextBuffers", "GgufMemoryEstimator", "parse_buffers", "simulate"]

_F16 = KvTypes("f16", "f16")
_CACHE = re.compile(r"size = *([\d.]+) MiB \( *\d+ cells")
_COMPRESSOR_STATES = re.compile(r"rs_seq = \d+, layers = \d+, size = *([\d.]+) MiB")
_STATES = re.compile(r"size = *([\d.]+) MiB \( *\d+ cells.*\), R \(")
_COMPUTE = re.compile(r": +(\S+) compute buffer size = *([\d.]+) MiB")
# Context length in tokens at which the cache size per token is measured. It is large enough to make rounding
# errors in llama.cpp's log negligible.
_MEASURED_TOKENS = 32768
# Maximum context length, in tokens, for which buffer sizes are measured. For longer contexts, they are
# extrapolated.
_MAX_SIMULATED_TOKENS = 2**18
# Bytes of memory per vocabulary token, for its text, its merge rule and its entries in lookup tables
# (measured with the vocabularies in llama.cpp's test suite).
_TOKEN_BYTES = 300


class ContextBuffers(NamedTuple):
    """The buffer sizes that llama.cpp logged when it created a context.

    Attributes:
        cache_bytes: The total size of KV caches and recurrent states.
        compute: Compute buffer sizes in bytes, keyed by buffer name, such as `CPU` or `CUDA0`.
    """

    cache_bytes: int
    compute: tuple[tuple[str, int], ...]

    @property
    def compute_bytes(self) -> int:
        return sum(size for _, size in self.compute)


def parse_buffers(lines: Sequence[str]) -> ContextBuffers:
    """Parse the buffer sizes from the lines that llama.cpp logged when it created a context."""
    compute = tuple((match[1], _mib(match[2])) for line in lines if (match := _COMPUTE.search(line)))
    return ContextBuffers(_sum_of(_CACHE, lines) + _sum_of(_COMPRESSOR_STATES, lines), compute)


def _sum_of(size: re.Pattern[str], lines: Sequence[str]) -> int:
    return sum(_mib(match[1]) for line in lines if (match := size.search(line)))


def _mib(text: str) -> int:
    return round(float(text) * 2**20)


def simulate(
    weights: Any, plan: ContextPlan, options: LoadOptions, *, takes_hidden: bool = False
) -> ContextBuffers:
    """Create a context for a model whose weights are not loaded, and return its buffer sizes."""
    with captured_log() as lines:
        LlamaContext(weights, options, plan, 1, takes_hidden=takes_hidden).close()
        return parse_buffers(lines)


class GgufMemoryEstimator:
    """Estimates the memory that a GGUF model needs, without loading its weights.

    Args:
        path: The model file, or the folder of a model that was split for LayerSkip.
        name: The model's name.
        split: Whether `path` is the folder of a split model.

    Raises:
        ModelFileError: A file cannot be loaded.
    """

    def __init__(self, path: str, name: str, *, split: bool = False) -> None:
        self.name = name
        self._path, self._split = path, split
        split_files = [[str(Path(path) / file) for file in files] for files in PARTS]
        self._files: list[Paths] = [*split_files] if split else [path]
        self._weights: list[Any] = []
        # The layouts to which llama.cpp converts weights of each part, if it may.
        self._layouts: list[frozenset[str]] = []
        self._open(None, None)
        lib, weights = library(), self._weights[0]
        self.trained_context_tokens: int = lib.llama_model_n_ctx_train(weights)
        self.longrope_switch_tokens: int = longrope_switch_tokens(weights)
        self.why_not_shared = "it was prepared for early exit" if split else why_not_shared(weights)
        self._part_layers = [lib.llama_model_n_layer(part) * has_own_memory() for part in self._weights]
        # llama.cpp counts multi-token prediction layers when it offloads layers, even if they are not loaded.
        mtp_layers = 0 if split else mtp_layer_count(path)
        self.layers: int = max(layers and layers + mtp_layers for layers in self._part_layers)
        self._streamable: list[LayerRanges] | None = None
        self._states: States | None = None
        # Multi-token prediction layers count towards the head's memory, not the model's.
        self._unloaded_bytes = 0 if split else unloaded_bytes(Path(path))

    @property
    def streamable_layers(self) -> int:
        return len(self._streamable_layers())

    def _streamable_layers(self) -> Sequence[LayerRanges]:
        if self._streamable is None:
            # Whether the load options allow streaming is up to the planner.
            can_run = can_stream(gpu_layers=0) and not self._split
            self._streamable = streamable_layers(Path(self._path)) if can_run else []
        return self._streamable

    def expert_reads(self, options: LoadOptions) -> ExpertReads | None:
        table = self._expert_table(options)
        return table.reads(options) if table else None

    def _expert_table(self, options: LoadOptions) -> ExpertTable | None:
        return expert_table(Path(self._path), options) if self._streamable_layers() else None

    def streamed_bytes(self, options: LoadOptions) -> Mapping[int, int]:
        if reads := self.expert_reads(options):
            return reads.layer_bytes
        return {
            layer.layer: layer.size_bytes for layer in choose_streamed(self._streamable_layers(), options)
        }

    def _open(self, gpu_layers: int | None, experts: int | None) -> None:
        self.close()
        self._placement = gpu_layers, experts
        self._longest: dict[tuple[Any, ...], ContextBuffers] = {}
        try:
            for files, count in zip(self._files, experts_per_part(self._files, experts), strict=True):
                with captured_log() as lines:
                    self._weights.append(load_skeleton(files, gpu_layers, count))
                self._layouts.append(named_layouts(lines))
        except BaseException:
            self.close()
            raise

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """Estimate the memory that the model needs with these load options."""
        # A GPU that shares main memory has buffers too, unless the model runs on the CPU.
        can_offload = library().llama_supports_gpu_offload()
        if can_offload and self._placement != (options.gpu_layers, options.experts):
            self._open(options.gpu_layers, options.experts)
        plans, part_options = self._plans(options)
        cache_bytes = compute_bytes = output_bytes = 0
        gpu_weights = gpu_cache = gpu_compute = unusable = doubled = 0
        experts = experts_per_part(self._files, options.experts)
        for part, (weights, plan, each) in enumerate(zip(self._weights, plans, part_options, strict=True)):
            buffers = self._buffers(part, plan, each)
            cache_bytes += buffers.cache_bytes
            on_gpu = device_split(
                self._files[part], self._part_layers[part], options.gpu_layers, experts[part]
            )
            gpu_weights += on_gpu[0]
            gpu_cache += round(buffers.cache_bytes * on_gpu[1])
            doubled += on_gpu[2]
            compute_bytes += buffers.compute_bytes + _attention_bytes(weights, plan, each)
            gpu_compute += sum(size for name, size in buffers.compute if self.layers and _is_on_gpu(name))
            unusable += self._unusable_bytes(part, options.gpu_layers, experts[part], buffers)
            logits = logits_bytes(weights, min(plan.rows, each.batch_tokens))
            # Count logits twice for concurrent replies, which copy them after a shared pass.
            output_bytes += logits if plan.slots == 1 else 2 * logits
        if options.workers is not None:
            return self._estimate_local(options, plans[0], cache_bytes, compute_bytes, output_bytes)
        weight_bytes = sum(map(library().llama_model_size, self._weights)) + doubled - self._unloaded_bytes
        weight_bytes += adapter_bytes(options.adapters)
        if options.streamed_layers:
            table = self._expert_table(options)
            streamed = choose_streamed(self._streamable_layers(), options)
            weight_bytes -= table.saved_bytes(options) if table else saved_bytes(streamed)
        weight_bytes += self._repacked_bytes(options)
        parts = (
            MemoryPart("weights", weight_bytes - gpu_weights),
            MemoryPart("weights", gpu_weights, GPU),
            MemoryPart("cache", cache_bytes - gpu_cache + sum(plan.checkpoint_bytes for plan in plans)),
            MemoryPart("cache", gpu_cache, GPU),
            MemoryPart("compute", compute_bytes - gpu_compute),
            MemoryPart("compute", gpu_compute, GPU),
            MemoryPart("unusable", unusable, GPU),
            MemoryPart("output", output_bytes),
            MemoryPart("vocabulary", sum(map(vocabulary_size, self._weights)) * _TOKEN_BYTES),
        )
        present = tuple(part for part in parts if part.bytes)
        return MemoryEstimate(
            plans[0].share.tokens,
            plans[0].kv_types.text,
            present,
            experts=self._expert_shares(options, experts),
            why_experts_stay=self._why_experts_stay(options),
        )

    def _repacked_bytes(self, options: LoadOptions) -> int:
        """Return how many bytes repacking the weights for this CPU adds, or saves if the number is negative.

        The two parts of a split model share weights only if llama.cpp memory-maps the files instead of
        repacking the weights.
        """
        # Weights that are read from disk in every pass stay as they are in the file.
        if not options.repack or options.streamed_layers or not any(self._layouts):
            maps = self._split and options.mmap and not options.mlock and in_main_memory(options)
            return -int(metadata(self._weights[0], SHARED_BYTES_KEY) or 0) if maps else 0
        return sum(
            amx_bytes(files, layers, options.gpu_layers, own_head=options.own_head)
            for files, layers, layouts in zip(self._files, self._part_layers, self._layouts, strict=True)
            if AMX in layouts
        )

    def _unusable_bytes(
        self, part: int, gpu_layers: int | None, experts: int, buffers: ContextBuffers
    ) -> int:
        """Return how much memory of several GPUs a part of the model cannot use. See `unusable_bytes`."""
        layers = self._part_layers[part]
        *sizes, output = offloaded_bytes(self._files[part], layers, gpu_layers, experts) or [0]
        cache_bytes = buffers.cache_bytes // max(1, layers)
        # Multi-token prediction layers, whose size is 0 here, do not use this cache.
        with_cache = [size + cache_bytes if size else 0 for size in sizes]
        return unusable_bytes([*with_cache, output], dict(buffers.compute))

    def _expert_shares(self, options: LoadOptions, in_memory: Sequence[int]) -> ExpertShares | None:
        shares = [
            expert_shares(files, layers, options.gpu_layers, count)
            for files, layers, count in zip(self._files, self._part_layers, in_memory, strict=True)
        ]
        layers = sum(share.layers for share in shares)
        if not layers:
            return None
        return ExpertShares(
            layers,
            sum(share.layers_in_memory for share in shares),
            sum(share.memory_bytes for share in shares),
            sum(share.gpu_bytes for share in shares),
        )

    def _why_experts_stay(self, options: LoadOptions) -> str:
        if options.experts is None:
            return ""
        if not any(map(expert_bytes, self._files)):
            return f"{self.name} has no experts"
        if options.streamed_layers:
            return "a model that is larger than memory runs on the CPU only"
        if options.gpu_layers == 0:
            return "--gpu-layers 0 runs the model on the CPU only"
        return "llama.cpp cannot use a GPU on this machine" if not self.layers and on_cpu(options) else ""

    def _estimate_local(
        self, options: LoadOptions, plan: ContextPlan, cache_bytes: int, compute_bytes: int, output_bytes: int
    ) -> MemoryEstimate:
        """Estimate the memory that the model needs on this machine when its layers are on workers."""
        weights = self._weights[0]
        if plan.recurrent:
            raise CapabilityError(
                f"{self.name} has recurrent layers, which workers do not support",
                "omit --workers",
                code="workers_not_supported",
            )
        placed, without_logits = self._place(options, plan, cache_bytes, compute_bytes)
        here = MachineShare(
            THIS_MACHINE,
            placed.local,
            library().llama_model_size(weights) - self._unloaded_bytes - placed.remote_weight_bytes,
            cache_bytes - min(cache_bytes, placed.remote_cache_bytes),
            without_logits if placed.has_remote_output else compute_bytes,
            placed.local_fraction,
            has_output=not placed.has_remote_output,
        )
        parts = (
            MemoryPart("weights", here.weight_bytes),
            MemoryPart("cache", here.cache_bytes),
            MemoryPart("compute", here.compute_bytes),
            MemoryPart("output", output_bytes),
            MemoryPart("vocabulary", vocabulary_size(weights) * _TOKEN_BYTES),
        )
        present = tuple(part for part in parts if part.bytes)
        machines = (here, *placed.workers)
        return MemoryEstimate(plan.share.tokens, plan.kv_types.text, present, machines)

    def placement(self, options: LoadOptions) -> LayerPlacement:
        """Return how the layers would be placed on the workers.

        Raises:
            MemoryBudgetError: The layers do not fit on this machine and the workers.
        """
        plans, part_options = self._plans(options)
        buffers = self._buffers(0, plans[0], part_options[0])
        compute_bytes = buffers.compute_bytes + _attention_bytes(self._weights[0], plans[0], part_options[0])
        return self._place(options, plans[0], buffers.cache_bytes, compute_bytes)[0]

    def _place(
        self, options: LoadOptions, plan: ContextPlan, cache_bytes: int, compute_bytes: int
    ) -> tuple[LayerPlacement, int]:
        """Place the layers. Also return the compute buffer size on a machine without the output layer."""
        # llama.cpp always reserves memory for at least one row of logits per sequence.
        few_rows = self._buffers(0, replace(plan, rows=plan.sequences), options)
        without_logits = few_rows.compute_bytes + _attention_bytes(self._weights[0], plan, options)
        logits_bytes = compute_bytes - without_logits
        placed = place_layers(self._path, self.name, options, cache_bytes, without_logits, logits_bytes)
        return placed, without_logits

    def _plans(self, options: LoadOptions) -> tuple[Sequence[ContextPlan], Sequence[LoadOptions]]:
        if self._split:
            lower, upper = self._weights
            return choose_split_contexts(lower, upper, options), split_load_options(lower, options)
        weights = self._weights[0]
        if has_state(weights) and self._states is None:
            self._states = _simulate_states(weights, options)
        plan = choose_context(weights, options, self._states)
        check_slots(plan, options)
        return [plan], [options]

    def _buffers(self, part: int, plan: ContextPlan, options: LoadOptions) -> ContextBuffers:
        weights, takes_hidden = self._weights[part], part > 0
        if plan.tokens <= _MAX_SIMULATED_TOKENS:
            return simulate(weights, plan, options, takes_hidden=takes_hidden)
        longest = replace(plan, tokens=_MAX_SIMULATED_TOKENS, kv_bytes=0)
        key = part, longest, options.batch_tokens, options.flash_attention
        if key not in self._longest:
            self._longest[key] = simulate(weights, longest, options, takes_hidden=takes_hidden)
        cache_bytes, compute = self._longest[key]
        scale = Fraction(plan.tokens, _MAX_SIMULATED_TOKENS)
        return ContextBuffers(
            int(cache_bytes * scale), tuple((name, int(size * scale)) for name, size in compute)
        )

    def close(self) -> None:
        """Free the model's metadata."""
        self._layouts.clear()
        while self._weights:
            library().llama_model_free(self._weights.pop())
        release_free_memory()


def _simulate_states(weights: Any, options: LoadOptions) -> States:
    if has_compressed_keys(weights):
        return measure_compressed_keys(weights, options)
    plan = ContextPlan(_MEASURED_TOKENS, _F16, 1, undo_tokens=UNDO_TOKENS)
    with captured_log() as lines:
        context = LlamaContext(weights, replace(options, batch_tokens=64), plan, 1)
        context.close()
    states = _sum_of(_STATES, lines)
    kv_bytes = parse_buffers(lines).cache_bytes - states
    keeps_earlier = context.undo_tokens > 0 and not context.window
    return States(states // (1 + context.undo_tokens), kv_bytes // _MEASURED_TOKENS, keeps_earlier)


def _is_on_gpu(buffer: str) -> bool:
    """Return whether a llama.cpp buffer with this name, such as `CUDA0` or `CPU`, is in GPU memory."""
    return not (buffer.startswith("CPU") or buffer.endswith("_Host"))


def _attention_bytes(weights: Any, plan: ContextPlan, options: LoadOptions) -> int:
    """Return the size of the attention matrix that llama.cpp allocates on the CPU without flash attention."""
    lib = library()
    if options.flash_attention != "off" or plan.kv_types.values == "f32" or not on_cpu(options):
        return 0
    if lib.llama_model_is_recurrent(weights):
        return 0
    heads = re.findall(r"\d+", architecture_metadata(weights, "attention.head_count") or "")
    return min(options.batch_tokens, plan.tokens) * plan.tokens * max(map(int, heads), default=0) * 2
