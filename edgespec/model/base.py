"""Protocols for loaded models and their tokenizers, and options for loading a model.

A model can also draft for itself: with fewer layers, at lower precision, or with a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.cluster.connected import ConnectedWorkers
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage
from edgespec.model.model_facts import Adapter, ModelFacts

# Maximum difference in vocabulary size between a target and its draft model, to allow for padding tokens.
MAX_VOCAB_PADDING = 1024

# Progress callback. Receives the name of the current task and the completed fraction (0 to 1), and returns
# False to cancel the task.
Progress = Callable[[str, float], bool]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading a model. Unless noted otherwise, None lets the backend choose.

    Attributes:
        context_tokens: Size of the KV cache in tokens.
        choose_context_tokens: Maps the trained context length (0 if unknown) to the size of the KV cache.
            Takes precedence over `context_tokens`.
        initial_context_tokens: Initial size of the KV cache, which `resize` can enlarge. None allocates the
            full size immediately.
        gpu_layers: Number of layers to offload to the GPU. None offloads as many as possible.
        experts: Number of layers, counting from the first with experts, whose experts stay in main memory
            while the rest of the layer is on the GPU. None means no layers, unless the planner decides
            otherwise.
        kv_type: Data type of the KV cache, such as `f16` or `q8_0`, or `q8_0/f16` for keys and values
            separately. `auto` uses the backend's choice.
        flash_attention: `auto`, `on` or `off`.
        batch_tokens: Tokens per prefill batch.
        max_branches: Maximum number of leaves in a token tree.
        memory_bytes: Combined size limit for the weights and the KV cache. None means no limit.
        max_logit_rows: Maximum number of rows per pass that need logits. None uses the backend's limit.
        is_draft: Whether the model is used for drafting. If so, `auto` settings may prefer speed over
            bit-exactness.
        adapters: The adapters to apply to the weights.
        exact: Whether `auto` settings choose kernels whose logits do not depend on the number of tokens per
            pass, if the backend has such kernels.
        repack: Whether the backend may convert weights to a layout that is faster on this CPU.
        low_bits: Whether to load the weights in a format that can also be read at lower precision, so that
            `LowBit` self-drafting needs no separate copy. Plain decoding uses this format too.
        own_head: Whether to load the drafting layers in the model's own files, such as those for multi-token
            prediction (MTP). Required for a `Head` that has no path.
        parallel: Number of concurrent replies that share the model's passes. Each has a context of
            `context_tokens`.
        workers: The machines that hold the layers, or None if all layers are on this machine. The model
            closes the connections.
        split_tensors: Whether each worker holds a shard of every layer instead of whole layers.
        streamed_layers: Number of layers whose feed-forward weights are read from disk in every pass, because
            the model is larger than memory.
        streamable: Indices of the layers that may be streamed. None means all layers that support it.
        output_on_worker: Whether to put the output layer on the last worker, if that worker has layers and
            enough memory.
        projector: Path of the projector (mmproj file) that encodes images. Empty if there is none.
        small_images: Whether to reduce larger images to about a megapixel, to save memory.
    """

    context_tokens: int | None = None
    choose_context_tokens: Callable[[int], int] | None = None
    initial_context_tokens: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    experts: int | None = None
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
    exact: bool = True
    repack: bool = True
    low_bits: bool = False
    own_head: bool = False
    parallel: int = 1
    workers: ConnectedWorkers | None = None
    split_tensors: bool = False
    output_on_worker: bool = False
    streamed_layers: int = 0
    streamable: tuple[int, ...] | None = None
    projector: str = ""
    small_images: bool = False

    def for_draft(self) -> LoadOptions:
        """Return a copy of these options for a draft model, without those that apply only to the target."""
        return replace(
            self,
            is_draft=True,
            # If the target is larger than memory, the kernel would evict mapped weights of the draft model.
            mmap=self.mmap and not self.streamed_layers,
            adapters=(),
            exact=False,
            low_bits=False,
            experts=None,
            own_head=False,
            workers=None,
            streamed_layers=0,
            streamable=None,
            projector="",
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a model's cache that can be restored into the same model.

    Attributes:
        length: Position after the last copied token.
        data: The copied cache contents, in a backend-specific format.
        start: Position of the first copied token. Earlier tokens are not part of the copy.
        heads: Copies of the states of the model's heads, keyed by head name. Not used by the model itself.
    """

    length: int
    data: bytes = field(repr=False)
    start: int = 0
    heads: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def size_bytes(self) -> int:
        return len(self.data) + sum(map(len, self.heads.values()))


class Vocabulary(Protocol):
    """A model's tokenizer."""

    size: int
    chat_template: str | None
    bos_text: str
    eos_text: str

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        """Convert text to token ids.

        Args:
            text: The text to tokenize.
            special: Whether to parse control tokens that appear in the text.
            start: Whether to prepend the BOS token if the model uses one.
        """

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens in `text`, without tokenizing it.

        Surrounding whitespace does not count, because templates and control tokens can remove it. The bound
        is 0 for vocabularies in which a token can represent text of any length.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text, or empty bytes for control tokens."""

    def raw_piece(self, token: int) -> bytes:
        """Return a token's vocabulary entry as bytes, even for control tokens."""

    def same_entries(self, other: Vocabulary) -> bool:
        """Return True if every token id is known to stand for the same token in both vocabularies.

        This is much faster than comparing `raw_piece` for hundreds of thousands of tokens. False is
        inconclusive, so the entries must then be compared one by one.
        """

    def is_end(self, token: int) -> bool:
        """Return whether a token ends a reply (EOS or EOT)."""


class LanguageModel(Protocol):
    """A loaded model with one KV cache.

    Invariants:

    - The cache holds `length` tokens. `verify` starts a round and temporarily appends a token tree. `commit`
      keeps one path of the tree and ends the round.
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
        """Number of CPU threads used by the last pass, or 0 if the backend's library decides."""

    @property
    def max_threads(self) -> int:
        """Number of CPU threads used on an idle machine, or 0 if it cannot be changed."""

    def set_max_threads(self, threads: int) -> None:
        """Set the number of CPU threads to use on an idle machine. Has no effect if `max_threads` is 0."""

    def fix_threads(self, fixed: bool) -> None:
        """Pin the number of CPU threads, or let it follow the machine's load."""

    def watch_memory(self, spare_bytes: Callable[[], int]) -> None:
        """Let the model use less memory while other programs need it. Has no effect if it cannot.

        Args:
            spare_bytes: Returns how many bytes of memory are free, apart from the reserve for other programs.
                Negative if memory is low. Called about once per second, possibly from other threads.
        """

    def set_adapter_scales(self, scales: Sequence[float]) -> None:
        """Set the scale of each of `facts.adapters` for later passes. The cache must be empty.

        Raises:
            CapabilityError: Adapter scales cannot be changed after loading.
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

    def prefill_prompt(self, tokens: Sequence[int], progress: Progress | None = None) -> Logits | None:
        """Prefill all tokens of a prompt except the last, which is verified in the same pass.

        Backends that cannot do both in one pass only prefill the tokens.

        Args:
            tokens: The prompt tokens that are not in the cache yet. There must be at least one.
            progress: See `prefill`.

        Returns:
            The logits after the last token, as if `verify` had run a tree of only this token, or None if the
            token still has to be verified.

        Raises:
            ContextFullError: The tokens do not fit. The cache is unchanged.
            CancelledError: `interrupt` or `progress` stopped the prefill. See `prefill`.
        """

    def prepare_image(self, image: Image) -> PreparedImage:
        """Prepare an image for use in prompts.

        `prefill` and `prefill_prompt` accept the image's tokens only while the returned object exists. The
        last token of a prompt must be text, and the cache must not be truncated within an image. Can be
        called from any thread.

        Raises:
            AttachmentError: The model cannot use this image.
            CapabilityError: The model cannot see images.
        """

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        """Return the embedding of text, float32 [size]. The cache must be empty, and is cleared afterwards.

        Args:
            tokens: The tokens of the text. The EOS token is appended if the model needs one.
            progress: Called after each batch. Returning False cancels the computation.

        Raises:
            CapabilityError: The model cannot embed text.
            ContextFullError: The text does not fit.
            CancelledError: `interrupt` or `progress` stopped the computation.
        """

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        """Run the nodes of a token tree after the cached tokens and return their logits.

        If an error is raised, no nodes of the tree remain in the cache.

        Args:
            tree: The token tree, whose root is the last emitted token.
            first: First node to run. Earlier nodes must have been run by earlier calls. Drafters use this to
                grow a tree level by level.

        Returns:
            The logits, where row i predicts the token after node `first + i`. They are valid until the next
            pass.

        Raises:
            ContextFullError: The tree does not fit in the context.
            CapabilityError: The model does not support branches or this width.
            CancelledError: `interrupt` stopped the pass.
        """

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the verified tree's root and the nodes in `path` in the cache, and discard the other nodes."""

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` cached tokens, and discard any uncommitted token tree.

        `truncate(model.length)` only discards the uncommitted tree. Recurrent models may keep fewer tokens
        than requested, because they can only roll back to a checkpoint. Check `length` afterwards.
        """

    def remove_range(self, start: int, end: int) -> None:
        """Remove tokens [start, end) from the cache, and shift later tokens to close the gap.

        Any uncommitted token tree is discarded. Later tokens keep their keys and values, and only their
        positions change (StreamingLLM, arXiv 2309.17453).

        Raises:
            CapabilityError: The model does not support this. The cache is unchanged.
        """

    def repeat_cached(self, end: int) -> bool:
        """Append copies of all cached tokens until the cache holds `end` tokens.

        The copies keep their keys and values, so the cache differs from one filled by reprocessing the
        tokens. The bit-exactness trial uses this to fill long contexts quickly. Any uncommitted token tree is
        discarded.

        Returns:
            Whether the model supports this. If not, the cache is unchanged.
        """

    def run_first_layers(self, enabled: bool) -> bool:
        """Clear the cache and make later passes run only a few layers, or all layers again.

        These are the first layers, which include one of each kind of layer, and the output layer. In place of
        logits, `verify` then returns the results of the output layer for the hidden states after the first
        layers. If the output layer rounds activations, it returns these hidden states too. The bit-exactness
        trial uses this, because it is faster and reveals differences that activation rounding in later layers
        would hide.

        Returns:
            Whether passes now run only these layers. They run all layers if the model does not support this,
            or if the first layers make up more than half of the model.

        Raises:
            MemoryBudgetError: The context cannot be allocated again.
        """

    def use_attention(self, options: LoadOptions) -> bool:
        """Clear the cache and use the attention kernels that `options` would select until the next call.

        Only the fields that affect the data types of the KV cache and flash attention are used. This makes it
        possible to compare the speeds of these kernels without loading the weights again.

        Returns:
            Whether these kernels are different from the current ones.

        Raises:
            MemoryBudgetError: The context cannot be allocated again.
        """

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy the cached state of tokens [start, end), and discard any uncommitted token tree.

        If the model lacks the capability `partial_truncate`, the copy always contains the whole cache.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Load a snapshot into the model's cache.

        If `snapshot.start` is not 0, the cache must hold the same `snapshot.start` tokens as when the
        snapshot was taken.

        Raises:
            BackendError: The snapshot belongs to another model or context. The cache then holds
                `snapshot.start` tokens or none.
        """

    def resize(self, context_tokens: int) -> None:
        """Change the context size, keep the cached tokens, and discard any uncommitted token tree.

        The backend may round up the size. Draft models that share the cache are resized as well, as far as
        memory allows. Recurrent models may lose checkpoints, even if the call fails.

        Raises:
            ContextFullError: The cached tokens do not fit in the new context. The cache is unchanged.
            MemoryBudgetError: The new context exceeds the memory limit. The cache is unchanged.
        """

    def run_ahead(self, enabled: bool) -> None:
        """Announce whether the next passes will decode greedily, one token at a time.

        An asynchronous backend can then prelaunch the next step. Results do not change.
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
        """Make current and later computations raise CancelledError, or stop doing so if not `enabled`.

        Can be called from any thread.
        """

    def close(self) -> None:
        """Free all memory used by the model."""


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Self-drafting with the layers below `exit_layer` and the LM head (LayerSkip, arXiv 2404.16710).

    The verify pass reuses the hidden states computed by these layers.
    """

    method: ClassVar[str] = "layerskip"
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
        is_partial: Whether `copy` replaces only the weights that the target reads from disk in every pass.
            All other weights are the target's own (SubSpec, arXiv 2509.18344).
    """

    method: ClassVar[str] = "lowbit"
    copy: str | None = None
    sink_tokens: int = 4
    window_tokens: int | None = None
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """Drafting with a head, a small network that reads the target's hidden states.

    Attributes:
        method: Name of the drafting method, one of `head_names()`.
        path: Path of the head's file or folder. None means the head in the target's own files.
        converted_from: The folder that the file at `path` was converted from. None if it was not converted.
    """

    method: str
    path: Path | None = None
    converted_from: Path | None = None

    @property
    def shown_path(self) -> Path:
        """The head's path as shown to users. Use only for heads that are not in the target's own files."""
        path = self.converted_from or self.path
        assert path is not None
        return path


SelfDraft: TypeAlias = EarlyExit | LowBit | Head
