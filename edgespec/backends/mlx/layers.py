"""The layers of any mlx-lm model: read from outside, left out, or gone on from half-way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from edgespec.errors import CapabilityError

__all__ = ["HiddenStateHooks", "LayerList", "SkippedLayer"]


class _LayerProxy:
    """Stands in the place of a layer for a while. No nn.Module: it has no weights of its own."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __getitem__(self, name: str) -> Any:
        return self._layer[name]


class SkippedLayer(_LayerProxy):
    """A layer that is not run: it hands on what it is given, or what it was told to say.

    given: the hidden states [1, tokens, size] of the last pass that came here.
    """

    def __init__(self, layer: Any, says: mx.array | None = None) -> None:
        super().__init__(layer)
        self._says = says
        self.given: mx.array | None = None

    def __call__(self, states: mx.array, *_args: Any, **_kwargs: Any) -> mx.array:
        self.given = states
        return states if self._says is None else self._says


class LayerList:
    """The layers of a model, for passes with others in their places.

    Raises CapabilityError where the model does not keep its layers in one list.
    """

    def __init__(self, model: Any) -> None:
        self._holder, self._name = _find_layers(model)
        self.layers: list[Any] = self._holder[self._name]

    def without(self, indices: Collection[int]) -> list[Any]:
        """The list with these layers left out."""
        return [SkippedLayer(layer) if i in indices else layer for i, layer in enumerate(self.layers)]

    def after(self, layer: int, states: mx.array) -> list[Any]:
        """The list that goes on where the layers below `layer` said `states`."""
        done = [SkippedLayer(one) for one in self.layers[: layer - 1]]
        return [*done, SkippedLayer(self.layers[layer - 1], states), *self.layers[layer:]]

    @contextmanager
    def replaced(self, layers: list[Any]) -> Iterator[None]:
        """Passes in here run these."""
        self._holder[self._name] = layers
        try:
            yield
        finally:
            self._holder[self._name] = self.layers


class _HookedLayer(_LayerProxy):
    def __init__(self, layer: Any, index: int, taps: HiddenStateHooks) -> None:
        super().__init__(layer)
        self._index = index
        self._taps = taps

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> Any:
        result = self._layer(states, *args, **kwargs)
        self._taps.record(self._index, states, result)
        return result


class HiddenStateHooks:
    """Reads what goes into and comes out of layers while a model runs.

    inputs, outputs: hidden states [1, tokens, size] of the last pass, by layer.
    Raises CapabilityError where the model does not keep its layers in one list.
    """

    def __init__(self, model: Any) -> None:
        self._list = LayerList(model)
        self.count = len(self._list.layers)
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
        tapped = [
            _HookedLayer(layer, i, self) if i in wanted else layer
            for i, layer in enumerate(self._list.layers)
        ]
        with self._list.replaced(tapped):
            yield


def _find_layers(model: Any) -> tuple[Any, str]:
    """The module that holds the list of layers, and the list's name there."""
    layers = model.layers
    for _, module in model.named_modules():
        for name, value in module.items():
            same = isinstance(value, list) and len(value) == len(layers)
            if same and all(a is b for a, b in zip(value, layers, strict=True)):
                return module, name
    raise CapabilityError("its layers are in no list of their own")
