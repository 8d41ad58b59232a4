"""Checks of values that come from outside, where types are only a hope."""

from __future__ import annotations

import os
import re
from numbers import Real

from edgespec.errors import OptionError

__all__ = ["check_boolean", "check_integer", "check_number", "check_path", "check_text", "parse_size"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
# Fewer bytes than this nobody means: the unit was left out.
_LEAST_BYTES = 1024
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def check_integer(name: str, value: object, low: int, high: int, hint: str = "") -> int:
    """`value` if it is a whole number from low to high. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        above = isinstance(value, int) and value > high
        span = f"from {low} to {high}" if above or high < 1 << 31 else f"from {low} up"
        raise OptionError(f"{name} is {value!r}", f"give a whole number {span}{hint}")
    return value


def check_number(name: str, value: object, wanted: str) -> float:
    """`value` if it is a number, of whatever size. wanted: which are allowed. Raises OptionError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} is {value!r}", f"give a number {wanted}")
    return float(value)


def parse_size(name: str, value: str | int) -> int:
    """Bytes from `8GiB`, `8GB`, `800M` or a plain number. Raises OptionError."""
    hint = "write it like 8GiB, 8GB or 800MiB"
    if isinstance(value, int) and abs(value) >= 1 << 62:
        raise OptionError(f"{name} is a number beyond any machine", hint)
    match = _SIZE.fullmatch(str(value))
    if not match or (match[3] and not match[2]):
        raise OptionError(f"{name} is {value!r}", hint)
    unit = match[2].lower()
    if not unit and "b" not in match[0].lower() and 0 < float(match[1]) < _LEAST_BYTES:
        raise OptionError(f"{name} is {value!r}, which is in bytes", hint)
    return int(float(match[1]) * (_BINARY_UNITS[unit] if match[3] else _UNITS[unit]))


def check_boolean(name: str, value: object) -> bool:
    """`value` if it is True or False. Raises OptionError."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", "give True or False")
    return value


def check_text(name: str, value: object, wanted: str) -> str:
    """`value` if it is a text. wanted: which are allowed. Raises OptionError."""
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r}", f"give {wanted}, as a text")
    return value


def check_path(name: str, value: object) -> str:
    """The path that `value` is, as a text. Raises OptionError."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return check_text(name, path, "one path")
