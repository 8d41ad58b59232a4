"""Build an MLX model without its weights, to find out whether its files make MLX crash."""

from __future__ import annotations

from edgespec.backends.base import LoadOptions
from edgespec.backends.mlx.model_skeleton import read_skeleton

__all__ = ["try_model"]


def try_model(path: str, name: str) -> None:
    """Check that a model can be built and that its tensor shapes fit, without reading its weights.

    Raises:
        EdgespecError: The model cannot be loaded.
    """
    read_skeleton(path, name, LoadOptions())
