"""Rotary embedding (RoPE) settings of a head: `rope_scaling` or `rope_parameters` in its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RopeSettings", "parse_rope", "positive"]

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
