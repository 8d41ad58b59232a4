"""Replace parts of mlx-lm models to record hidden states, skip layers, or resume after a layer.

A model's layers can also be split across machines. Every machine builds the whole model and replaces the
layers that it does not hold with stand-ins, so that mlx-lm's own code computes the masks and positions on
every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.layer_caches import LayerCaches
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.errors import CapabilityError

__all__ = [
    "AbsentLayer",
    "Body",
    "FirstLayer",
    "HiddenStateHooks",
    "LastAbsentLayer",
    "LastLayer",
    "LayerList",
    "RunBlock",
    "SkippedLayer",
    "check_separable",
]

# Runs a block of layers on another machine. Takes the hidden states [1, tokens, ...], the number of cached
# tokens and `PassLayout.round_start`, and returns the block's output.
RunBlock = Callable[[mx.array, int, int], mx.array]

_TRACED_TOKENS = 3


class _LayerProxy:
    """Base class for module replacements. Forwards attribute access to the original module.

    This class is not an `nn.Module`, because it has no weights of its own.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __getitem__(self, name: str) -> Any:
        return self._layer[name]


class SkippedLayer(_LayerProxy):
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
        """Return the model's layers, with those at `indices` replaced by `SkippedLayer`."""
        return [SkippedLayer(layer) if i in indices else layer for i, layer in enumerate(self.layers)]

    def resumed_at(self, layer: int, states: mx.array) -> list[Any]:
        """Return the layers, with the first `layer` layers replaced by their known output `states`."""
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


class _HookedLayer(_LayerProxy):
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
        """Record the body's output in every pass inside the block."""
        with self._replaced(_RecordedBody(self._body, self)):
            yield

    @contextmanager
    def returning(self, states: mx.array) -> Iterator[None]:
        """Make passes inside the block run only the LM head on `states` [1, tokens, size]."""
        with self._replaced(SkippedLayer(self._body, states)):
            yield

    @contextmanager
    def _replaced(self, body: _LayerProxy) -> Iterator[None]:
        # Assign a dictionary item, because only arrays and modules can be set as attributes of MLX modules.
        self._parent[self._name] = body
        try:
            yield
        finally:
            self._parent[self._name] = self._body


class _RecordedBody(_LayerProxy):
    def __init__(self, body: Any, record: Body) -> None:
        super().__init__(body)
        self._record = record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._record.output = output = self._layer(*args, **kwargs)
        return output


def _find_module(model: Any, wanted: Any) -> tuple[Any, str]:
    """Return the parent of the module `wanted`, and the name of the attribute that refers to `wanted`."""
    for _, module in model.named_modules():
        for name, value in module.items():
            if value is wanted:
                return module, name
    raise CapabilityError("the model's layers and its LM head are not separate")


def _find_layers(model: Any) -> tuple[Any, str]:
    """Return the module that owns the model's list of layers, and the name of the list attribute."""
    layers = model.layers
    for _, module in model.named_modules():
        for name, value in module.items():
            same = isinstance(value, list) and len(value) == len(layers)
            if same and all(a is b for a, b in zip(value, layers, strict=True)):
                return module, name
    raise CapabilityError("the model does not store its layers in a single list")


class AbsentLayer(_LayerProxy):
    """Replacement for a layer on another machine. Returns its input, and advances the layer's cache."""

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        _cache_among(args, kwargs).skip(states.shape[1])
        return states


class LastAbsentLayer(_LayerProxy):
    """Replacement for the last layer of a block on another machine. Runs the block there."""

    def __init__(self, layer: Any, run_block: RunBlock) -> None:
        super().__init__(layer)
        self._run_block = run_block

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        cache = _cache_among(args, kwargs)
        offset, layout = cache.offset, cache.layout
        if layout.offsets is not None:
            raise CapabilityError(
                "a model on workers cannot verify drafts with branches", code="workers_not_supported"
            )
        cache.skip(states.shape[1])
        return self._run_block(states, offset, layout.round_start)


class FirstLayer(_LayerProxy):
    """The first layer of a block. Its input is replaced by hidden states from another machine.

    Attributes:
        states: The hidden states [1, tokens, ...].
    """

    states: mx.array

    def __call__(self, _states: mx.array, *args: Any, **kwargs: Any) -> Any:
        return self._layer(self.states, *args, **kwargs)


class LastLayer(_LayerProxy):
    """The last layer of a block.

    Attributes:
        output: The layer's output [1, tokens, ...] in the last pass.
    """

    output: mx.array

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.output = self._layer(states, *args, **kwargs)
        return self.output


def _cache_among(args: Iterable[Any], kwargs: dict[str, Any]) -> AttentionCache:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, AttentionCache))


class _TracedLayer(_LayerProxy):
    def __init__(self, layer: Any, calls: list[tuple[Any, Any, list[Any]]]) -> None:
        super().__init__(layer)
        self._calls = calls

    def __call__(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._layer(states, *args, **kwargs)
        self._calls.append((states, result, [*args, *kwargs.values()]))
        return result


def check_separable(model: Any, name: str) -> None:
    """Check that a model's layers can be split across machines.

    Each layer may read only the previous layer's output, its own KV cache and the attention mask. The check
    builds the graph of a pass without evaluating it.

    Raises:
        CapabilityError: The layers exchange other data, or have other kinds of caches.
    """
    layers, caches = LayerList(model), LayerCaches(model, PassLayout())
    calls: list[tuple[Any, Any, list[Any]]] = []
    with layers.replaced([_TracedLayer(layer, calls) for layer in layers.layers]):
        model(mx.zeros((1, _TRACED_TOKENS), mx.int32), cache=caches.layers)
    problem = ""
    if not all(isinstance(cache, AttentionCache) for cache in caches.layers):
        problem = "some of its layers have no KV cache, or an unsupported kind of cache"
    elif len(calls) != len(layers.layers) or len(caches.layers) != len(layers.layers):
        problem = "it does not run each of its layers exactly once"
    else:
        before = calls[0][0]
        for (states, result, others), cache in zip(calls, caches.layers, strict=True):
            is_chained = isinstance(result, mx.array) and states is before and result.shape == states.shape
            if not is_chained or not all(each is cache or _is_mask(each) for each in others):
                problem = "its layers pass more than their outputs to each other"
            before = result
    if problem:
        raise CapabilityError(
            f"{name} cannot run on workers with MLX, because {problem}",
            "use a GGUF version of the model, or omit --workers",
            code="workers_not_supported",
        )


def _is_mask(value: Any) -> bool:
    """Return whether a layer's argument is a mask or a constant, rather than another layer's data."""
    if isinstance(value, mx.array):
        return bool(value.dtype == mx.bool_)
    return value is None or isinstance(value, bool | int | float | str)
