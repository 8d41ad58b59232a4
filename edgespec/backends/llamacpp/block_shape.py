"""Read and check the metadata that describes the blocks of a block-diffusion head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.gguf_header import GgufHeader, read_header
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.heads.dflash_config import MAX_BLOCK_TOKENS

__all__ = ["BlockShape", "check_head_kind", "read_block_shape"]

# Block size that llama.cpp assumes if the metadata does not contain one.
_DEFAULT_BLOCK_TOKENS = 16
# Metadata keys for which llama.cpp expects a single value rather than one per layer.
_SAME_IN_ALL_LAYERS = (
    "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "rope.dimension_count",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The layout of the blocks that a head drafts.

    A block consists of the last emitted token, followed by mask tokens. A pass over a block returns one row
    of logits per token.

    Attributes:
        tokens: Number of tokens in a block.
        mask_token: Id of the mask token.
        first_row: Index of the row that predicts the first draft token. It is 1 for DFlash heads, in which
            each mask token predicts the token at its own position. It is 0 for most DSpark heads, in which
            each token of the block predicts the next one.
        causal: Whether each token of a block attends only to earlier tokens, rather than to the whole block.
        has_markov: Whether the logits also depend on the previous draft token, as in DSpark heads.
        candidates: Number of candidates per draft token between which the path selector of a DFlash 2 head
            chooses. 0 for other heads.
    """

    tokens: int
    mask_token: int
    first_row: int
    causal: bool
    has_markov: bool
    candidates: int

    @property
    def draft_length(self) -> int:
        """Number of draft tokens per pass."""
        return self.tokens - self.first_row


def check_head_kind(path: Path) -> None:
    """Raise CapabilityError if edgespec cannot run the kind of block-diffusion head in a GGUF file."""
    if read_header(path).architecture_value("hyper_connection_count", 0):
        raise CapabilityError(
            f"{path} is a DeepSeek-V4 DSpark head, which edgespec cannot run",
            "choose a DFlash or DSpark head",
        )


def read_block_shape(path: Path, vocab_size: int) -> BlockShape:
    """Read the layout of a head's blocks from its GGUF file.

    Args:
        path: The head's GGUF file.
        vocab_size: Number of tokens in the target's vocabulary.

    Raises:
        ModelFileError: The metadata is damaged, so running the head could make llama.cpp end the process.
    """
    header = read_header(path)
    names = {tensor.name for tensor in header.tensors}
    has_markov, selects = "markov_w1.weight" in names, "selector_hidden.weight" in names
    shape = BlockShape(
        tokens=header.architecture_value("block_size", _DEFAULT_BLOCK_TOKENS),
        mask_token=header.metadata.get("tokenizer.ggml.mask_token_id", -1),
        first_row=0 if header.architecture_value("sample_from_anchor", has_markov) is True else 1,
        causal=header.architecture_value("attention.causal", False) is True,
        has_markov=has_markov,
        candidates=header.architecture_value("selector_top_k", 0) if selects else 0,
    )
    problem = _block_problem(header, shape, vocab_size) or _attention_problem(header)
    if problem:
        raise ModelFileError(
            f"the head {path} is damaged: {problem}", "download it again, or use --head none"
        )
    return shape


def _block_problem(header: GgufHeader, shape: BlockShape, vocab_size: int) -> str:
    if not (_is_int(shape.tokens) and 2 <= shape.tokens <= MAX_BLOCK_TOKENS):
        return f"its block_size is {shape.tokens!r}, but must be from 2 to {MAX_BLOCK_TOKENS}"
    if shape.has_markov and header.architecture_value("block_size") is None:
        return "it has no block_size"
    if shape.candidates and (shape.has_markov or shape.first_row == 0):
        return "a DFlash 2 head cannot have a Markov head or draft from its first token"
    if not (_is_int(shape.mask_token) and 0 <= shape.mask_token < vocab_size):
        return f"its mask token has the id {shape.mask_token!r}, but its vocabulary has {vocab_size:,} tokens"
    return ""


def _attention_problem(header: GgufHeader) -> str:
    value = header.architecture_value
    for key in _SAME_IN_ALL_LAYERS:
        if not _is_int(value(key, 0)):
            return f"its {key} is not a whole number"
    heads, size = value("attention.head_count", 0), value("embedding_length", 0)
    kv_heads = value("attention.head_count_kv", heads)
    if not (heads > 0 and kv_heads > 0 and heads % kv_heads == 0):
        return f"its {heads:,} attention heads cannot share {kv_heads:,} key-value heads"
    keys = value("attention.key_length", size // heads)
    values = value("attention.value_length", size // heads)
    if keys != values:
        return f"its keys have the length {keys:,}, but its values have the length {values:,}"
    rotated = value("rope.dimension_count", keys)
    if rotated % 2 or not 0 < rotated <= keys:
        return (
            f"its rope.dimension_count is {rotated:,}, but must be an even number up to the key length of"
            f" {keys:,}"
        )
    sections = np.atleast_1d(value("rope.dimension_sections", 0))
    if sections.dtype.kind not in "iu" or not all(0 <= int(section) <= keys for section in sections):
        return f"its rope.dimension_sections are not whole numbers from 0 to {keys:,}"
    return ""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
