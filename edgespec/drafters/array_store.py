"""Interface of the store that keeps a drafter's learned state between runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["ArrayStore"]


class ArrayStore(Protocol):
    """Store of named arrays. Failures raise nothing and set `notice`.

    Attributes:
        notice: Why the last call failed, for the user; empty if it did not.
    """

    notice: str

    def load(self) -> Mapping[str, NDArray[Any]]:
        """Return the arrays saved last; an empty mapping if there are none or they are unreadable."""

    def save(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Replace the saved arrays."""
