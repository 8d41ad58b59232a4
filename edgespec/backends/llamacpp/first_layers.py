"""Run only a model's first layers and its output layer.

The bit-exactness trial compares hundreds of tokens. Its passes take a fraction of the time if they skip the
layers whose weights have the same types and shapes as those of the first layers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.matrices import GgmlProducts
from edgespec.backends.llamacpp.native import ggml
from edgespec.backends.llamacpp.state_taps import HiddenStateHook, layer_output
from edgespec.errors import BackendError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.formats.gguf_header import read_header

__all__ = ["FirstLayers", "first_layers_of_each_kind"]

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")
# Minimum number of layers in `first_layers_of_each_kind`: in models with a sliding attention window, and in
# all others. The values were chosen to include a full-attention layer even if five of six layers have a
# window, as in Gemma 3, and a layer without rotary embeddings even if only every fourth has none, as in
# SmolLM3.
_MIN_WINDOWED_LAYERS, _MIN_LAYERS = 6, 4
# The name of the logits in llama.cpp's computation graph, and those of the weights that they come from.
_LOGITS = b"result_output"
_OUTPUT_WEIGHTS = (b"output.weight", b"token_embd.weight")
# Maximum number of operations between the product with the output weights and the logits, such as scaling.
# The number was chosen to be above that of all models in llama.cpp.
_MAX_OPERATIONS = 8
# Offsets of `ne` and `src` in a `ggml_tensor`, in bytes, if `ggml_tensor_overhead` returns this size.
_SHAPE_OFFSET, _SOURCES_OFFSET, _TENSOR_OVERHEAD_BYTES = 16, 152, 368


class FirstLayers(HiddenStateHook):
    """Stops passes after the first layers, and multiplies the hidden states by the output weights.

    The first pass with this hook must run all layers, so that it finds the output weights. llama.cpp can hold
    them twice, once for the embeddings and once for the output layer, and only the latter may be repacked.

    Args:
        count: Number of layers to run.
        row_size: Size of a hidden state.
        vocab_size: Number of rows of the output weights.
        threads: Returns the number of CPU threads to use for the next product.
    """

    def __init__(self, count: int, row_size: int, vocab_size: int, threads: Callable[[], int]) -> None:
        super().__init__([layer_output(count - 1)], row_size)
        self.count = count
        self._shape = row_size, vocab_size
        self._products = GgmlProducts(threads)
        self._output_weights: int | None = None

    def on_node(self, tensor: int, is_query: bool, user_data: object) -> bool:
        if is_query and self._ggml.ggml_get_name(tensor) == _LOGITS:
            self._output_weights = _find_output_weights(tensor, self._shape)
        return super().on_node(tensor, is_query, user_data)

    def check(self) -> None:
        """Check that the pass over all layers found the hidden states and the output weights.

        Raises:
            BackendError: It did not find them.
        """
        self.take(self.names[0], 1)
        if self._output_weights is None:
            raise BackendError(
                "llama.cpp computes the logits in an unknown way", "update edgespec to use this model"
            )

    def rows(self, count: int) -> NDArray[np.float32]:
        """Return the hidden states of the last pass, followed by their products with the output weights.

        Returns:
            Array [count, hidden state size + vocabulary size].
        """
        assert self._output_weights is not None
        states = self.take(self.names[0], count)
        products = self._products.multiply(self._output_weights, self._shape[1], states)
        return np.concatenate((states, products), axis=1)


def first_layers_of_each_kind(path: Path) -> int:
    """Return how many leading layers cover every type and shape of weight in a model's layers.

    Returns:
        The number of layers, or 0 if it would exceed half of the model's layers.

    Raises:
        ModelFileError: A file cannot be read.
    """
    headers = [read_header(file) for file in gguf_files(path)]
    # Only the first file of a multi-part model contains the metadata.
    block_count, predicting, window = map(
        headers[0].architecture_number, ("block_count", "nextn_predict_layers", "attention.sliding_window")
    )
    layers = block_count - predicting
    first: dict[tuple[str, int, tuple[int, ...]], int] = {}
    for header in headers:
        for tensor in header.tensors:
            match = _LAYER_TENSOR.fullmatch(tensor.name)
            if match and (layer := int(match[1])) < layers:
                kind = (match[2], tensor.kind, tensor.shape)
                first[kind] = min(first.get(kind, layer), layer)
    fewest = _MIN_WINDOWED_LAYERS if window else _MIN_LAYERS
    count = max(fewest, max(first.values(), default=0) + 1)
    return count if 2 * count <= layers else 0


def _find_output_weights(logits: int, shape: tuple[int, int]) -> int | None:
    """Return the address of the output weights, given that of the logits, or None if they are not found."""
    library: Any = ggml()
    if library.ggml_tensor_overhead() != _TENSOR_OVERHEAD_BYTES:
        return None
    tensor: int | None = logits
    for _ in range(_MAX_OPERATIONS):
        tensor = ctypes.c_void_p.from_address(tensor + _SOURCES_OFFSET).value if tensor else None
        if tensor and library.ggml_get_name(tensor) in _OUTPUT_WEIGHTS:
            found = (ctypes.c_int64 * 4).from_address(tensor + _SHAPE_OFFSET)
            return tensor if tuple(found) == (*shape, 1, 1) else None
    return None
