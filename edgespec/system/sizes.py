"""Parse amounts of memory, such as `8GiB`."""

from __future__ import annotations

import re

from edgespec.errors import OptionError

__all__ = ["parse_size"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
# Smallest memory size accepted without a unit. `--memory 8` probably means 8 GiB, not 8 bytes.
_MIN_UNITLESS_BYTES = 1024
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


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
