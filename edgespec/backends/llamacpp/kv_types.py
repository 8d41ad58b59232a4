"""What the KV cache is made of: the types of keys and values, and the bytes they take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.devices import on_cpu
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.native import library
from edgespec.errors import OptionError

__all__ = [
    "SMALL_KERNEL_MAX_ROWS",
    "KvTypes",
    "choose_kv_types",
    "kv_bytes_per_token",
    "parse_kv_types",
    "prefill_kernel_differs",
]

# The most rows that llama.cpp's CPU attention does not read with the kernel for many, where it has one.
SMALL_KERNEL_MAX_ROWS = 63
# ggml's number of a type, and the bytes of 32 elements.
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
# Up to this size of a cache, `auto` prefers passes that agree to the bit over a quick prefill.
_SMALL_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class KvTypes:
    """The types of keys and of values, by name."""

    keys: str
    values: str

    def bytes_per_token(self, f16_bytes: int) -> int:
        """What a token takes where it takes `f16_bytes` in f16, keys as much as values."""
        return f16_bytes * (_TYPES[self.keys][1] + _TYPES[self.values][1]) // (2 * _TYPES["f16"][1])

    @property
    def can_shift_keys(self) -> bool:
        """Whether cached keys can be moved to other positions.

        The library has no kernel for bf16, and crashes on quantised keys whose heads are not of 64 elements.
        """
        return self.keys in ("f32", "f16")

    @property
    def has_single_kernel(self) -> bool:
        """Whether llama.cpp's CPU attention has one for all passes, of however many rows and threads."""
        return self.keys != self.values or self.keys not in ("f32", "f16")

    @property
    def text(self) -> str:
        """As a person writes them."""
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"

    @property
    def numbers(self) -> tuple[int, int]:
        """ggml's numbers of both."""
        return _TYPES[self.keys][0], _TYPES[self.values][0]


def choose_kv_types(options: LoadOptions, f16_bytes: int, *, alike: bool = False) -> KvTypes:
    """The types that `options.kv_type` asks for, for a cache of so many bytes in f16. Raises OptionError.

    alike: keys and values have to be of one type.

    For f16 values llama.cpp's CPU attention has three kernels: for one token over a long context, for a
    few, and for many. They add up in different orders and in half precision, so that a plain step and a
    draft's pass disagree a little. For bf16 values, as large, it has one kernel for all, which adds up in
    single precision but prefills more slowly. `auto` takes it where that cannot be felt, and where
    `options.exact`.
    """
    if options.kv_type == "auto":
        # A draft may round as it likes.
        wanted = (options.exact or f16_bytes <= _SMALL_CACHE_BYTES) and not options.is_draft
        can = on_cpu(options) and options.flash_attention != "off" and not alike
        return KvTypes("f16", "bf16") if wanted and can else KvTypes("f16", "f16")
    types = parse_kv_types(options.kv_type)
    if alike and types.keys != types.values:
        raise OptionError(
            f"kv_type is {types.text!r}, and this model keeps keys and values as one",
            f"use --kv-type {types.keys} or --kv-type auto",
        )
    return types


def prefill_kernel_differs(types: KvTypes, options: LoadOptions, threads: int) -> bool:
    """Whether many rows are read by another kernel than steps and drafts, which are alike.

    The kernel of few rows is that of steps with one thread only: among more a step is split.
    """
    return threads == 1 and on_cpu(options) and not types.has_single_kernel


def parse_kv_types(text: str) -> KvTypes:
    """`f16` for both, `q8_0/f16` for keys and values. Raises OptionError."""
    keys, _, values = text.partition("/")
    for name in (keys, values or keys):
        if name not in _TYPES:
            raise OptionError(
                f"kv_type is {text!r}",
                f"choose auto, one of {', '.join(_TYPES)}, or two for keys and values such as q8_0/f16",
            )
    return KvTypes(keys, values or keys)


def has_latent_attention(weights: Any) -> bool:
    """Whether keys and values of a token are one vector of all heads (DeepSeek-V2, arXiv 2405.04434)."""
    arch = metadata(weights, "general.architecture") or ""
    return bool(metadata(weights, f"{arch}.attention.key_length_mla"))


def kv_bytes_per_token(weights: Any, types: KvTypes) -> int:
    """Bytes of keys and values for one token in all layers."""
    lib = library()
    arch = metadata(weights, "general.architecture") or ""
    head_size = lib.llama_model_n_embd(weights) // (lib.llama_model_n_head(weights) or 1)
    key_size = int(metadata(weights, f"{arch}.attention.key_length") or head_size)
    value_size = int(metadata(weights, f"{arch}.attention.value_length") or head_size)
    listed = re.findall(r"\d+", metadata(weights, f"{arch}.attention.head_count_kv") or "")
    layers: int = lib.llama_model_n_layer(weights)
    heads = sum(map(int, listed)) if len(listed) > 1 else lib.llama_model_n_head_kv(weights) * layers
    if has_latent_attention(weights):
        # With latent attention the values are a part of the keys (DeepSeek-V2, arXiv 2405.04434).
        value_size = 0
    return int(heads * (key_size * _TYPES[types.keys][1] + value_size * _TYPES[types.values][1]) // 32)
