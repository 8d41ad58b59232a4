"""Run models whose layers are partly on other machines.

Every machine builds the whole model and replaces the layers that it does not hold with stand-ins. Masks and
positions are therefore computed by mlx-lm's own code on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.layer_caches import LayerCaches
from edgespec.backends.mlx.layers import LayerList, LayerProxy
from edgespec.backends.mlx.pass_layout import PassLayout
from edgespec.errors import CapabilityError

__all__ = ["AbsentLayer", "FirstLayer", "LastAbsentLayer", "LastLayer", "RunBlock", "check_separable"]

# Runs the layers of a block on another machine. Takes the hidden states [1, tokens, ...], the number of
# cached tokens and `PassLayout.round_start`, and returns the block's output.
RunBlock = Callable[[mx.array, int, int], mx.array]

_TRACED_TOKENS = 3


class AbsentLayer(LayerProxy):
    """Replacement for a layer on another machine. Returns its input, and advances the layer's cache."""

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        _cache_among(args, kwargs).skip(states.shape[1])
        return states


class LastAbsentLayer(LayerProxy):
    """Replacement for the last layer of a block on another machine. Runs the block there."""

    def __init__(self, layer: Any, run_block: RunBlock) -> None:
        super().__init__(layer)
        self._run_block = run_block

    def __call__(self, states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        cache = _cache_among(args, kwargs)
        offset, layout = cache.offset, cache.layout
        if layout.offsets is not None:
            raise CapabilityError(
                "a model on workers cannot verify token trees", code="workers_not_supported"
            )
        cache.skip(states.shape[1])
        return self._run_block(states, offset, layout.round_start)


class FirstLayer(LayerProxy):
    """The first layer of a block. Reads the hidden states sent by another machine.

    Attributes:
        states: The hidden states [1, tokens, ...].
    """

    states: mx.array

    def __call__(self, _states: mx.array, *args: Any, **kwargs: Any) -> Any:
        return self._layer(self.states, *args, **kwargs)


class LastLayer(LayerProxy):
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


class _TracedLayer(LayerProxy):
    def __init__(self, layer: Any, calls: list[tuple[Any, Any, list[Any]]]) -> None:
        super().__init__(layer)
        self._calls = calls

    def __call__(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._layer(states, *args, **kwargs)
        self._calls.append((states, result, [*args, *kwargs.values()]))
        return result


def check_separable(model: Any, name: str) -> None:
    """Check that a model's layers can be spread over several machines.

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
        problem = "some of its layers have no KV cache, or another kind of cache"
    elif len(calls) != len(layers.layers) or len(caches.layers) != len(layers.layers):
        problem = "it does not run each of its layers once"
    else:
        before = calls[0][0]
        for (states, result, others), cache in zip(calls, caches.layers, strict=True):
            is_chained = isinstance(result, mx.array) and states is before and result.shape == states.shape
            if not is_chained or not all(each is cache or _is_mask(each) for each in others):
                problem = "its layers exchange more than their outputs"
            before = result
    if problem:
        raise CapabilityError(
            f"{name} cannot run on workers with MLX, because {problem}",
            "use a GGUF version of the model, or omit --workers",
            code="workers_not_supported",
        )


def _is_mask(value: Any) -> bool:
    """Return whether a layer's argument depends only on the cached tokens and the model's configuration."""
    if isinstance(value, mx.array):
        return bool(value.dtype == mx.bool_)
    return value is None or isinstance(value, bool | int | float | str)
