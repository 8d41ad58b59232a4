"""Model metadata in a backend-independent form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ModelInfo", "ModelKind", "OutputLayer", "PassWeights"]

ModelKind = Literal["model", "projector", "adapter", "embedding", "head", "other"]
"""The kind of a model file. Only a `model` can generate text by itself."""

_FLOAT32_BYTES = 4


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
        vocabulary: Hash of the tokens (`TokenList.digest`). It is the same for models with the same tokens.
        chat_template: Whether the model has a chat template.
        experts: Number of experts of a mixture-of-experts model.
        experts_used: Number of experts that process each token.
        heads: Names of the heads in the files, which can draft from a model's hidden states, such as MTP.
        hidden_size: Number of values in a hidden state. For a head, this refers to the target's hidden
            states.
        layers: Number of layers.
        read_layers: For a head, the layers of the target whose hidden states it reads, if the files say so.
        draft_vocab_size: For a head, how many of the target's tokens it can draft, if the files say so.
        sampling: The recommended sampling settings in the files, by edgespec's names.
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
        """How many bytes larger a row of logits is than a hidden state."""
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
        """Bytes of all types."""
        return sum(self.bytes_of.values())
