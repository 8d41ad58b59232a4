"""Weights that draft passes can read at lower precision, and therefore faster.

We split each 8-bit weight into its four high and four low bits. Draft passes read only the high bits, which
form a 4-bit weight (as in Any-Precision LLM, arXiv 2402.10517). Other passes read both halves, which together
form exactly the original 8-bit weight: scale * code + bias, where code = 16 * high + low. The total size is
the same. For weights that are not 8-bit, we store an additional low-bit copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten

__all__ = ["LowBitWeights", "SplitEmbedding", "SplitLinear", "install_low_bit_weights", "merge_halves"]

_HALF_BITS = 4
# Mean value of the low four bits of a weight (0 to 15), used when only the high four bits are available.
_MEAN_LOW = 7.5


class LowBitWeights:
    """A model's low-bit weights, and a switch between full and reduced precision.

    Attributes:
        weights: Modules whose weights can be read at reduced precision.
        low: Whether passes currently read the weights at reduced precision.
        zeros: Cached arrays of zeros, keyed by shape and data type.
    """

    def __init__(self) -> None:
        self.weights: list[_SplitWeight | _CopiedWeight] = []
        self.low = False
        self.zeros: dict[tuple[Any, ...], mx.array] = {}

    def zeros_like(self, array: mx.array) -> mx.array:
        """Return a shared array of zeros with the shape and data type of `array`."""
        key = (array.shape, array.dtype)
        if key not in self.zeros:
            self.zeros[key] = mx.zeros_like(array)
        return self.zeros[key]

    @property
    def array_bytes(self) -> int:
        """Size in bytes of the arrays that low-bit drafting adds to the model."""
        return sum(weight.extra_bytes for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """Memory in bytes that low-bit drafting needs, including the arrays of zeros."""
        scales = (weight.scales for weight in self.weights if isinstance(weight, _SplitWeight))
        return self.array_bytes + sum({(one.shape, one.dtype): one.nbytes for one in scales}.values())


class _SplitWeight(Module):
    """An 8-bit affine weight whose four high and four low bits are stored separately.

    Attributes:
        high, low: The packed high and low four bits, uint32 [rows, columns / 8].
        scales, biases: Scales and biases of the 8-bit weight, [rows, groups].
        high_scales: Scales of the high bits, [rows, groups].
        draft_biases: Biases to use when only the high bits are read, [rows, groups].
    """

    def __init__(self, module: Any, low_bits: LowBitWeights) -> None:
        super().__init__()
        codes = module["weight"].view(mx.uint8)
        self.high, self.low = _pack(codes >> _HALF_BITS), _pack(codes & 15)
        self.scales, self.biases = module["scales"], module["biases"]
        self.high_scales = self.scales * 16
        self.draft_biases = self.biases + self.scales * _MEAN_LOW
        if "bias" in module:
            self.bias = module["bias"]
        self.group_size: int = module.group_size
        self._low_bits = low_bits
        self.freeze()

    @property
    def extra_bytes(self) -> int:
        """Size in bytes of the scales and biases used only at reduced precision."""
        return int(self.high_scales.nbytes + self.draft_biases.nbytes)

    def _multiply(self, x: mx.array) -> mx.array:
        low = self._low_bits.low
        y = self._product(x, self.high, self.high_scales, self.draft_biases if low else self.biases)
        if not low:
            y = y + self._product(x, self.low, self.scales, self._low_bits.zeros_like(self.scales))
        return y + self.bias if "bias" in self else y

    def _product(self, x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, weight, scales, biases, True, self.group_size, _HALF_BITS)


class SplitLinear(_SplitWeight):
    """A linear layer whose 8-bit weights are stored as separate high and low halves."""

    def __call__(self, x: mx.array) -> mx.array:
        return self._multiply(x)


class SplitEmbedding(_SplitWeight):
    """An embedding table whose 8-bit weights are stored as separate high and low halves.

    It doubles as the output head. Lookups always read both halves.
    """

    is_head = False

    def __call__(self, tokens: mx.array) -> mx.array:
        weight = merge_halves(self.high[tokens], self.low[tokens])
        return mx.dequantize(weight, self.scales[tokens], self.biases[tokens], self.group_size, 8)

    def as_linear(self, x: mx.array) -> mx.array:
        self.is_head = True
        return self._multiply(x)


def _pack(codes: mx.array) -> mx.array:
    """Pack 4-bit codes (uint8 [..., n]) in mlx's format (uint32 [..., n / 8])."""
    return (codes[..., 0::2] | (codes[..., 1::2] << _HALF_BITS)).view(mx.uint32)


def merge_halves(high: mx.array, low: mx.array) -> mx.array:
    """Merge high and low 4-bit halves (uint32 [..., n / 8]) into 8-bit codes (uint32 [..., n / 4])."""
    parts = [(half.view(mx.uint8) & 15, half.view(mx.uint8) >> _HALF_BITS) for half in (high, low)]
    (high_even, high_odd), (low_even, low_odd) = parts
    codes = mx.stack([(high_even << _HALF_BITS) | low_even, (high_odd << _HALF_BITS) | low_odd], axis=-1)
    return codes.flatten(-2).view(mx.uint32)


_COPY_NAMES = ("copy_weight", "copy_scales", "copy_biases")


class _CopiedWeight:
    """Mixin for modules that store an additional, lower-bit copy of their weight."""

    _low_bits: LowBitWeights
    copy_group_size: int
    copy_bits: int
    is_head = False

    @property
    def extra_bytes(self) -> int:
        return sum(self[name].nbytes for name in _COPY_NAMES)  # type: ignore[index]

    def _multiply_copy(self, x: mx.array) -> mx.array:
        weight, scales, biases = (self[name] for name in _COPY_NAMES)  # type: ignore[index]
        y = mx.quantized_matmul(x, weight, scales, biases, True, self.copy_group_size, self.copy_bits)
        return y + self["bias"] if "bias" in self else y  # type: ignore[index,operator]


def _copied_linear(base: type) -> type:
    """Create a subclass of a linear layer class that uses a low-bit copy of its weight in draft passes."""

    class CopiedLinear(_CopiedWeight, base):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> Any:
            return self._multiply_copy(x) if self._low_bits.low else super().__call__(x)

    return CopiedLinear


def _copied_embedding(base: type) -> type:
    class CopiedEmbedding(_CopiedWeight, base):  # type: ignore[misc]
        def as_linear(self, x: mx.array) -> Any:
            self.is_head = True
            return self._multiply_copy(x) if self._low_bits.low else super().as_linear(x)

    return CopiedEmbedding


_TABLES = (Embedding, QuantizedEmbedding)
_COPIES: dict[type, Any] = {kind: _copied_linear(kind) for kind in (Linear, QuantizedLinear)}
_COPIES |= {kind: _copied_embedding(kind) for kind in _TABLES}
_SPLITS: dict[type, Any] = {QuantizedLinear: SplitLinear, QuantizedEmbedding: SplitEmbedding}
# Bits per weight in a low-bit copy, as pairs (minimum bits of the original weight, bits of the copy). The
# first matching pair is used.
_COPY_BITS = ((8, 4), (4, 3), (3, 2))


def install_low_bit_weights(model: Any, trace_pass: Callable[[], object]) -> LowBitWeights:
    """Replace a model's linear layers and output head with modules that support reduced precision.

    Mixture-of-experts layers, and weights that DoRA adapters read directly, are not replaced.

    Args:
        model: An mlx `nn.Module`.
        trace_pass: Builds the graph of one pass, to find embedding tables that double as the output head.
    """
    low_bits = LowBitWeights()
    modules = model.named_modules()
    dora_parts = {
        id(part) for _, one in modules if type(one).__name__.startswith("DoRA") for part in one.values()
    }
    before = {name: one for name, one in modules if type(one) in _COPIES and id(one) not in dora_parts}
    candidates = {name: _low_bit_module(module, low_bits) for name, module in before.items()}
    replaced = {name: module for name, module in candidates.items() if module is not None}
    model.update_modules(tree_unflatten(list(replaced.items())))
    trace_pass()
    lookups = {name for name in replaced if isinstance(before[name], _TABLES) and not replaced[name].is_head}
    model.update_modules(tree_unflatten([(name, before[name]) for name in lookups]))
    low_bits.weights = [new for name, new in replaced.items() if name not in lookups]
    low_bits.zeros.clear()
    return low_bits


def _low_bit_module(module: Any, low_bits: LowBitWeights) -> Any:
    """Return a replacement for `module` that supports reduced precision, or None if there is none."""
    kind, bits, weight = type(module), 32, module["weight"]
    if "scales" in module:
        bits = module.bits
        if bits == 8 and module.mode == "affine":
            return _SPLITS[kind](module, low_bits)
        weight = mx.dequantize(
            weight, module["scales"], module.get("biases"), module.group_size, bits, mode=module.mode
        )
    group_size = next((size for size in (64, 32) if weight.shape[-1] % size == 0), None)
    copy_bits = next((copy_bits for min_bits, copy_bits in _COPY_BITS if bits >= min_bits), None)
    if group_size is None or copy_bits is None:
        return None
    copied = _COPIES[kind].__new__(_COPIES[kind])
    dict.update(copied, module)
    vars(copied).update(vars(module))
    copied._low_bits, copied.copy_group_size, copied.copy_bits = low_bits, group_size, copy_bits
    for name, array in zip(_COPY_NAMES, mx.quantize(weight, group_size, copy_bits), strict=True):
        setattr(copied, name, array)
    return copied
