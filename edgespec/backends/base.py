"""The protocol for loaded models, and the dataclasses for their load options and capabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree

__all__ = [
    "MAX_VOCAB_PADDING",
    "Adapter",
    "Capabilities",
    "EarlyExit",
    "Head",
    "LanguageModel",
    "LoadOptions",
    "LowBit",
    "ModelFacts",
    "Progress",
    "SelfDraft",
    "SkippedLayers",
    "Snapshot",
    "Vocabulary",
]

# The vocabularies of a target and its draft model may differ in size by up to this many padding tokens.
MAX_VOCAB_PADDING = 1024

# Function that is called with the name of the current task and the fraction done (0 to 1). It returns False
# to cancel the task.
Progress = Callable[[str, float], bool]


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Self-drafting with the layers below `exit_layer` and the LM head (LayerSkip, arXiv 2404.16710).

    The verify pass reuses the hidden states that these layers computed.
    """

    exit_layer: int


@dataclass(frozen=True, slots=True)
class LowBit:
    """Self-drafting with the target quantised to fewer bits, sharing its KV cache (QSpec, arXiv 2410.11305).

    Attributes:
        copy: Path to a copy of the model quantised to fewer bits. None if the loaded weights contain both
            precisions.
        sink_tokens: Number of initial tokens that the sparse attention window always includes (MagicDec,
            arXiv 2408.11049).
        window_tokens: Number of most recent tokens in the attention window. None attends to the whole
            context.
    """

    copy: str | None = None
    sink_tokens: int = 4
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """Self-drafting with some layers skipped, sharing the target's KV cache (SWIFT, arXiv 2410.06916)."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Head:
    """Drafting with a head, a small network that reads the target's hidden states.

    Attributes:
        method: Name of the drafting method, one of `HEADS` in `method_names.py`.
        path: Path of the head's file or folder. None means the head in the target's own files.
        converted_from: The folder that the file at `path` was converted from. None if it was not converted.
    """

    method: str
    path: Path | None = None
    converted_from: Path | None = None

    @property
    def shown_path(self) -> Path:
        """The path that the user knows, for messages. Heads in the target's own files have none."""
        path = self.converted_from or self.path
        assert path is not None
        return path


SelfDraft: TypeAlias = EarlyExit | LowBit | SkippedLayers | Head


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter (LoRA, arXiv 2106.09685) to apply to a model's weights.

    Attributes:
        path: A GGUF file, or a folder in mlx-lm's format, which can also contain a DoRA adapter.
        scale: Factor for the adapter's change to the weights.
    """

    path: str
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The name of the file without its extension, or of the folder."""
        path = Path(self.path)
        return path.stem if path.suffix == ".gguf" else path.name


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading a model. Unless noted otherwise, None lets the backend choose.

    Attributes:
        context_tokens: Size of the KV cache in tokens.
        choose_context_tokens: Function that maps the trained context length (0 if unknown) to the size of the
            KV cache. Takes precedence over `context_tokens`.
        initial_context_tokens: Initial size of the KV cache, if `resize` enlarges it later. None allocates
            the full size immediately.
        gpu_layers: Number of layers to offload to the GPU. None offloads as many as possible.
        kv_type: Data type of the KV cache, such as `f16` or `q8_0`, or `q8_0/f16` for keys and values
            separately. `auto` uses the backend's choice.
        flash_attention: `auto`, `on` or `off`.
        batch_tokens: Tokens per prefill batch.
        max_branches: Maximum number of leaves in a token tree.
        memory_bytes: Combined limit for weights and KV cache. None means no limit.
        max_logit_rows: Maximum number of rows per pass that need logits. None uses the backend's limit.
        is_draft: Whether the model is used for drafting. If so, `auto` settings can prefer speed over
            bit-exactness.
        adapters: The adapters to apply to the weights.
        exact: Whether `auto` settings choose kernels whose logits do not depend on the number of tokens per
            pass, even if they are slower.
        low_bits: Whether to load the weights in a format that can also be read at lower precision, so that
            `LowBit` self-drafting needs no separate copy. Plain decoding uses this format too.
        mtp: Whether to load the multi-token prediction (MTP) layers in the model's own files. Required to
            draft with `Head("mtp")`.
        parallel: Number of replies that share the model's passes. Each has a context of `context_tokens`.
    """

    context_tokens: int | None = None
    choose_context_tokens: Callable[[int], int] | None = None
    initial_context_tokens: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    kv_type: str = "auto"
    flash_attention: str = "auto"
    mmap: bool = True
    mlock: bool = False
    batch_tokens: int = 512
    max_branches: int = 8
    memory_bytes: int | None = None
    max_logit_rows: int | None = None
    is_draft: bool = False
    adapters: tuple[Adapter, ...] = ()
    exact: bool = False
    low_bits: bool = False
    mtp: bool = False
    parallel: int = 1

    def for_draft(self) -> LoadOptions:
        """Return these options for a draft model, without those that apply only to the target."""
        return replace(self, is_draft=True, adapters=(), exact=False, low_bits=False, mtp=False)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a loaded model, each tested by the backend at load time.

    Attributes:
        rollback: Whether cached tokens can be removed exactly, as speculative decoding requires.
        tree: Whether a verify pass can contain branches.
        reason: One-line explanation of a missing feature. Empty if nothing is missing.
        max_width: Maximum number of tokens in a verify pass.
        max_branches: Maximum number of leaves in a token tree.
        max_draft_length: Maximum length of a draft in tokens, or depth of a draft tree. Limited for heads
            that predict a fixed number of tokens.
        drafts_in_one_pass: Whether a single pass predicts all draft tokens, so that longer drafts take no
            more time. True for block-diffusion heads.
        self_draft_methods: Methods that `self_draft` supports: `layerskip` (EarlyExit), `lowbit` (LowBit),
            `swift` (SkippedLayers, for a `Skippable` model), and the methods of heads (Head).
        trainable: Whether the model implements `Trainable`, for online training as a draft model.
        partial_truncate: Whether `truncate` and `snapshot` work at every token. If not, `truncate` may keep
            fewer tokens than requested.
        exact: Whether all passes that the model accepts produce logits bit-identical to those of single-token
            passes. See `bit_exactness`.
        prefix_reuse_exact: Whether the logits after a cached prefix do not depend on how the prefix was
            computed, apart from rounding. With `exact`, they are bit-identical. If False, bit-identical
            logits require computing all tokens again from the start, in the same batches.
    """

    rollback: bool
    tree: bool
    reason: str = ""
    max_width: int = 1 << 20
    max_branches: int = 1 << 20
    max_draft_length: int = 1 << 20
    drafts_in_one_pass: bool = False
    self_draft_methods: frozenset[str] = frozenset()
    trainable: bool = False
    partial_truncate: bool = True
    exact: bool = False
    prefix_reuse_exact: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a loaded model.

    Attributes:
        path: Path to the model file or folder.
        architecture: Architecture name from the metadata, such as `llama`.
        description: Human-readable summary: architecture, size and quantisation.
        parameters: Number of weights.
        file_bytes: Size of the model on disk.
        weight_bytes: Memory used by the loaded weights.
        kv_bytes: Memory used by all cached state at the current context size: keys, values, recurrent states
            and their checkpoints.
        quantisation: Quantisation name, such as `Q4_K_M`.
        trained_context_tokens: Context length that the model was trained for. 0 if unknown.
        context_tokens: Current context size.
        chat_template: Whether the model has a chat template.
        notice: Warning to show to the user. Empty if there is none.
        rollback: Description of how rejected tokens are removed from the cache.
        requested_context_tokens: Context size that `resize` can reach if the model was loaded with a smaller
            context, else 0.
        requested_kv_bytes: `kv_bytes` at `requested_context_tokens`, else 0.
        cache_variant: Identifies properties of the KV cache that do not follow from the model and its
            options. A saved cache is only valid for the same variant.
        adapters: The adapters applied to the weights.
    """

    name: str
    path: str
    architecture: str
    description: str
    parameters: int
    file_bytes: int
    weight_bytes: int
    kv_bytes: int
    quantisation: str
    trained_context_tokens: int
    context_tokens: int
    vocab_size: int
    chat_template: bool
    capabilities: Capabilities
    notice: str = ""
    rollback: str = ""
    requested_context_tokens: int = 0
    requested_kv_bytes: int = 0
    cache_variant: str = ""
    adapters: tuple[Adapter, ...] = ()

    @property
    def max_context_tokens(self) -> int:
        """The number of tokens to which the context can be resized."""
        return max(self.requested_context_tokens, self.context_tokens)

    @property
    def max_kv_bytes(self) -> int:
        """Memory used by all cached state at the maximum context size, in bytes."""
        return max(self.requested_kv_bytes, self.kv_bytes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a model's cache that can be restored into the same model.

    Attributes:
        length: Position after the last copied token.
        data: The copied cache contents in the backend's own format.
        start: Position of the first copied token. Earlier tokens are not part of the copy.
        heads: Copies of the states of the heads that draft for the model, by the heads' names. Models neither
            write nor read them.
    """

    length: int
    data: bytes = field(repr=False)
    start: int = 0
    heads: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def size_bytes(self) -> int:
        return len(self.data) + sum(map(len, self.heads.values()))


class Vocabulary(Protocol):
    """The tokenizer of a model."""

    size: int
    chat_template: str | None
    bos_text: str
    eos_text: str

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        """Convert text to token ids.

        Args:
            text: The text.
            special: Whether to parse control tokens that appear in the text.
            start: Whether to prepend the BOS token if the model uses one.
        """

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text, without tokenizing it.

        Whitespace around the text does not count, because templates and control tokens can remove it. The
        bound is 0 for vocabularies in which a token can represent a text of any length.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text. Control tokens add none."""

    def raw_piece(self, token: int) -> bytes:
        """Return a token's vocabulary entry as bytes, even for control tokens."""

    def is_end(self, token: int) -> bool:
        """Return True for tokens that end a reply (EOS, EOT)."""


class LanguageModel(Protocol):
    """A loaded model with one KV cache.

    Invariants:

    - The cache holds `length` tokens. `verify` opens a round and appends a token tree temporarily;
      `commit` keeps one path of the tree and ends the round.
    - All methods except `interrupt` must be called from one thread.
    - After `close`, all other methods raise ClosedError. Calling `close` again has no effect.
    """

    facts: ModelFacts
    vocabulary: Vocabulary

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""

    @property
    def free_tokens(self) -> int:
        """Number of tokens that still fit in the context."""

    @property
    def threads(self) -> int:
        """Number of CPU threads of the last pass, or 0 if the backend's library chooses it."""

    @property
    def max_threads(self) -> int:
        """Number of CPU threads on an idle machine, or 0 if it cannot be changed."""

    def set_max_threads(self, threads: int) -> None:
        """Set the number of CPU threads on an idle machine. Has no effect if `max_threads` is 0."""

    def set_adapter_scales(self, scales: Sequence[float]) -> None:
        """Set the scale of each of `facts.adapters` for later passes. The cache must be empty.

        Raises:
            CapabilityError: The scales of adapters are fixed when the model is loaded.
        """

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """Append tokens to the cache without computing their logits.

        Args:
            tokens: The tokens to append.
            progress: Called after each batch. Returning False cancels the prefill.

        Raises:
            ContextFullError: The tokens do not fit. The cache is unchanged.
            CancelledError: `interrupt` or `progress` stopped the prefill. The cache keeps the tokens
                processed so far. Check `length` afterwards.
        """

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        """Return the embedding of a text, float32 [size]. The cache must be empty, and is so afterwards.

        Args:
            tokens: The text. Models that end texts with the EOS token append it.
            progress: Called after each batch. Returning False cancels the work.

        Raises:
            CapabilityError: The model cannot embed texts.
            ContextFullError: The text does not fit.
            CancelledError: `interrupt` or `progress` stopped the work.
        """

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        """Run the nodes of a token tree after the cached tokens and return their logits.

        Args:
            tree: The tree. Its root is the last emitted token.
            first: First node to run. Earlier calls must have run the nodes before it. Drafters use this to
                grow a tree level by level.

        Returns:
            The logits, where row i predicts the token after node `first + i`. They are valid until the next
            pass.

        Raises:
            ContextFullError: The tree does not fit into the context.
            CapabilityError: The model does not support branches or this width.
            CancelledError: `interrupt` stopped the pass.
            After any of these errors, the cache contains no nodes of the tree.
        """

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the verified tree's root and the nodes of `path` in the cache. Discard its other nodes."""

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` cached tokens, and discard any uncommitted token tree.

        `truncate(model.length)` only discards the uncommitted tree. Recurrent models may keep fewer tokens
        than requested, because they can only return to a checkpoint. Check `length` afterwards.
        """

    def remove_range(self, start: int, end: int) -> None:
        """Remove tokens [start, end) from the cache, and move later tokens to earlier positions.

        Any uncommitted token tree is discarded. The keys and values of later tokens are not recomputed; only
        their positions change (StreamingLLM, arXiv 2309.17453).

        Raises:
            CapabilityError: The model does not support this. The cache is unchanged.
        """

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the cached state of tokens [start, end), and discard any uncommitted token tree.

        If the model lacks the capability `partial_truncate`, the copy always contains the whole cache.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Load a snapshot into the model's cache.

        If `snapshot.start` is not 0, the cache must hold the same first `snapshot.start` tokens as when the
        snapshot was taken.

        Raises:
            BackendError: The snapshot belongs to another model or context. The cache then holds
                `snapshot.start` tokens or none.
        """

    def resize(self, context_tokens: int) -> None:
        """Change the context size, keep the cached tokens, and discard any uncommitted token tree.

        The backend may round the size up. Draft models that share the cache are resized too, as far as memory
        allows. Recurrent models may lose checkpoints, even if the call fails.

        Raises:
            ContextFullError: The cached tokens do not fit in the new context. They are left unchanged.
            MemoryBudgetError: The new context exceeds the memory limit. The cached tokens are left unchanged.
        """

    def run_ahead(self, enabled: bool) -> None:
        """Announce whether the next passes will decode greedily, one token at a time.

        An asynchronous backend can then start the next step early. Results do not change.
        """

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        """Announce which draft model will propose the next drafts, or None if unknown.

        If the target and the draft model compute asynchronously on one device, the verify pass can start
        before the last drafted token is copied to the host. Results do not change.
        """

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        """Return a draft model that uses the KV cache of this model (its target).

        The draft model has the same `length` as the target. Its `prefill`, `commit`, `truncate` and `close`
        do not change the target. The target's next `verify`, `commit` or `truncate` discards the drafted
        tokens or reuses their cached state. Only one draft model may draft before each verify pass of the
        target.

        Raises:
            CapabilityError: The model does not support this method. The message explains why.
        """

    def interrupt(self, enabled: bool) -> None:
        """Cancel the current and all later computations with CancelledError, or stop cancelling.

        Can be called from any thread.
        """

    def close(self) -> None:
        """Free all memory that the model uses."""
