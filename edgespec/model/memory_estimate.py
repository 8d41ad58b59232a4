"""Estimate a model's memory use from its metadata, before the model is loaded.

This module also chooses context sizes, and rejects models that do not fit in memory, prompts that do not fit
in a context, and drafts that do not fit in a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from edgespec.errors import CapabilityError, MemoryBudgetError
from edgespec.model.base import LoadOptions
from edgespec.system.files import format_bytes

THIS_MACHINE = "this machine"
"""The name of the target's own machine in `MachineShare.name` and in the JSON output."""

ModelMemoryKind = Literal["weights", "cache", "compute", "unusable", "output", "vocabulary"]
MODEL_MEMORY_KINDS: tuple[ModelMemoryKind, ...] = get_args(ModelMemoryKind)
"""The purposes for which a model uses memory.

- weights: the model's tensors.
- cache: KV caches and recurrent states, for a full context.
- compute: buffers for intermediate results of the widest pass.
- unusable: memory that stays free on some of several GPUs, because layers are divided unevenly.
- output: logits of the widest verify pass.
- vocabulary: the text of each token, and the tokenizer's lookup tables.
"""

# Default context size in tokens, unless the model was trained for a smaller one.
_DEFAULT_CONTEXT_TOKENS = 8192
# llama.cpp and mlx-lm allocate their KV caches in multiples of this many tokens.
BLOCK_TOKENS = 256

Pool = Literal["memory", "gpu"]
"""Where memory is allocated: in system memory, or in the separate memory of graphics cards."""

MEMORY: Pool = "memory"
GPU: Pool = "gpu"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The memory that a model uses for one purpose (`kind`) in one memory pool.

    Shared by concurrent replies unless `per_reply` is set.
    """

    kind: ModelMemoryKind
    bytes: int
    pool: Pool = MEMORY
    per_reply: bool = False


@dataclass(frozen=True, slots=True)
class MachineShare:
    """One machine's share of a target whose layers are split across several machines.

    Attributes:
        name: The worker's address, or `THIS_MACHINE`.
        layers: Number of layers.
        weight_bytes: Size of the weights, including the embedding on the target's own machine.
        cache_bytes: Size of the KV cache.
        compute_bytes: Maximum size of the compute buffers.
        read_fraction: Fraction (0 to 1) of the bytes read by a pass that belong to weights on this machine.
        can_hold_all: Whether all layers would fit on this machine. Always False for the target's own machine.
        has_output: Whether the output layer is on this machine, in which case `weight_bytes` includes it.
        parts: Number of workers that each layer is sharded across. 1 if the machine holds whole layers.
    """

    name: str
    layers: int
    weight_bytes: int
    cache_bytes: int
    compute_bytes: int
    read_fraction: float
    can_hold_all: bool = False
    has_output: bool = False
    parts: int = 1

    @property
    def layers_text(self) -> str:
        """User-facing layer count: `12`, or `1/2 of 12` if two workers share each of 12 layers."""
        return str(self.layers) if self.parts == 1 else f"1/{self.parts} of {self.layers}"

    @property
    def total_bytes(self) -> int:
        """Total memory that the target needs on this machine, in bytes."""
        return self.weight_bytes + self.cache_bytes + self.compute_bytes


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """An estimate of what a pass reads from disk if it reads only the experts that it uses.

    Attributes:
        all_bytes: Size of all experts.
        kept_bytes: Size of the experts that are in memory when a layer needs others.
        layer_bytes: Number of bytes that a pass over one token reads, keyed by layer.
    """

    all_bytes: int
    kept_bytes: int
    layer_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ExpertShares:
    """Placement of a mixture-of-experts model's experts when a GPU holds its other weights.

    Attributes:
        layers: Number of layers with experts.
        layers_in_memory: Number of layers whose experts are in main memory. The others are on the GPU.
        memory_bytes: Size of the experts in main memory, in bytes.
        gpu_bytes: Size of the experts on the GPU, in bytes.
    """

    layers: int
    layers_in_memory: int
    memory_bytes: int
    gpu_bytes: int

    @property
    def text(self) -> str:
        """User-facing summary of the layers and bytes on each device."""
        on_gpu = self.layers - self.layers_in_memory
        return (
            f"{on_gpu} layers on the GPU ({format_bytes(self.gpu_bytes)}),"
            f" {self.layers_in_memory} in main memory ({format_bytes(self.memory_bytes)})"
        )


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated memory use of a model with a full context.

    Attributes:
        context_tokens: Size of the context.
        kv_type: Data type of the KV cache.
        parts: The memory on this machine.
        machines: The share of each machine, starting with this one. Empty if the whole target is on this
            machine.
        experts: Where the experts are. None if there are no experts, or no GPU with dedicated memory.
        why_experts_stay: Why `LoadOptions.experts` has no effect. Empty if it takes effect or is not set.
    """

    context_tokens: int
    kv_type: str
    parts: tuple[MemoryPart, ...]
    machines: tuple[MachineShare, ...] = ()
    experts: ExpertShares | None = None
    why_experts_stay: str = ""

    def for_replies(self, count: int) -> MemoryEstimate:
        """Scale an estimate for one reply to `count` concurrent replies."""
        parts = (
            replace(part, bytes=part.bytes * count if part.per_reply else part.bytes) for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    def without_gpu(self) -> MemoryEstimate:
        """Return the estimate for a model that runs on the CPU, with all parts in main memory."""
        return replace(self, parts=tuple(replace(part, pool=MEMORY) for part in self.parts))

    def bytes_of(self, *kinds: ModelMemoryKind) -> int:
        """Return the estimated memory in bytes for the given purposes."""
        return sum(part.bytes for part in self.parts if part.kind in kinds)

    @property
    def total_bytes(self) -> int:
        """The model's estimated memory use in bytes."""
        return sum(part.bytes for part in self.parts)


class MemoryEstimator(Protocol):
    """Estimates a model's memory use from its metadata, without reading its weights.

    Attributes:
        trained_context_tokens: Context length that the model was trained for. 0 if the files do not state it.
        layers: Number of layers that can be offloaded to GPUs individually. 0 if this is not supported.
        longrope_switch_tokens: Context size in tokens above which the model switches to its long LongRoPE
            factors. 0 if it never does.
        why_not_shared: Why concurrent replies cannot share the model's forward passes. Empty if they can.
        streamable_layers: Number of layers whose feed-forward weights can be read from disk in every pass. 0
            if the whole model must fit in memory.
    """

    name: str
    trained_context_tokens: int
    layers: int
    longrope_switch_tokens: int
    why_not_shared: str

    @property
    def streamable_layers(self) -> int: ...

    def streamed_bytes(self, options: LoadOptions) -> Mapping[int, int]:
        """Return the bytes that each pass reads from disk with these options, keyed by streamed layer."""

    def expert_reads(self, options: LoadOptions) -> ExpertReads | None:
        """Return an estimate of what is read if only experts are streamed, or None if whole layers are."""

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        """Estimate the memory that the model will use with `options`, within `options.memory_bytes`.

        Raises:
            OptionError: The model cannot be loaded with these options.
            MemoryBudgetError: There is not enough memory to compute the estimate.
        """

    def close(self) -> None:
        """Free the metadata that the estimator holds in memory."""


def round_up_to_block(tokens: int) -> int:
    """Round a context size up to a multiple of `BLOCK_TOKENS`."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def initial_context(whole_tokens: int, initial_context_tokens: int, longrope_switch_tokens: int) -> int:
    """Return the context size in tokens to allocate when a model is loaded.

    Args:
        whole_tokens: The maximum size that the context can grow to.
        initial_context_tokens: The preferred initial size.
        longrope_switch_tokens: Contexts above this size use different LongRoPE factors, so a context that
            will grow beyond it must also start above it. 0 if all sizes use the same factors.
    """
    if longrope_switch_tokens < whole_tokens:
        initial_context_tokens = max(initial_context_tokens, longrope_switch_tokens + 1)
    return min(whole_tokens, round_up_to_block(initial_context_tokens))


def requested_context(options: LoadOptions, trained_tokens: int) -> int:
    """Return the requested context size, or the default for the given trained context length."""
    if options.choose_context_tokens:
        return options.choose_context_tokens(trained_tokens)
    return options.context_tokens or min(trained_tokens or _DEFAULT_CONTEXT_TOKENS, _DEFAULT_CONTEXT_TOKENS)


def check_weights_fit(name: str, weight_bytes: int, options: LoadOptions) -> None:
    """Raise MemoryBudgetError if the weights alone exceed the memory limit."""
    if options.memory_bytes is not None and weight_bytes > options.memory_bytes:
        raise MemoryBudgetError(
            f"the weights of {name} take {format_bytes(weight_bytes)},"
            f" which exceeds the limit of {format_bytes(options.memory_bytes)}",
            "choose a smaller model or quantisation, or raise --memory",
        )


def check_draft_width(width: int, max_width: int) -> None:
    """Raise CapabilityError if a draft tree of `width` tokens is too large for one pass."""
    if width > max_width:
        raise CapabilityError(
            f"a draft of {width} tokens exceeds the limit of {max_width} tokens that the model can check at"
            " once",
            "use a shorter --draft-length or fewer --draft-branches",
            code="draft_too_wide",
        )


def cache_too_large_error(
    context_tokens: int, wanted_bytes: int, left_bytes: int, fitting_tokens: int
) -> MemoryBudgetError:
    """Return the error to raise if a KV cache of `wanted_bytes` does not fit in memory.

    The message suggests the largest context that fits, unless `fitting_tokens` is 0.
    """
    return MemoryBudgetError(
        f"the KV cache for a context of {context_tokens:,} tokens takes {format_bytes(wanted_bytes)},"
        f" but only {format_bytes(max(0, left_bytes))} is left",
        f"use --context {fitting_tokens} or less"
        if fitting_tokens
        else "choose a smaller model or raise --memory",
    )
