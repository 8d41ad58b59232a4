"""Metadata of a model as stated in its files, in one form for all backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Kind", "ModelInfo"]

Kind = Literal["model", "projector", "adapter", "embedding", "head", "other"]
"""The kind of a file. Only a `model` is a complete language model that writes text."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Metadata of a model. 0 and empty strings stand for values that the files do not state.

    Attributes:
        kind: Whether this is a language model or another kind of file.
        family: Name that the publisher gave the model.
        architecture: Architecture name, such as `llama`.
        parameters: Number of weights.
        quantisation: Quantisation name, such as `Q4_K_M`.
        size_bytes: Size of all its files.
        pass_bytes: Bytes of weights that a pass over one token reads. Unused experts and a separate embedding
            table do not count.
        kv_bytes: Bytes of one token in an f16 KV cache. Layers with a sliding window count in full.
        context_tokens: Context that the model was trained for.
        vocab_size: Number of tokens.
        vocabulary: Hash of the tokens, which is equal for models with the same tokens (`TokenList.digest`).
        chat_template: Whether the model has a chat template.
        licence: Licence stated in the files.
        experts: Number of experts of a mixture-of-experts model.
        experts_used: Number of experts that process each token.
        heads: Heads in the files that can draft from its hidden states, such as MTP.
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
