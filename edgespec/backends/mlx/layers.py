"""Replace parts of mlx-lm models to record hidden states, skip layers, or resume after a layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.model_skeleton import named_arrays, trace_one_token
from edgespec.errors import CapabilityError
from edgespec.model.hidden_states import POST_NORM, HiddenStateLog, OpenLogs

__all__ = [
    "Body",
    "HiddenStateHooks",
    "LayerList",
    "LayerProxy",
    "SkippedLayer",
    "StateRecorder",
    "WatchedLayer",
    "first_layers_of_each_kind",
]

# Minimum number of layers in `first_layers_of_each_kind`. The value was chosen to include a layer without
# rotary embeddings even if only every fourth has none, as in SmolLM3.
_MIN_FIRST_LAYERS = 4


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


class WatchedLayer(LayerProxy):
    """Runs the original layer, then calls `watch` with the result and the layer's arguments."""

    def __init__(self, layer: Any, watch: Callable[..., None]) -> None:
        super().__init__(layer)
        self._watch = watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._layer(*args, **kwargs)
        self._watch(result, *args, **kwargs)
        return result


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

    def replaced(self, layers: list[Any]) -> AbstractContextManager[None]:
        """Make the model run `layers` instead of its own layers inside the `with` block."""
        return _replaced(self._parent, self._name, layers)


def first_layers_of_each_kind(model: Any) -> int:
    """Return how many leading layers cover every type and shape of weight in a model's layers.

    Returns:
        The number of layers, or 0 if it would exceed half of the model's layers.

    Raises:
        CapabilityError: The model does not store its layers in a single list.
    """
    kinds = [_layer_kind(layer) for layer in LayerList(model).layers]
    count = max(_MIN_FIRST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds))
    return count if 2 * count <= len(kinds) else 0


def _layer_kind(layer: Any) -> tuple[Any, ...]:
    """Return a layer's types of modules, and the types and shapes of their weights."""
    modules = [
        (name, type(module), getattr(module, "bits", 0), getattr(module, "group_size", 0))
        for name, module in layer.named_modules()
    ]
    weights = [(name, array.dtype, array.shape) for name, array in named_arrays(layer.parameters())]
    return (*sorted(modules, key=lambda module: module[0]), *sorted(weights, key=lambda weight: weight[0]))


class Body:
    """The part of a model that contains its layers and final norm, without the LM head.

    Raises:
        CapabilityError: The model's layers and its LM head are not separate.
    """

    def __init__(self, model: Any) -> None:
        self._body, _ = _find_layers(model)
        self._parent, self._name = _find_module(model, self._body)

    @property
    def arguments(self) -> Any:
        """The arguments, such as layer sizes, from which mlx-lm built the model."""
        return self._parent.args

    def watched(self, watch: Callable[..., None]) -> AbstractContextManager[None]:
        """Call `watch` with the body's output, which the LM head reads, in every pass inside the block."""
        return _replaced(self._parent, self._name, WatchedLayer(self._body, watch))

    def returning(self, states: mx.array) -> AbstractContextManager[None]:
        """Make passes inside the block run only the LM head on `states` [1, tokens, size]."""
        return _replaced(self._parent, self._name, SkippedLayer(self._body, states))


class HiddenStateHooks:
    """Records hidden states, numbered as in `HiddenStateSource`, while the model runs.

    Attributes:
        count: Number of layers in the model.
        states: Hidden states [1, tokens, size] of the last recorded pass, keyed by number.

    Raises:
        CapabilityError: The model does not store its layers in a single list.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._list = LayerList(model)
        self.count = len(self._list.layers)
        self.states: dict[int, mx.array] = {}

    @cached_property
    def _body(self) -> Body:
        return Body(self._model)

    @contextmanager
    def on(self, states: Collection[int]) -> Iterator[None]:
        """Record these hidden states in every pass inside the block."""
        self.states = {}
        # State number `count` is the last layer's output, which is recorded along with its input.
        indices = {min(state, self.count - 1) for state in states if state != POST_NORM}
        hooked = [
            WatchedLayer(layer, self._record_layer(i)) if i in indices else layer
            for i, layer in enumerate(self._list.layers)
        ]
        with ExitStack() as stack:
            stack.enter_context(self._list.replaced(hooked))
            if POST_NORM in states:
                stack.enter_context(self._body.watched(self._record_body))
            yield

    def _record_layer(self, index: int) -> Callable[..., None]:
        def record(result: Any, states: mx.array, *_args: Any, **_kwargs: Any) -> None:
            self.states[index] = states
            self.states[index + 1] = result[0] if isinstance(result, tuple) else result

        return record

    def _record_body(self, output: mx.array, *_args: Any, **_kwargs: Any) -> None:
        self.states[POST_NORM] = output


class StateRecorder:
    """Records the hidden states that heads read, and adds those of committed tokens to logs.

    Attributes:
        logs: The model's logs. While one is open, every pass must be recorded.
        state_size: Number of values per hidden state.
        last: Hidden states [tokens, states, size] of the last recorded pass, in float32.

    Raises:
        CapabilityError: The model does not store its layers in a single list.
    """

    def __init__(self, net: Any, logs: OpenLogs) -> None:
        self._net, self.logs = net, logs
        self._hooks = HiddenStateHooks(net)
        self.last: mx.array | None = None
        with self._hooks.on([0]):
            trace_one_token(net)
        self.state_size: int = self._hooks.states[0].shape[-1]

    def open(self, states: Sequence[int]) -> HiddenStateLog:
        """Open a log of these hidden states.

        Raises:
            CapabilityError: The model does not have these hidden states, or they cannot be recorded.
        """
        for state in states:
            if not POST_NORM <= state <= self._hooks.count:
                raise CapabilityError(
                    f"hidden state {state} does not exist in a model with {self._hooks.count} layers",
                    "choose the draft head that was published for this model",
                    code="head_mismatch",
                )
        log = self.logs.open(states, self.state_size)
        try:
            with self.recorded():
                trace_one_token(self._net)
        except CapabilityError:
            self.logs.close(log)
            raise
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self.logs.close(log)
            raise CapabilityError(f"the model's hidden states cannot be read: {error}") from error
        return log

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the hidden states of the pass inside the block, and store them in `last`."""
        needed = self.logs.states
        with self._hooks.on(needed):
            yield
        found = [self._hooks.states[state] for state in needed]
        self.last = mx.concatenate(found).transpose(1, 0, 2).astype(mx.float32)

    def append(self, position: int, passes: Sequence[mx.array], rows: Sequence[int]) -> None:
        """Append the hidden states of committed tokens to all logs, starting at `position`.

        `rows` are the rows of these tokens in the concatenated hidden states of the `passes`.
        """
        if len(rows):
            recorded = np.concatenate([np.array(states) for states in passes])
            self.logs.append(position, recorded[list(rows)])


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


@contextmanager
def _replaced(parent: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace a part of a module inside the block.

    Assigns a dictionary item, because only arrays and modules can be set as attributes of MLX modules.
    """
    original = parent[name]
    parent[name] = replacement
    try:
        yield
    finally:
        parent[name] = original
