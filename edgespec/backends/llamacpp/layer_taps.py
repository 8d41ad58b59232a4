"""Copy the inputs of layers from every pass of a llama.cpp context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.staging_api import layer_input_api

__all__ = ["LayerTaps", "copied_rows"]


class LayerTaps:
    """The layers whose inputs a context copies in every pass.

    The model's architecture must be one of `TAPPED_ARCHITECTURES`, and the layers must exist. Otherwise,
    llama.cpp ends the process.

    Args:
        size: The model's embedding size.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._layers: Sequence[int] = ()

    def set(self, context: Any, layers: Sequence[int]) -> None:
        """Choose the layers whose inputs are copied from the next pass on.

        Pass None if the context was freed, and call `apply` after it has been created again.
        """
        before, self._layers = self._layers, layers
        if context:
            for layer in (*before, *layers):
                self._switch(context, layer)

    def apply(self, context: Any) -> None:
        """Copy the inputs of the chosen layers in a newly created context."""
        for layer in self._layers:
            self._switch(context, layer)

    def _switch(self, context: Any, layer: int) -> None:
        api = layer_input_api()
        assert api is not None
        api.switch(context, layer, layer in self._layers)

    def rows(self, context: Any, count: int) -> list[NDArray[np.float32]]:
        """Return each layer's input from the last pass of `count` tokens, as float32 [tokens, size]."""
        if not self._layers:
            return []
        api = layer_input_api()
        assert api is not None
        addresses = [api.address(context, layer) for layer in self._layers]
        return [copied_rows(each, count, self._size) for each in addresses]


def copied_rows(address: int, count: int, size: int) -> NDArray[np.float32]:
    """Return a copy of the float32 array [count, size] at an address."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, (count, size)).copy()
