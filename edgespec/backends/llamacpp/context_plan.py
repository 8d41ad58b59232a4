"""The size and layout of a llama.cpp context, and the data types of its KV cache."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from edgespec.backends.llamacpp.devices import on_cpu
from edgespec.backends.llamacpp.metadata import architecture_metadata, has_compressed_keys
from edgespec.backends.llamacpp.native import library
from edgespec.errors import OptionError
from edgespec.model.base import LoadOptions

__all__ = ["MAX_WIDTH", "ContextPlan", "KvTypes", "choose_kv_types", "kv_bytes_per_token"]

# For each KV cache type, its ggml_type number and the size of 32 elements in bytes.
_TYPES = {
    "f32": (0, 128),
    "f16": (1, 64),
    "bf16": (30, 64),
    "q8_0": (8, 34),
    "q5_1": (7, 24),
    "q5_0": (6, 22),
    "q4_1": (3, 20),
    "iq4_nl": (20, 18),
    "q4_0": (2, 18),
}
# Default maximum number of tokens per forward pass for which logits are computed. It limits the size of the
# logits buffer.
MAX_WIDTH = 256


@dataclass(frozen=True, slots=True)
class KvTypes:
    """The data types of keys and values, as ggml type names."""

    keys: str
    values: str

    def bytes_per_token(self, f16_bytes: int) -> int:
        """Return the cache size per token in bytes, given its size with f16 keys and values.

        Keys and values must have the same number of elements.
        """
        return f16_bytes * (_TYPES[self.keys][1] + _TYPES[self.values][1]) // (2 * _TYPES["f16"][1])

    @property
    def can_shift_keys(self) -> bool:
        """Whether llama.cpp can move cached keys to other positions.

        llama.cpp has no RoPE kernel for bf16, and crashes on quantised keys unless the head size is 64.
        """
        return self.keys in ("f32", "f16")

    @property
    def text(self) -> str:
        """The types in the format of `--kv-type`, such as `f16` or `q8_0/f16`."""
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"

    @property
    def ggml_types(self) -> tuple[int, int]:
        return _TYPES[self.keys][0], _TYPES[self.values][0]


def choose_kv_types(options: LoadOptions, *, same_type: bool = False) -> KvTypes:
    """Return the data types of cached keys and values for `options.kv_type`.

    `auto` selects f16, or f16 keys and bf16 values if `options.exact` is set. If both types are f16,
    llama.cpp's CPU attention has one kernel for single tokens in long contexts, another for up to 63 tokens,
    and a third for more, and they round differently. If the types differ, it uses a single kernel. With f16
    values, this kernel sums in f16, which takes several times as long where the sums are too small for
    normal f16 numbers. With bf16 values, it sums in f32.

    Args:
        options: The load options.
        same_type: Whether keys and values must have the same type.

    Raises:
        OptionError: `options.kv_type` is unknown, or names two types although `same_type` is set.
    """
    if options.kv_type == "auto":
        supported = on_cpu(options) and options.flash_attention != "off" and not same_type
        return KvTypes("f16", "bf16") if options.exact and supported else KvTypes("f16", "f16")
    types = _parse_kv_types(options.kv_type)
    if same_type and types.keys != types.values:
        raise OptionError(
            f"KV cache type {types.text!r} names two types, but this model stores keys and values together",
            f"use --kv-type {types.keys} or --kv-type auto",
            option="kv_type",
            code="option_not_supported",
        )
    return types


def _parse_kv_types(text: str) -> KvTypes:
    """Parse a single type, such as `f16`, or the types of keys and values, such as `q8_0/f16`.

    Raises:
        OptionError: A type is unknown.
    """
    keys, _, values = text.partition("/")
    for name in (keys, values or keys):
        if name not in _TYPES:
            raise OptionError(
                f"kv_type {text!r} is not a valid KV cache type",
                f"choose auto, one of {', '.join(_TYPES)}, or two of them for keys and values, such as"
                " q8_0/f16",
                option="kv_type",
            )
    return KvTypes(keys, values or keys)


def has_latent_attention(weights: Any) -> bool:
    """Return whether all attention heads share one latent vector per token as both key and value.

    This is the case for MLA (DeepSeek-V2, arXiv 2405.04434) and for DeepSeek-V4.
    """
    return has_compressed_keys(weights) or bool(architecture_metadata(weights, "attention.key_length_mla"))


def kv_bytes_per_token(weights: Any, types: KvTypes) -> int:
    """Return the size of one token's keys and values in bytes, summed over all layers."""
    lib = library()
    head_size = lib.llama_model_n_embd(weights) // (lib.llama_model_n_head(weights) or 1)
    key_size = int(architecture_metadata(weights, "attention.key_length") or head_size)
    value_size = int(architecture_metadata(weights, "attention.value_length") or head_size)
    listed = re.findall(r"\d+", architecture_metadata(weights, "attention.head_count_kv") or "")
    layers: int = lib.llama_model_n_layer(weights)
    heads = sum(map(int, listed)) if len(listed) > 1 else lib.llama_model_n_head_kv(weights) * layers
    if has_latent_attention(weights):
        value_size = 0
    return int(heads * (key_size * _TYPES[types.keys][1] + value_size * _TYPES[types.values][1]) // 32)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The size and layout of a context's KV cache and recurrent states.

    Attributes:
        tokens: The number of KV cells, each of which stores one token.
        kv_types: The data types of keys and values.
        sequences: The maximum number of llama.cpp sequences.
        recurrent: Whether any layers have a recurrent state instead of keys and values.
        undo_tokens: The number of recent tokens that llama.cpp can roll back. It keeps a recurrent state for
            each of them.
        kv_bytes: The total size of KV cells and recurrent states in bytes.
        token_bytes: The size of one KV cell in bytes, for all layers together.
        rows: The maximum number of tokens whose logits a forward pass can compute.
        checkpoint_bytes: The total size in bytes of checkpoints in main memory, or 0 if checkpoints are
            llama.cpp sequences.
        slots: The number of replies that share the context. Each gets an equal share of the KV cells and
            sequences.
    """

    tokens: int
    kv_types: KvTypes
    sequences: int
    recurrent: bool = False
    undo_tokens: int = 0
    kv_bytes: int = 0
    token_bytes: int = 0
    rows: int = MAX_WIDTH
    checkpoint_bytes: int = 0
    slots: int = 1

    def with_tokens(self, tokens: int) -> ContextPlan:
        """Return a copy of this plan with a different number of KV cells."""
        added_bytes = (tokens - self.tokens) * self.token_bytes
        return replace(self, tokens=tokens, kv_bytes=self.kv_bytes + added_bytes)

    @property
    def share(self) -> ContextPlan:
        """One slot's share of this plan."""
        return replace(
            self,
            tokens=self.tokens // self.slots,
            sequences=self.sequences // self.slots,
            kv_bytes=self.kv_bytes // self.slots,
            slots=1,
        )
