"""Validate values in a head's configuration, which may be damaged or malicious."""

from __future__ import annotations

import math

__all__ = ["positive"]


def positive(name: str, value: object) -> float:
    """Return the value of a setting as a number.

    Raises:
        ValueError: The value is not a positive, finite number.
        OverflowError: The value is too large.
    """
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, but must be a positive number")
    return float(value)
