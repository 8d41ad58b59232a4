"""The Protocol of a loaded model, and the dataclasses that describe how it is loaded and what it can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree

__all__ = [
    "MAX_VOCAB_PADDING",
    "Capabilities",
    "EarlyExit",
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

# Two vocabularies may differ by this many tokens, because embedding tables are padded at the end.
MAX_VOCAB_PADDING = 1024

# Called with the name of the current phase and the fraction done (0 to 1). Return False to cancel.
Progress = Callable[[str, float], bool]


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Self-drafting with the layers below `exit_layer` and the LM head (LayerSkip, arXiv 2404.16710).

    The verify pass reuses the hidden states that these layers computed.
    """

    exit_layer: int


@dataclass(frozen=True, slots=True)
class LowBit:
    """Self-drafting with the target quantised to fewer bits, on its KV cache (QSpec, arXiv 2410.11305).

    Attributes:
        copy: Path of a copy of the model quantised to fewer bits. None if the loaded weights contain both
            precisions.
        sink_tokens: First tokens that the sparse attention window always includes (MagicDec,
            arXiv 2408.11049).
        window_tokens: Last tokens in the attention window. None attends to the whole context.
    """

    copy: str | None = None
    sink_tokens: int = 4
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """Self-drafting without some of the layers, on the target's KV cache (SWIFT, arXiv 2410.06916)."""

    layers: tuple[int, ...]


SelfDraft: TypeAlias = EarlyExit | LowBit | SkippedLayers


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading one model. None lets the backend choose.

    Attributes:
        context_tokens: Size of the KV cache.
        choose_context_tokens: Function that maps the trained context (0 if unknown) to the size of the KV
            cache. Takes precedence over `context_tokens`.
        initial_context_tokens: Size of the KV cache at load, if `resize` will enlarge it later. None
            allocates the full size at load.
        gpu_layers: Layers to offload to a GPU. None offloads as many as possible.
        kv_type: Data type of the KV cache, such as `f16` or `q8_0`, or `q8_0/f16` for keys and values
            separately. `auto` uses the backend's choice.
        flash_attention: `auto`, `on` or `off`.
        batch_tokens: Tokens per prefill batch.
        max_branches: Maximum number of leaves of a token tree.
        memory_bytes: Limit for weights and KV cache together. None sets no limit.
        max_logit_rows: Maximum number of rows of a pass that need logits. None allows the widest pass.
        is_draft: The model will draft. Its `auto` settings may then prefer speed over exact rounding.
        adapter: Folder of a LoRA or DoRA adapter to apply to the weights.
        exact: Make `auto` settings choose kernels whose logits are bit-identical at all widths, even if
            they are slower.
        low_bits: Prepare for `LowBit` self-drafting without a copy. Plain decoding then uses the same split
            weights as verification.
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
    adapter: str | None = None
    exact: bool = False
    low_bits: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a loaded model. The backend tests each of them at load time.

    Attributes:
        rollback: Cached tokens can be removed exactly. Speculative decoding needs this.
        tree: A verify pass may hold branches.
        reason: One line that explains a missing feature. Empty if nothing is missing.
        max_width: Maximum number of rows of a verify pass.
        max_branches: Maximum number of leaves of a token tree.
        self_draft_methods: The methods that `self_draft` supports exactly: `layerskip` (EarlyExit), `lowbit`
            (LowBit) and `swift` (SkippedLayers, for a `Skippable` model).
        trainable: The model is a `Trainable`, which online training can adapt as a draft.
        partial_truncate: `truncate` and `snapshot` work at every token. Otherwise `truncate` may keep
            fewer tokens than requested.
        exact: All passes that the model accepts have logits that are bit-identical to single-token passes.
            See `bit_exactness`.
        prefix_reuse_exact: The logits after a cached prefix do not depend on how the prefix was computed,
            apart from rounding; with `exact` they are bit-identical. If False, bit-identical logits need
            a prefill from the start in the same batches, generated tokens included.
    """

    rollback: bool
    tree: bool
    reason: str = ""
    max_width: int = 1 << 20
    max_branches: int = 1 << 20
    hidden_states: bool = False
    self_draft_methods: frozenset[str] = frozenset()
    trainable: bool = False
    partial_truncate: bool = True
    exact: bool = False
    prefix_reuse_exact: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a loaded model.

    Attributes:
        path: Path of the model file or folder.
        architecture: Architecture name from the metadata, such as `llama`.
        description: One line for people: architecture, size and quantisation.
        parameters: Number of weights.
        file_bytes: Size of the model on disk.
        weight_bytes: Memory of the loaded weights.
        kv_bytes: Memory of all cached state at the current context size: keys, values, recurrent states
            and their checkpoints.
        quantisation: Quantisation name, such as `Q4_K_M`.
        trained_context_tokens: Context that the model was trained for. 0 if unknown.
        context_tokens: Current size of the context.
        chat_template: The model has a chat template.
        notice: A warning to show to the user. Empty if there is none.
        rollback: Description of how rejected tokens are removed from the cache.
        requested_context_tokens: Context size that `resize` can reach, if the context was loaded smaller.
            0 otherwise.
        requested_kv_bytes: `kv_bytes` at that size. 0 otherwise.
        cache_variant: Properties of the KV cache that model and options do not determine. Saved caches are
            only valid for the same variant.
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

    @property
    def max_context_tokens(self) -> int:
        """The largest size that the context may reach."""
        return max(self.requested_context_tokens, self.context_tokens)

    @property
    def max_kv_bytes(self) -> int:
        """`kv_bytes` at the largest context size."""
        return max(self.requested_kv_bytes, self.kv_bytes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a model's cache, which can be restored into the same model.

    Attributes:
        length: End of the copied range: the number of tokens in the cache when it was copied.
        data: The copied tokens in the backend's own format.
        start: First copied token. Earlier tokens are not part of the copy.
    """

    length: int
    data: bytes = field(repr=False)
    start: int = 0


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
            special: Parse control tokens that are written out in the text.
            start: Prepend the BOS token if the model uses one.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text. Control tokens add none."""

    def raw_piece(self, token: int) -> bytes:
        """Return the token's entry in the vocabulary, control tokens included."""

    def is_end(self, token: int) -> bool:
        """Return True for tokens that end a reply (EOS, EOT)."""


class LanguageModel(Protocol):
    """A loaded model with one KV cache.

    Invariants:

    - The cache holds `length` tokens. `verify` opens a round and appends a token tree temporarily;
      `commit` keeps one path of the tree and ends the round.
    - All methods but `interrupt` must be called from one thread.
    - After `close`, every call raises ClosedError. Closing twice is allowed.
    """

    facts: ModelFacts
    vocabulary: Vocabulary

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""

    @property
    def free_tokens(self) -> int:
        """Number of further tokens that fit into the context."""

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """Append tokens to the cache without computing their logits.

        Args:
            tokens: The tokens to append.
            progress: Called after each batch. It cancels by returning False.

        Raises:
            ContextFullError: The tokens do not fit. The cache is unchanged.
            CancelledError: `interrupt` or `progress` stopped the prefill. The cache keeps the `length`
                tokens that were processed.
        """

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        """Run the nodes of a token tree after the cached tokens and return their logits.

        Args:
            tree: The tree. Its root is the last emitted token.
            first: First node to run. Earlier calls of the same round must have run the nodes before it.
                Drafters use this to grow a tree level by level.

        Returns:
            Logits whose row i follows node `first + i`. They are valid until the next pass.

        Raises:
            ContextFullError: The tree does not fit into the context.
            CapabilityError: The model does not support branches or this width.
            CancelledError: `interrupt` stopped the pass.
            After any of these errors, the cache is as it was before the round.
        """

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the root and the nodes of `path` (ordered from the root) in the cache, and end the round."""

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` cached tokens and end the round.

        `truncate(model.length)` drops an open round only. Recurrent models may keep fewer tokens than
        requested, because they can only return to a checkpoint. Read `length` afterwards.
        """

    def remove_range(self, start: int, end: int) -> None:
        """Remove tokens [start, end) from the cache, move later tokens down, and end the round.

        The later keys and values are not recomputed; only their positions change (StreamingLLM,
        arXiv 2309.17453).

        Raises:
            CapabilityError: The model does not support this. The cache is unchanged.
        """

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """Copy tokens [start, end) of the cache and end the round.

        Without `partial_truncate`, the copy always contains the whole cache.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a copy of the cache.

        If `snapshot.start` is not 0, the cache must hold the same first `snapshot.start` tokens as the one
        that was copied.

        Raises:
            BackendError: The snapshot belongs to another model or context. The cache then holds
                `snapshot.start` tokens or none.
        """

    def resize(self, context_tokens: int) -> None:
        """Change the size of the context without changing the cached tokens, and end the round.

        The backend may round the size up. Self-draft views are resized too, as far as memory allows.
        Recurrent models may lose checkpoints, even if the call fails.

        Raises:
            ContextFullError: The cached tokens do not fit the new size. They are unchanged.
            MemoryBudgetError: The new context exceeds the memory limit. The cached tokens are unchanged.
        """

    def run_ahead(self, enabled: bool) -> None:
        """Hint that each next pass will run the most likely token alone.

        A backend that computes asynchronously may then start the next step early. Results do not change.
        """

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        """Hint that this model will verify the chains that `draft` proposes, unchanged. None ends this.

        If both models compute asynchronously on one device, the verify pass may start before the last
        drafted token is copied to the host. Results do not change.
        """

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        """Return a draft model that uses the KV cache of this model, its target.

        The draft model has the same `length` as the target. Its `verify` opens a round of its own, which the
        target's next `verify`, `commit` or `truncate` ends and may reuse. Its `prefill`, `commit`, `truncate`
        and `close` do not change the target. Only one such model may draft in a round.

        Raises:
            CapabilityError: The model does not support this method. The message explains why.
        """

    def interrupt(self, enabled: bool) -> None:
        """Stop the running pass and reject new ones with CancelledError until called with False.

        May be called from any thread.
        """

    def close(self) -> None:
        """Free all memory of the model."""
