"""Replace parts of any mlx-lm model to record hidden states, skip layers, or resume after a layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from edgespec.errors import CapabilityError

__all__ = ["Body", "HiddenStateHooks", "LayerList", "LayerProxy", "SkippedLayer"]


class LayerProxy:
    """Base class for module replacements. Forwards attribute access to the original module.

    This class is not an `nn.Module`, because it has no weights of its own.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __getitem__(self, name: str) -> Any:
        return self._layer[name]


class SkippedLayer(LayerProxy):
    """Replacement for a skipped layer.

    Returns `output`, or its input unchanged if `output` is None.

    Attributes:
        last_input: Hidden states [1, tokens, size] passed to the layer in the last pass.
    """

    def __init__(self, layer: Any, output: mx.array | None = None) -> None:
        super().__init__(layer)
        self._output = output
        self.last_input: mx.array | None = None

    def __call__(self, states: mx.array, *_args: Any, **_kwargs: Any) -> mx.array:
        self.last_input = states
        return states if self._output is None else self._output


class LayerList:
    """A model's list of layers, which can be replaced.

    Raises:
        CapabilityError: The model does not store its layers in a single list.
    """

    def __init__(self, model: Any) -> None:
        self._parent, self._name = _find_layers(model)
        self.layers: list[Any] = self._parent[self._name]

    def without(self, indices: Collection[int]) -> list[Any]:
        """Return the model's list of layers, with the layers at `indices` replaced by `SkippedLayer`."""
        return [SkippedLayer(layer) if i in indices else layer for i, layer in enumerate(self.layers)]

    def resumed_at(self, layer: int, states: mx.array) -> list[Any]:
        """Return the model's layers with the first `layer` replaced by their known output, `states`."""
        skipped = [SkippedLayer(one) for one in self.layers[: layer - 1]]
        return [*skipped, SkippedLayer(self.layers[layer - 1], states), *self.layers[layer:]]

    def replace(self, layers: list[Any]) -> None:
        """Make the model run `layers` instead of its own layers from now on."""
        self._parent[self._name] = self.layers = layers

    @contextmanager
    def replaced(self, layers: list[Any]) -> Iterator[None]:
        """Make the model run `layers` instead of its own layers inside the `with` block."""
        self._parent[self._name] = layers
        try:
            yield
        finally:
            self._parent[self._name] = self.layers


class HiddenStateHooks:
    """Records the inputs and outputs of layers while the model runs.

    Attributes:
        count: Number of layers in the model.
        inputs: Input hidden states [1, tokens, size] of the last pass, keyed by layer index.
        outputs: Output hidden states [1, tokens, size] of the last pass, keyed by layer index.

    Raises:
        CapabilityError: The model does not store its layers in a single list.
    """

    def __init__(self, model: Any) -> None:
        self._list = LayerList(model)
        self.count = len(self._list.layers)
        self.inputs: dict[int, mx.array] = {}
        self.outputs: dict[int, mx.array] = {}

    @contextmanager
    def on(self, indices: Collection[int]) -> Iterator[None]:
        """Record the inputs and outputs of the layers at `indices` in every pass inside the block."""
        self.inputs, self.outputs = {}, {}
        layers = enumerate(self._list.layers)
        hooked = [_HookedLayer(layer, i, self) if i in indices else layer for i, layer in layers]
        with self._list.replaced(hooked):
            yield


class _HookedLayer(LayerProxy):
    def __init__(self, layer: Any, index: int, hooks: HiddenStateHooks) -> None:
        super().__init__(layer)
        self._index = index
        self._hooks = hooks

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> Any:
        result = self._layer(states, *args, **kwargs)
        self._hooks.inputs[self._index] = states
        self._hooks.outputs[self._index] = result[0] if isinstance(result, tuple) else result
        return result


class Body:
    """The part of a model that contains its layers and final norm, without the LM head.

    Attributes:
        output: Output [1, tokens, size] of the last pass inside `recorded`, which the LM head reads. None
            before the first such pass.

    Raises:
        CapabilityError: The model's layers and its LM head are not separate.
    """

    def __init__(self, model: Any) -> None:
        body, _ = _find_layers(model)
        self._parent, self._name = _find_module(model, body)
        self._body = body
        self.output: mx.array | None = None

    @property
    def arguments(self) -> Any:
        """The arguments, such as layer sizes, from which mlx-lm built the model."""
        return self._parent.args

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the output of the body in every pass inside the block."""
        with self._replaced(_RecordedBody(self._body, self)):
            yield

    @contextmanager
    def returning(self, states: mx.array) -> Iterator[None]:
        """Make passes inside the block run only the LM head, on these hidden states [1, tokens, size]."""
        with self._replaced(SkippedLayer(self._body, states)):
            yield

    @contextmanager
    def _replaced(self, body: LayerProxy) -> Iterator[None]:
        # Assign a dictionary item, because attributes of MLX modules can be set only to arrays and modules.
        self._parent[self._name] = body
        try:
            yield
        finally:
            self._parent[self._name] = self._body


class _RecordedBody(LayerProxy):
    def __init__(self, body: Any, record: Body) -> None:
        super().__init__(body)
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._record.output = output = self._layer(*args, **kwargs)
        return output


def _find_module(model: Any, wanted: Any) -> tuple[Any, str]:
    """Return the parent of the module `wanted`, and the name of the attribute that holds `wanted`."""
    for _, module in model.named_modules():
        for name, value in module.items():
            if value is wanted:
                return module, name
    raise CapabilityError("the model's layers and its LM head are not separate")


def _find_layers(model: Any) -> tuple[Any, str]:
    """Return the module that holds the model's list of layers, and the name of the list attribute."""
    layers = model.layers
    for _, module in model.named_modules():
        for name, value in module.items():
            same = isinstance(value, list) and len(value) == len(layers)
            if same and all(a is b for a, b in zip(value, layers, strict=True)):
                return module, name
    raise CapabilityError("the model does not store its layers in a single list")
