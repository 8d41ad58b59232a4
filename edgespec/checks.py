"""Checks of values that come from outside, where types are only a hope."""

from __future__ import annotations

from edgespec.errors import OptionError

__all__ = ["whole_number"]


def whole_number(name: str, value: object, low: int, high: int, hint: str = "") -> int:
    """`value` if it is a whole number from low to high. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        above = isinstance(value, int) and value > high
        span = f"from {low} to {high}" if above or high < 1 << 31 else f"from {low} up"
        raise OptionError(f"{name} is {value!r}", f"give a whole number {span}{hint}")
    return value
