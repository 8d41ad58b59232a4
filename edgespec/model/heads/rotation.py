"""Rotary position embeddings (RoPE): their settings, with the scaling of Llama 3, linear scaling and YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.model.heads.products import Array

__all__ = ["ROPE_KINDS", "RopeSettings", "Rotation", "llama3_divisors", "parse_rope", "positive"]

# Kinds of RoPE scaling that `Rotation` and llama.cpp's heads support.
ROPE_KINDS = ("default", "llama3", "linear", "yarn")
# Default context length before scaling, in tokens, if the settings lack it. The values match mlx-lm's.
_LLAMA3_ORIGINAL_TOKENS, _YARN_ORIGINAL_TOKENS = 8192.0, 4096.0
# Settings that must be positive, because frequencies are divided by them or their logarithm is computed.
_POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary embedding settings.

    Attributes:
        theta: Base of the frequencies.
        kind: The type of scaling, such as `llama3` or `yarn`. `default` means no scaling.
        scaling: Settings of the scaling, in the format of Hugging Face's `rope_scaling`. May be empty.
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
        # M-RoPE gives text tokens the same position in all sections, so it equals ordinary RoPE.
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
        raise ValueError(f"{name} is {value!r}, but must be a positive number")
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
            raise ValueError("rope_scaling results in rotation frequencies that are not finite")

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
