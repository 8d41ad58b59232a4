"""What a drafter has learnt, from one run to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["ArrayStore"]


class ArrayStore(Protocol):
    """Where something learnt is kept. Neither call raises: see `notice`, which is for people."""

    notice: str

    def load(self) -> Mapping[str, NDArray[Any]]:
        """What was saved last, by name; nothing where there is nothing or it cannot be read."""

    def save(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Keep these in the place of what was there."""
