"""Evaluation, with MLX's errors translated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from edgespec.errors import BackendError

__all__ = ["evaluated", "translated"]


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of MLX in here become a BackendError that begins with `what`."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, MemoryError) as error:
        text = " ".join(str(error).split())
        if "alloc" in text.lower() or "memory" in text.lower():
            raise BackendError(f"{what}: {text}", "free some memory or use a smaller --context") from error
        raise BackendError(f"{what}: {text}", "try another model, or report this one") from error


def evaluated(*arrays: mx.array) -> None:
    """Wait until these are computed. Raises BackendError."""
    with translated("MLX failed"):
        mx.eval(*arrays)
