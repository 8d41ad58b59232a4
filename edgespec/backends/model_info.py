"""Facts about a model that its files state, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Kind", "ModelInfo"]

Kind = Literal["model", "projector", "adapter", "embedding", "head", "other"]
"""What is in a file: a language model, or something that needs one or is none."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a model from its metadata. 0 and empty texts stand for what the files do not say.

    family: the name the model was given by its maker. size_bytes: of all its files. pass_bytes: weights that
    one token reads: of experts those that are used, of an embedding table next to nothing. kv_bytes: of one
    token in an f16 cache, layers with a window counted like the others. vocabulary: equal where every token
    means the same (see `TokenList.digest`). experts: of a mixture, and experts_used for one token. heads:
    what can draft on its hidden states, such as MTP.
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
