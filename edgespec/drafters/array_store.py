"""Interface for saving a drafter's learned state between runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["ArrayStore"]


class ArrayStore(Protocol):
    """Saves and loads named arrays. If a method fails, it sets `notice` instead of raising an exception.

    Attributes:
        notice: User-facing message if the last call failed; otherwise empty.
    """

    notice: str

    def load(self) -> Mapping[str, NDArray[Any]]:
        """Return the last saved arrays, or an empty mapping if there are none or they are unreadable."""

    def save(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Replace the saved arrays."""
