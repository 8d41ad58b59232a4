"""Head layers implemented in NumPy: attention with a KV cache, RoPE, norms and matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.model.heads.tensor_files import StoredTensor

# Minimum number of tokens by which the KV cache grows. Growing copies the cache, so it should be rare.
_MIN_GROWTH_TOKENS = 256
# Kinds of RoPE scaling that `Rotation` and llama.cpp's heads support.
ROPE_KINDS = ("default", "llama3", "linear", "yarn")
# Default context lengths in tokens before scaling, for settings that lack them. The values match mlx-lm's.
_LLAMA3_ORIGINAL_TOKENS, _YARN_ORIGINAL_TOKENS = 8192.0, 4096.0
# RoPE settings that must be positive, because they are used as divisors or in logarithms.
_POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Projections(NamedTuple):
    """The matrices of an attention layer."""

    q: Product
    k: Product
    v: Product
    o: Product


class TreeNodes(NamedTuple):
    """The positions of new tokens in a draft tree, and the tokens that they attend to.

    Attributes:
        positions: The position of each new token in the sequence, int64 [new tokens].
        visible: Whether each new token attends to each tree token, bool [new tokens, tree tokens]. The tree
            tokens are the last ones in the KV cache, including the new tokens. Tokens before the tree are
            always visible.
    """

    positions: NDArray[np.int64]
    visible: NDArray[np.bool_]


class CachedAttention:
    """The attention of a transformer layer, and its KV cache.

    Args:
        projections: The layer's matrices.
        rotation: The layer's rotary position embedding.
        heads: Number of query heads.
        kv_heads: Number of key-value heads. Several query heads can share one.
        head_size: Size of each head's vectors.

    Attributes:
        start: Position of the first token in the KV cache.
        end: `start` plus the number of tokens in the KV cache. Unless the cache contains a draft tree with
            branches, this is the position after the last token.
    """

    def __init__(
        self, projections: Projections, rotation: Rotation, heads: int, kv_heads: int, head_size: int
    ) -> None:
        self.start = self.end = 0
        self._projections, self._rotation = projections, rotation
        self._heads, self._kv_heads, self._head_size = heads, kv_heads, head_size
        # Keys and values [2, kv heads, tokens, head size].
        self._cache: Array = np.empty((2, kv_heads, 0, head_size), np.float32)

    def with_own_cache(self) -> CachedAttention:
        """Return a copy that shares the weights and has its own, empty KV cache."""
        other = copy(self)
        other.start = other.end = 0
        other._cache = self._cache[:, :, :0].copy()
        return other

    def restart(self, position: int) -> None:
        """Clear the KV cache and make it start at `position`."""
        self.start = self.end = position

    def truncate(self, end: int) -> None:
        """Remove the keys and values from position `end` onwards."""
        self.end = min(self.end, end)
        self.start = min(self.start, self.end)

    def copy(self, start: int, end: int) -> bytes:
        """Return a copy of the keys and values at positions [start, end), for `restore`."""
        return self._cache[:, :, start - self.start : end - self.start].tobytes()

    def restore(self, tokens: int, data: bytes) -> bool:
        """Append the keys and values of `tokens` tokens, or return False if `data` has the wrong size."""
        shape = (2, self._kv_heads, tokens, self._head_size)
        values = np.frombuffer(data, np.float32) if len(data) % 4 == 0 else np.empty(0, np.float32)
        if values.size != np.prod(shape):
            return False
        used = self.end - self.start
        self._reserve(used + tokens)
        self._cache[:, :, used : used + tokens] = values.reshape(shape)
        self.end += tokens
        return True

    def append(self, x: Array, nodes: TreeNodes | None = None) -> None:
        """Append the keys and values of inputs [tokens, size] to the KV cache.

        Args:
            x: The new tokens' inputs.
            nodes: The tokens' nodes in a draft tree. None if they follow the last token in the cache.
        """
        used, count = self.end - self.start, len(x)
        self._reserve(used + count)
        keys = self._split(self._projections.k(x))
        self._cache[0, :, used : used + count] = self._rotation(keys, self._positions(count, nodes))
        self._cache[1, :, used : used + count] = self._split(self._projections.v(x))
        self.end += count

    def run(self, x: Array, nodes: TreeNodes | None = None) -> Array:
        """Append inputs to the KV cache like `append`, and return the output [tokens, size]."""
        count = len(x)
        queries = self._rotation(self._split(self._projections.q(x)), self._positions(count, nodes))
        self.append(x, nodes)
        used = self.end - self.start
        visible = np.tril(np.ones((count, count), bool)) if nodes is None else nodes.visible
        visible = np.hstack([np.ones((count, used - visible.shape[1]), bool), visible])
        keys, values = self._cache[:, :, :used]
        # Stack the queries of all heads that share a key head, so that a single matrix product suffices.
        stacked = queries.reshape(self._kv_heads, -1, self._head_size)
        scores = stacked @ keys.swapaxes(1, 2) / np.float32(np.sqrt(self._head_size))
        scores = np.where(np.tile(visible, (stacked.shape[1] // count, 1)), scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed: Array = (weights / weights.sum(axis=-1, keepdims=True)) @ values
        return self._projections.o(mixed.reshape(self._heads, count, -1).swapaxes(0, 1).reshape(count, -1))

    def _positions(self, count: int, nodes: TreeNodes | None) -> NDArray[np.int64]:
        return np.arange(self.end, self.end + count) if nodes is None else nodes.positions

    def _reserve(self, tokens: int) -> None:
        """Make room for the keys and values of `tokens` more tokens."""
        used = self.end - self.start
        if tokens > self._cache.shape[2]:
            grown = max(tokens, used * 3 // 2, used + _MIN_GROWTH_TOKENS)
            cache = np.empty((*self._cache.shape[:2], grown, self._head_size), np.float32)
            cache[:, :, :used] = self._cache[:, :, :used]
            self._cache = cache

    def _split(self, rows: Array) -> Array:
        """Split rows [tokens, heads * head size] into heads, and return [heads, tokens, head size]."""
        return rows.reshape(len(rows), -1, self._head_size).swapaxes(0, 1)


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary embedding settings.

    Attributes:
        theta: Base of the frequencies.
        kind: The type of scaling, such as `llama3` or `yarn`. `default` means no scaling.
        scaling: Scaling settings, in the format of Hugging Face's `rope_scaling`. May be empty.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)


def parse_rope(config: Mapping[str, Any]) -> RopeSettings:
    """Return the rotary embedding settings in a head's configuration.

    Raises:
        ValueError: A setting is not a positive number.
        OverflowError: A setting is too large.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = scaling if isinstance(scaling, dict) else {}
    theta = config.get("rope_theta") or scaling.get("rope_theta") or RopeSettings().theta
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "mrope":
        # M-RoPE gives text tokens the same position in all sections, so for text it is equivalent to ordinary
        # RoPE.
        kind, scaling = "default", {}
    numbers = {name: positive(name, scaling[name]) for name in _POSITIVE if scaling.get(name) is not None}
    if kind == "llama3" and numbers.get("low_freq_factor") == numbers.get("high_freq_factor"):
        raise ValueError("low_freq_factor and high_freq_factor must both be set, and must differ")
    return RopeSettings(positive("rope_theta", theta), kind, scaling)


def positive(name: str, value: object) -> float:
    """Return the value of a setting as a number.

    Raises:
        ValueError: The value is not a positive, finite number.
        OverflowError: The value is too large.
    """
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, not {value!r}")
    return float(value)


class Rotation:
    """Applies rotary position embeddings to vectors.

    Each value in the first half of a vector is paired with its counterpart in the second half.

    Args:
        rope: The RoPE settings.
        size: Size of the vectors. Must be even.

    Raises:
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing, invalid or not supported.
    """

    def __init__(self, rope: RopeSettings, size: int) -> None:
        if rope.kind not in ROPE_KINDS:
            raise ValueError(f"edgespec does not support rope_scaling of type {rope.kind!r}")
        self._frequencies = rope.theta ** (-np.arange(0, size, 2) / size)
        self._scale = np.float32(1.0)
        if rope.kind == "linear":
            self._frequencies /= float(rope.scaling["factor"])
        elif rope.kind == "llama3":
            self._frequencies /= llama3_divisors(rope, size)
        elif rope.kind == "yarn":
            self._frequencies /= _yarn_divisors(rope, size)
            self._scale = np.float32(_yarn_scale(rope))
        if not np.isfinite(self._frequencies).all():
            raise ValueError("its rope_scaling produces infinite or undefined values")

    def __call__(self, heads: Array, positions: NDArray[np.int64]) -> Array:
        """Rotate vectors [heads, tokens, size], given the position of each token."""
        angles = np.outer(positions, self._frequencies)
        cos, sin = (part.astype(np.float32) * self._scale for part in (np.cos(angles), np.sin(angles)))
        low, high = np.split(heads, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def llama3_divisors(rope: RopeSettings, size: int) -> NDArray[np.float64]:
    """Return the divisors [size / 2] that Llama 3 applies to the RoPE frequencies.

    High frequencies are unchanged, low frequencies are divided by `factor`, and frequencies in between are
    interpolated.

    Raises:
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing or invalid.
    """
    factor, low, high = (
        float(rope.scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = float(rope.scaling.get("original_max_position_embeddings") or _LLAMA3_ORIGINAL_TOKENS)
    turns = original * rope.theta ** -(np.arange(0, size, 2) / size) / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    divisors: NDArray[np.float64] = 1 / ((1 - kept) / factor + kept)
    return divisors


def _yarn_divisors(rope: RopeSettings, size: int) -> NDArray[np.float64]:
    """Return the divisors [size / 2] that YaRN (arXiv 2309.00071) applies to the RoPE frequencies."""
    settings, factor = rope.scaling, float(rope.scaling["factor"])
    original = float(settings.get("original_max_position_embeddings") or _YARN_ORIGINAL_TOKENS)

    def index_of(turns: float) -> float:
        """Return the index of the frequency that completes `turns` turns within the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(index_of(float(settings.get("beta_fast", 32)))), 0)
    last = min(math.ceil(index_of(float(settings.get("beta_slow", 1)))), size - 1)
    kept = 1 - np.clip((np.arange(size // 2) - first) / ((last - first) or 0.001), 0, 1)
    divisors: NDArray[np.float64] = factor / (factor * kept + (1 - kept))
    return divisors


def _yarn_scale(rope: RopeSettings) -> float:
    """Return the factor by which YaRN scales rotated vectors."""
    settings, factor = rope.scaling, float(rope.scaling["factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    return scale(float(settings.get("mscale", 1))) / scale(float(settings.get("mscale_all_dim", 0)))


Array: TypeAlias = NDArray[np.float32]
# Multiplies an array [rows, inputs] by a matrix and returns [rows, outputs].
Product: TypeAlias = Callable[[Array], Array]
# Function that returns the `Product` for a float16 or float32 matrix [outputs, inputs]. The second argument
# is the matrix's data type in the file (see `StoredTensor`), such as BF16. The matrix must be copied, because
# it may be mapped from a file that could change.
MakeProduct: TypeAlias = Callable[[NDArray[np.floating], str], Product]


class WeightLoader:
    """Reads the weights of a head.

    Args:
        file: The file with the weights, for error messages.
        make_product: Creates the function that multiplies by a matrix.
    """

    def __init__(self, file: Path, make_product: MakeProduct) -> None:
        self._file, self._make_product = file, make_product

    def matrix(self, tensor: StoredTensor) -> Product:
        """Return a function that multiplies by a matrix. Raises ModelFileError if a weight is not finite."""
        return self._make_product(self._finite(tensor), tensor.dtype)

    def linear(self, weight: StoredTensor, bias: StoredTensor | None) -> Product:
        """Return a function that multiplies by a matrix and adds a bias, if any. See `matrix`."""
        product = self.matrix(weight)
        if bias is None:
            return product
        added = self.vector(bias)
        return lambda rows: product(rows) + added

    def rows(self, tensor: StoredTensor) -> Callable[[Sequence[int]], Array]:
        """Return a function that looks up rows of a matrix by index and returns them as [rows, size].

        16-bit matrices keep their type in memory. Raises ModelFileError if a weight is not finite.
        """
        values = np.array(self._finite(tensor), np.float16 if tensor.dtype == "F16" else np.float32)
        if tensor.dtype != "BF16":
            return lambda ids: values[list(ids)].astype(np.float32)
        # BF16 is the upper half of a float32.
        upper = values.view(np.uint16)[:, 1::2].copy()
        return lambda ids: (upper[list(ids)].astype(np.uint32) << 16).view(np.float32)

    def vector(self, tensor: StoredTensor) -> Array:
        """Return a vector in float32. Raises ModelFileError if a weight is not finite."""
        return self._finite(tensor).astype(np.float32)

    def _finite(self, tensor: StoredTensor) -> NDArray[np.floating]:
        values = tensor.read()
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelFileError(
                f"the draft head {self._file} is damaged: some of its weights are infinite or NaN",
                "download it again, or use --head none",
            )
        return values


def silu(x: Array) -> Array:
    """Return `x * sigmoid(x)`, computed with tanh so that large values do not overflow."""
    y: Array = x * (0.5 + 0.5 * np.tanh(0.5 * x))
    return y


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Scale each row to a root mean square of 1, then multiply by `weight`."""
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight
    return y
