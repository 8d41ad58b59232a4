"""Build an MLX model without its weights, to see whether its files make MLX crash."""

from __future__ import annotations

from edgespec.backends.base import LoadOptions
from edgespec.backends.mlx.model_skeleton import read_skeleton

__all__ = ["try_model"]


def try_model(path: str, name: str) -> None:
    """Build a model with lazy weights and trace one token, which checks all shapes.

    The token is not computed, because that would read all weights twice: here and in the actual load.

    Raises:
        EdgespecError: The model cannot be loaded.
    """
    read_skeleton(path, name, LoadOptions())
