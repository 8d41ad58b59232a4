"""Validate option values from the Python API and the settings file."""

from __future__ import annotations

import math
import operator
import os
import re
from numbers import Real
from typing import Any

from edgespec.errors import EdgespecError, OptionError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
# Smallest memory size accepted without a unit. `--memory 8` probably means 8 GiB, not 8 bytes.
_MIN_UNITLESS_BYTES = 1024
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def as_integer(value: Any) -> int | None:
    """Return `value` as an int if it is an integer of any type but not a boolean, or else None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: object, low: int, high: int, hint: str = "") -> int:
    """Return `value` if it is an integer from `low` to `high` and not a boolean.

    Args:
        name: The option's name, for the error message.
        value: The value to check.
        low: The smallest valid value.
        high: The largest valid value.
        hint: An alternative to append to the error message, such as `, or method none`.

    Raises:
        OptionError: `value` is not an integer, or is out of range.
    """
    integer = as_integer(value)
    if integer is None or not low <= integer <= high:
        above = integer is not None and integer > high
        at_least = {0: "a non-negative integer", 1: "a positive integer"}.get(
            low, f"an integer of at least {low}"
        )
        allowed = f"an integer from {low} to {high}" if above or high < 1 << 31 else at_least
        next_step = f"choose another number{hint}" if hint else ""
        shown = value if integer is None else integer
        raise OptionError(f"{name} must be {allowed}, not {shown!r}", next_step)
    return integer


def check_number(name: str, value: object, allowed: str) -> float:
    """Return `value` as a float if it is a number and not a boolean. The caller checks the range.

    Args:
        name: The option's name, for the error message.
        value: The value to check.
        allowed: The valid range in words, for the error message.

    Raises:
        OptionError: `value` is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{name} must be a number {allowed}, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        # The integer is too large for a float. The caller's range check rejects NaN.
        return math.nan


def parse_size(name: str, value: str | int) -> int:
    """Convert a size such as `8GiB`, `8GB`, `800M` or a plain number to bytes.

    Args:
        name: The option's name, for the error message.
        value: The size to convert.

    Raises:
        OptionError: `value` is not a size, or is so small that it probably lacks a unit.
    """
    hint = "use a size such as 8GiB, 8GB or 800MiB"
    if isinstance(value, int) and abs(value) >= 1 << 62:
        raise OptionError(f"{name} is more memory than any machine has", hint)
    match = _SIZE.fullmatch(str(value))
    if not match or (match[3] and not match[2]):
        raise OptionError(f"{name} must be a size, not {value!r}", hint)
    unit = match[2].lower()
    if not unit and "b" not in match[0].lower() and 0 < float(match[1]) < _MIN_UNITLESS_BYTES:
        raise OptionError(f"{name} {value!r} lacks a unit", hint)
    return int(float(match[1]) * (_BINARY_UNITS[unit] if match[3] else _UNITS[unit]))


def check_process(loaded_by: int) -> None:
    """Raise EdgespecError if this process is a fork of the one that loaded a model.

    A fork does not copy threads, so llama.cpp and MLX would wait forever for theirs.

    Args:
        loaded_by: ID of the process that loaded the model.
    """
    if os.getpid() != loaded_by:
        raise EdgespecError(
            f"a model that was loaded in process {loaded_by} cannot be used in a process forked from it",
            "start the process with multiprocessing's `spawn` method and load the model there, or share one"
            " model between processes with `edgespec serve`",
            code="process_forked",
        )


def check_boolean(name: str, value: object) -> bool:
    """Return `value` if it is True or False. Raises OptionError otherwise."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r}")
    return value


def check_text(name: str, value: object, allowed: str) -> str:
    """Return `value` if it is a string.

    Args:
        name: The option's name, for the error message.
        value: The value to check.
        allowed: The valid values in words, for the error message.

    Raises:
        OptionError: `value` is not a string.
    """
    if not isinstance(value, str):
        raise OptionError(f"{name} must be a string, not {value!r}", f"use {allowed}")
    return value


def check_path(name: str, value: object, allowed: str = "one path") -> str:
    """Return a path as a string. Raises OptionError if it is neither a string nor a path object."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return check_text(name, path, allowed)
