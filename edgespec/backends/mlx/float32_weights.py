"""Convert a model's weights to float32, to train it or to run it faster on a CPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.utils import dequantize_model

from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.backends.mlx.evaluation import evaluate
from edgespec.backends.mlx.loading import LoadedMlxModel
from edgespec.backends.mlx.model_skeleton import named_arrays

__all__ = ["convert_to_float32", "faster_in_float32"]


def faster_in_float32(loaded: LoadedMlxModel) -> bool:
    """Return whether float32 weights fit in memory and make batches run faster.

    On a CPU, MLX multiplies batches with quantised weights more slowly than with float32.
    """
    return runs_on_cpu() and 4 * loaded.skeleton.parameters < psutil.virtual_memory().available // 2


def convert_to_float32(net: Any) -> None:
    """Dequantise all weights of an mlx `nn.Module`, and convert them to float32."""
    dequantize_model(net)
    net.set_dtype(mx.float32)
    evaluate(*(array for _, array in named_arrays(net.parameters())))
