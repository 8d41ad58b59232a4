"""Checks of values that come from outside, where types are only a hope."""

from __future__ import annotations

import os
from numbers import Real

from edgespec.errors import OptionError

__all__ = ["flag", "number", "path_text", "text", "whole_number"]


def whole_number(name: str, value: object, low: int, high: int, hint: str = "") -> int:
    """`value` if it is a whole number from low to high. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        above = isinstance(value, int) and value > high
        span = f"from {low} to {high}" if above or high < 1 << 31 else f"from {low} up"
        raise OptionError(f"{name} is {value!r}", f"give a whole number {span}{hint}")
    return value


def number(name: str, value: object, wanted: str) -> float:
    """`value` if it is a number, of whatever size. wanted: which are allowed. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} is {value!r}", f"give a number {wanted}")
    return float(value)


def flag(name: str, value: object) -> bool:
    """`value` if it is True or False. Raises OptionError."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", "give True or False")
    return value


def text(name: str, value: object, wanted: str) -> str:
    """`value` if it is a text. wanted: which are allowed. Raises OptionError."""
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r}", f"give {wanted}, as a text")
    return value


def path_text(name: str, value: object) -> str:
    """The path that `value` is, as a text. Raises OptionError."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return text(name, path, "one path")
