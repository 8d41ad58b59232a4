"""The MLX backend: runs safetensors models through mlx-lm. Only this package imports `mlx`."""

from edgespec.backends.mlx.loading import load

__all__ = ["load"]
