"""Backend-independent properties of a model.

`ModelInfo` holds the metadata in its files. `ModelFacts` holds the properties of the loaded model: its size,
its adapters, and which features the backend supports for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

ModelKind = Literal["model", "projector", "adapter", "embedding", "head", "other"]
"""The kind of a model file. Only a `model` can generate text by itself."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter (LoRA, arXiv 2106.09685) to apply to a model's weights.

    Attributes:
        path: A GGUF file, or a folder in mlx-lm's format, which can also contain a DoRA adapter.
        scale: Factor by which to multiply the adapter's change to the weights.
    """

    path: str
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The file name without its extension, or the folder name."""
        path = Path(self.path)
        return path.stem if path.suffix == ".gguf" else path.name


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a loaded model, each of which the backend tested when loading it.

    Attributes:
        rollback: Whether cached tokens can be removed exactly, as speculative decoding requires.
        tree: Whether a verify pass can contain branches.
        reason: One-line explanation of a missing feature. Empty if nothing is missing.
        max_width: Maximum number of tokens in a verify pass.
        max_branches: Maximum number of leaves in a token tree.
        max_draft_length: Maximum length of a draft in tokens, or depth of a draft tree. Bounded for heads
            that predict a fixed number of tokens.
        drafts_in_one_pass: Whether a single pass predicts all draft tokens, so that longer drafts cost no
            extra time. True for block-diffusion heads.
        self_draft_methods: Methods that `self_draft` supports: `layerskip` (EarlyExit), `lowbit` (LowBit) and
            the methods of heads (Head).
        trainable: Whether the model implements `Trainable`, for online training as a draft model.
        partial_truncate: Whether `truncate` and `snapshot` work at any token. If not, `truncate` may keep
            fewer tokens than requested.
        self_draft_refusals: Reasons why methods are not in `self_draft_methods`, keyed by method.
        exact: Whether the logits and KV cells of all passes that the model accepts agree bit for bit. See
            `bit_exactness`.
        reuse_block_tokens: Block size in tokens for reusing a prompt's KV cells. Only whole blocks computed
            by prefill can be reused. 1 if any cells can be reused.
        pass_widths: The widths to which verify passes are padded, in ascending order. Empty if passes are not
            padded.
        has_slow_width_changes: Whether a pass takes longer if the previous pass had a different width, as on
            workers.
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
    self_draft_refusals: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False
    reuse_block_tokens: int = 1
    pass_widths: tuple[int, ...] = ()
    has_slow_width_changes: bool = False

    @property
    def prefix_reuse_exact(self) -> bool:
        """Whether cached tokens can be reused regardless of how they were computed."""
        return self.reuse_block_tokens == 1

    @property
    def padding_tokens(self) -> int:
        """The number of tokens to keep free in the context so that every verify pass can be padded."""
        if not self.exact:
            return 0
        return max((after - before - 1 for before, after in pairwise((0, *self.pass_widths))), default=0)

    def padded_width(self, width: int) -> int:
        """Return the padded width of a verify pass of `width` tokens."""
        return next((each for each in self.pass_widths if each >= width), width)


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether a loaded model's replies are identical to plain decoding, and why.

    Attributes:
        requested: The option `exactness`: `auto`, `bits` or `off`.
        bits: Whether all passes agree bit for bit, so that replies are identical. If False, rounding can make
            replies differ from plain decoding.
        outcome: Whether replies are identical and why, as a clause without its subject, such as `are
            identical to plain decoding`.
        widths: Pass widths that agree bit for bit. Empty if passes are not restricted.
        expected_speed: Expected speed with only these passes, as a fraction of the speed with `off`. If
            replies can differ, this is the speed to expect with `bits`. None if it was not measured.
        cause: What makes replies differ: the option `exactness`, `workers`, `parallel` or `acceptance`. Empty
            if replies are identical, or if `auto` gave that up for speed.
    """

    requested: str
    bits: bool
    outcome: str
    widths: tuple[int, ...] = ()
    expected_speed: float | None = None
    cause: str = ""

    @property
    def reason(self) -> str:
        """One-sentence explanation."""
        return f"replies {self.outcome}"

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-compatible values."""
        return {
            "requested": self.requested,
            "effective": "bits" if self.bits else "rounding",
            "reason": self.reason,
            "widths": list(self.widths),
            "expected_speed": self.expected_speed,
        }


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
            context, otherwise 0.
        requested_kv_bytes: `kv_bytes` at `requested_context_tokens`, otherwise 0.
        cache_variant: Identifies properties of the KV cache that do not follow from the model and its
            options. A saved cache is valid only for the same variant.
        adapters: The adapters applied to the weights.
        exactness: Whether replies are identical to plain decoding. None for models that were not loaded as a
            target.
        sees_images: Whether prompts can contain images.
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
    exactness: Exactness | None = None
    sees_images: bool = False

    @property
    def max_context_tokens(self) -> int:
        """The maximum size that the context can grow to, in tokens."""
        return max(self.requested_context_tokens, self.context_tokens)

    @property
    def max_kv_bytes(self) -> int:
        """Memory used by all cached state at the maximum context size, in bytes."""
        return max(self.requested_kv_bytes, self.kv_bytes)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The metadata in a model's files. Missing values are 0 or empty.

    Attributes:
        family: The publisher's name for the model.
        architecture: Architecture name, such as `llama`.
        parameters: Number of weights.
        quantisation: Quantisation name, such as `Q4_K_M`.
        size_bytes: Total size of the model's files.
        pass_bytes: Bytes of weights that a single-token pass reads, excluding unused experts and an untied
            embedding table.
        kv_bytes: Bytes per token in an f16 KV cache. Sliding-window layers count in full.
        context_tokens: Context length that the model was trained for.
        vocabulary: Hash of the tokens (`TokenList.digest`), which is equal for models with the same tokens.
        chat_template: Whether the model has a chat template.
        experts: Number of experts of a mixture-of-experts model.
        experts_used: Number of experts that process each token.
        heads: Names of the heads in the files, such as MTP. Heads draft from a model's hidden states.
        hidden_size: Number of values in a hidden state. For a head, this refers to the target's hidden
            states.
        layers: Number of layers.
        read_layers: For a head, the layers of the target whose hidden states it reads, if the files say so.
        draft_vocab_size: For a head, how many of the target's tokens it can draft, if the files say so.
        sampling: The recommended sampling settings in the files, keyed by edgespec's names.
        doubt: Why the backend might reject the files, judging by their headers. Empty if nothing looks
            unusual. `trial_load.why_refused` asks the backend itself.
    """

    kind: ModelKind
    family: str
    architecture: str
    parameters: int
    quantisation: str
    size_bytes: int
    pass_bytes: int
    kv_bytes: int
    context_tokens: int
    vocab_size: int
    vocabulary: str
    chat_template: bool
    licence: str
    experts: int = 0
    experts_used: int = 0
    heads: tuple[str, ...] = ()
    hidden_size: int = 0
    layers: int = 0
    read_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The matrix that converts hidden states to logits.

    Attributes:
        type_name: Quantisation type, such as `Q6_K`.
        size_bytes: Size of the matrix.
        hidden_size: Number of values per hidden state.
        vocabulary_size: Number of logits per token.
    """

    type_name: str
    size_bytes: int
    hidden_size: int
    vocabulary_size: int

    @property
    def row_growth_bytes(self) -> int:
        """Size of a row of logits minus the size of a hidden state, in bytes."""
        return (self.vocabulary_size - self.hidden_size) * _FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class PassWeights:
    """The weights that a single-token pass reads.

    Attributes:
        bytes_of: Bytes of weights by type, such as `{"Q4_K": 3_000_000_000, "Q6_K": 1_000_000_000}`.
        layers: Number of layers.
        output: The output layer, which is included in `bytes_of`. None if the token embedding doubles as the
            output layer.
    """

    bytes_of: Mapping[str, int]
    layers: int
    output: OutputLayer | None = None

    @property
    def total_bytes(self) -> int:
        """Total size of the weights in bytes."""
        return sum(self.bytes_of.values())
