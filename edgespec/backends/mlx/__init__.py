"""MLX models: safetensors folders as mlx-lm loads them. The only place that imports mlx."""

from edgespec.backends.mlx.loading import load

__all__ = ["load"]
