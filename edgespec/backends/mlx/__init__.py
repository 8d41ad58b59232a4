"""Run safetensors models with MLX and mlx-lm. No other package imports `mlx`."""

from edgespec.backends.mlx.loading import load

__all__ = ["load"]
