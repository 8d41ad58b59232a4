"""The metadata of a model, in the same form for all backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Kind", "ModelInfo"]

Kind = Literal["model", "projector", "adapter", "embedding", "head", "other"]
"""The kind of a model file. Only a `model` can generate text by itself."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The metadata in the files of a model. Missing values are 0 or empty.

    Attributes:
        family: The publisher's name for the model.
        architecture: Architecture name, such as `llama`.
        parameters: Number of weights.
        quantisation: Quantisation name, such as `Q4_K_M`.
        size_bytes: Size of all its files.
        pass_bytes: Bytes of weights that a pass over one token reads. Unused experts and a separate embedding
            table do not count.
        kv_bytes: Bytes of one token in an f16 KV cache. Layers with a sliding window count in full.
        context_tokens: Context that the model was trained for.
        vocabulary: Hash of the tokens (`TokenList.digest`), which is equal for models with the same tokens.
        chat_template: Whether the model has a chat template.
        experts: Number of experts of a mixture-of-experts model.
        experts_used: Number of experts that process each token.
        heads: Names of included heads that can draft from the hidden states, such as MTP.
    """

    kind: Kind
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
