"""MLX backend, which runs safetensors models with mlx-lm. Only this package imports `mlx`."""

from edgespec.backends.mlx.loading import load

__all__ = ["load"]
