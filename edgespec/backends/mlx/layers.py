"""The layers of any mlx-lm model, with their inputs and outputs to be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from edgespec.errors import CapabilityError

__all__ = ["LayerTaps"]


class _TappedLayer:
    """Stands in the place of a layer for a while. No nn.Module: it has no weights of its own."""

    def __init__(self, layer: Any, index: int, taps: LayerTaps) -> None:
        self._layer = layer
        self._index = index
        self._taps = taps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __getitem__(self, name: str) -> Any:
        return self._layer[name]

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> Any:
        result = self._layer(states, *args, **kwargs)
        self._taps.record(self._index, states, result)
        return result


class LayerTaps:
    """Reads what goes into and comes out of layers while a model runs.

    inputs, outputs: hidden states [1, tokens, size] of the last pass, by layer.
    Raises CapabilityError where the model does not keep its layers in one list.
    """

    def __init__(self, model: Any) -> None:
        self._holder, self._name = _find_layers(model)
        self._layers: list[Any] = self._holder[self._name]
        self.count = len(self._layers)
        self.inputs: dict[int, mx.array] = {}
        self.outputs: dict[int, mx.array] = {}

    def record(self, index: int, states: mx.array, result: Any) -> None:
        """Keep what one layer got and gave."""
        self.inputs[index] = states
        self.outputs[index] = result[0] if isinstance(result, tuple) else result

    @contextmanager
    def on(self, indices: Sequence[int]) -> Iterator[None]:
        """Passes in here leave the states of these layers behind."""
        self.inputs, self.outputs = {}, {}
        wanted = set(indices)
        self._holder[self._name] = [
            _TappedLayer(layer, i, self) if i in wanted else layer for i, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            self._holder[self._name] = self._layers


def _find_layers(model: Any) -> tuple[Any, str]:
    """The module that holds the list of layers, and the list's name there."""
    layers = model.layers
    for _, module in model.named_modules():
        for name, value in module.items():
            same = isinstance(value, list) and len(value) == len(layers)
            if same and all(a is b for a, b in zip(value, layers, strict=True)):
                return module, name
    raise CapabilityError("its layers are in no list of their own")
