"""Weights that are read at full precision or at fewer bits, chosen for each pass.

An 8-bit affine weight is s * code + b with code = 16 * high + low. Kept as two 4-bit weights it takes the
same bytes; the high one alone is a 4-bit model (the idea of Any-Precision LLM, arXiv 2402.10517), and both
together are the very 8-bit weight. Other weights get a copy with fewer bits beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_unflatten

__all__ = ["LowBitWeights", "SplitEmbedding", "SplitLinear", "install_low_bit_weights", "joined"]

_HIGH = 4
# Half of what the low bits may be: added where they are missing.
_MIDDLE = 7.5


class LowBitWeights:
    """What of a model can be read at fewer bits, and whether passes do so now.

    weights: the modules that can. low: passes read few bits.
    """

    def __init__(self) -> None:
        self.weights: list[_Split | _Copied] = []
        self.low = False
        self._zeros: dict[tuple[Any, ...], mx.array] = {}

    @contextmanager
    def lowered(self) -> Iterator[None]:
        """Passes in here read few bits."""
        self.low = True
        try:
            yield
        finally:
            self.low = False

    def zeros(self, like: mx.array) -> mx.array:
        """Offsets of low halves: one array for each shape."""
        key = (like.shape, like.dtype)
        if key not in self._zeros:
            self._zeros[key] = mx.zeros_like(like)
        return self._zeros[key]

    def forget_zeros(self) -> None:
        """They are made again when they are needed."""
        self._zeros = {}

    @property
    def array_bytes(self) -> int:
        """Bytes of the model's arrays that would not be there without this."""
        return sum(weight.extra_bytes for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """The same, with the zeros."""
        shapes = {
            (one.scales.shape, one.scales.dtype): one.scales.nbytes
            for one in self.weights
            if isinstance(one, _Split)
        }
        return self.array_bytes + sum(shapes.values())


class _Split(Module):
    """An 8-bit affine weight as its high and its low four bits.

    high, low: uint32 [rows, columns / 8]; scales, biases: as they were, [rows, groups];
    high_scales, draft_biases: those of the high bits, alone.
    """

    def __init__(self, module: Any, low_bits: LowBitWeights) -> None:
        super().__init__()
        codes = module["weight"].view(mx.uint8)
        self.high, self.low = _packed(codes >> _HIGH), _packed(codes & 15)
        self.scales, self.biases = module["scales"], module["biases"]
        self.high_scales = self.scales * 16
        self.draft_biases = self.biases + self.scales * _MIDDLE
        if "bias" in module:
            self.bias = module["bias"]
        self.group_size: int = module.group_size
        self._low_bits = low_bits
        self.freeze()

    @property
    def extra_bytes(self) -> int:
        """More than the 8-bit weight takes."""
        return int(self.high_scales.nbytes + self.draft_biases.nbytes)

    def _times(self, x: mx.array) -> mx.array:
        low = self._low_bits.low
        y = self._product(x, self.high, self.high_scales, self.draft_biases if low else self.biases)
        if not low:
            y = y + self._product(x, self.low, self.scales, self._low_bits.zeros(self.scales))
        return y + self.bias if "bias" in self else y

    def _product(self, x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, weight, scales, biases, True, self.group_size, _HIGH)


class SplitLinear(_Split):
    def __call__(self, x: mx.array) -> mx.array:
        return self._times(x)


class SplitEmbedding(_Split):
    """A table that is also the head; what is looked up has all its bits."""

    is_head = False

    def __call__(self, tokens: mx.array) -> mx.array:
        weight = joined(self.high[tokens], self.low[tokens])
        return mx.dequantize(weight, self.scales[tokens], self.biases[tokens], self.group_size, 8)

    def as_linear(self, x: mx.array) -> mx.array:
        self.is_head = True
        return self._times(x)


def _packed(codes: mx.array) -> mx.array:
    """Four-bit codes, uint8 [..., n], as mlx packs them: uint32 [..., n / 8]."""
    return (codes[..., 0::2] | (codes[..., 1::2] << _HIGH)).view(mx.uint32)


def joined(high: mx.array, low: mx.array) -> mx.array:
    """The packed 8-bit codes of two halves."""
    parts = [(half.view(mx.uint8) & 15, half.view(mx.uint8) >> _HIGH) for half in (high, low)]
    (high_even, high_odd), (low_even, low_odd) = parts
    codes = mx.stack([(high_even << _HIGH) | low_even, (high_odd << _HIGH) | low_odd], axis=-1)
    return codes.flatten(-2).view(mx.uint32)


class _Copied:
    """Few bits of a weight beside all of them: few_weight, few_scales, few_biases."""

    _low_bits: LowBitWeights
    few_group: int
    few_bits: int

    @property
    def extra_bytes(self) -> int:
        """More than the weight takes without its copy."""
        return sum(self[name].nbytes for name in _FEW)  # type: ignore[index]

    def _few(self, x: mx.array) -> mx.array:
        weight, scales, biases = (self[name] for name in _FEW)  # type: ignore[index]
        return mx.quantized_matmul(x, weight, scales, biases, True, self.few_group, self.few_bits)


_FEW = ("few_weight", "few_scales", "few_biases")


class _CopiedLinear(_Copied):
    def __call__(self, x: mx.array) -> mx.array:
        if not self._low_bits.low:
            y: mx.array = super().__call__(x)  # type: ignore[misc]
            return y
        y = self._few(x)
        return y + self["bias"] if "bias" in self else y  # type: ignore[index,operator]


class _CopiedTable(_Copied):
    is_head = False

    def as_linear(self, x: mx.array) -> mx.array:
        self.is_head = True
        y: mx.array = self._few(x) if self._low_bits.low else super().as_linear(x)  # type: ignore[misc]
        return y


class CopiedLinear(_CopiedLinear, Linear):
    pass


class CopiedQuantizedLinear(_CopiedLinear, QuantizedLinear):
    pass


class CopiedEmbedding(_CopiedTable, Embedding):
    pass


class CopiedQuantizedEmbedding(_CopiedTable, QuantizedEmbedding):
    pass


_COPIES: dict[type, Any] = {
    Linear: CopiedLinear,
    QuantizedLinear: CopiedQuantizedLinear,
    Embedding: CopiedEmbedding,
    QuantizedEmbedding: CopiedQuantizedEmbedding,
}
_SPLITS: dict[type, Any] = {QuantizedLinear: SplitLinear, QuantizedEmbedding: SplitEmbedding}


def install_low_bit_weights(model: Any, try_once: Callable[[], object]) -> LowBitWeights:
    """Put halves or copies in the place of every linear weight of a model; nothing is computed yet.

    try_once: builds a pass, which shows what tables are heads too; others stay as they are. So do experts,
    and what DoRA adapters read themselves.
    """
    low_bits = LowBitWeights()
    modules = model.named_modules()
    theirs = {
        id(part) for _, one in modules if type(one).__name__.startswith("DoRA") for part in one.values()
    }
    before = {
        name: module for name, module in modules if type(module) in _COPIES and id(module) not in theirs
    }
    made = [(name, new) for name, one in before.items() if (new := _with_few_bits(one, low_bits)) is not None]
    model.update_modules(tree_unflatten(made))
    try_once()
    lookups = [name for name, new in made if isinstance(new, _TABLES) and not new.is_head]
    model.update_modules(tree_unflatten([(name, before[name]) for name in lookups]))
    low_bits.weights = [new for name, new in made if name not in lookups]
    low_bits.forget_zeros()  # the pass was not computed
    return low_bits


_TABLES = (SplitEmbedding, _CopiedTable)


def _with_few_bits(module: Any, low_bits: LowBitWeights) -> Any:
    """What replaces a module; None where fewer bits are not to be had."""
    kind, bits, weight = type(module), 32, module["weight"]
    if "scales" in module:
        bits = module.bits
        if bits == 8 and module.mode == "affine":
            return _SPLITS[kind](module, low_bits)
        weight = mx.dequantize(
            weight, module["scales"], module.get("biases"), module.group_size, bits, mode=module.mode
        )
    group = next((size for size in (64, 32) if weight.shape[-1] % size == 0), None)
    few = next((few for most, few in _FEWER if bits >= most), None)
    if group is None or few is None:
        return None
    kept = _COPIES[kind].__new__(_COPIES[kind])
    # The same module, of a class that knows of its copy.
    dict.update(kept, module)
    vars(kept).update(vars(module))
    kept._low_bits, kept.few_group, kept.few_bits = low_bits, group, few
    for name, array in zip(_FEW, mx.quantize(weight, group, few), strict=True):
        setattr(kept, name, array)
    return kept


# (weights of at least so many bits, bits of their copies)
_FEWER = ((8, 4), (4, 3), (3, 2))
