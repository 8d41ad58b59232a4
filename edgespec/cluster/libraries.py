"""Versions of the libraries that run a target's layers. They must be the same on all of its machines."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LLAMA_CPP", "MLX", "Library", "installed_mlx"]

LLAMA_CPP, MLX = "llama-cpp-python", "mlx-lm"


@dataclass(frozen=True, slots=True)
class Library:
    """A library's package name, `LLAMA_CPP` or `MLX`, and its version."""

    name: str
    version: str


def installed_mlx() -> str:
    """Return the versions of mlx-lm and mlx, or an empty string if they are not installed."""
    # Importing this module takes 20 ms, and `edgespec --help` does not need it.
    from importlib import metadata

    try:
        return f"{metadata.version('mlx-lm')} (mlx {metadata.version('mlx')})"
    except metadata.PackageNotFoundError:
        return ""
