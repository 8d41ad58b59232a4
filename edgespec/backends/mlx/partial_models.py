"""Partial models, which let a target draft for itself with fewer layers or lower precision.

A partial model changes the target only while the graph of a draft pass is built. Draft passes append rows to
the target's caches. These rows are never committed, and are discarded before the draft is verified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from edgespec.backends.base import EarlyExit, LowBit, ModelFacts, SelfDraft
from edgespec.backends.mlx.layers import LayerList, SkippedLayer
from edgespec.backends.mlx.low_bit_weights import LowBitWeights
from edgespec.backends.mlx.pass_layout import PassLayout, SinkWindow
from edgespec.errors import CapabilityError, OptionError

__all__ = ["EarlyExitModel", "LowBitModel", "PartialModel", "PartialModelFactory", "SkippedLayersModel"]


class PartialModel(ABC):
    """Base class of partial models, which draft with the weights and caches of the target.

    Attributes:
        run_ahead: Whether to launch the next draft step early. See `LanguageModel.run_ahead`.
    """

    def __init__(self) -> None:
        self.run_ahead = False

    @abstractmethod
    def active(self, first: int) -> AbstractContextManager[None]:
        """Return a context manager inside which passes use this partial model.

        Args:
            first: Index of the first tree node in the pass.
        """

    def background_arrays(self) -> list[mx.array]:
        """Return arrays of the last draft pass that must be evaluated because later passes need them."""
        return []

    def end_round(self) -> None:  # noqa: B027
        """Discard the data stored for the current tree."""


class SkippedLayersModel(PartialModel):
    """Partial model that skips some layers of the target (SWIFT, arXiv 2410.06916)."""

    def __init__(self, layers: LayerList, skipped: frozenset[int]) -> None:
        super().__init__()
        self._list = layers
        self._remaining = layers.without(skipped)

    def active(self, first: int) -> AbstractContextManager[None]:  # noqa: ARG002
        return self._list.replaced(self._remaining)


class LowBitModel(PartialModel):
    """Partial model with low-bit weights, and optionally an attention window (QSpec, arXiv 2410.11305)."""

    def __init__(self, low_bits: LowBitWeights, layout: PassLayout, sink_window: SinkWindow | None) -> None:
        super().__init__()
        self._low_bits = low_bits
        self._layout = layout
        self._window = sink_window

    @contextmanager
    def active(self, first: int) -> Iterator[None]:  # noqa: ARG002
        self._layout.sink_window = self._window
        try:
            with self._low_bits.lowered():
                yield
        finally:
            self._layout.sink_window = None


class EarlyExitModel(PartialModel):
    """Partial model that runs only the first layers and the output head (LayerSkip, arXiv 2404.16710).

    It stores the hidden states after the exit layer, so that the verify pass can continue from them instead
    of computing the lower layers again.
    """

    def __init__(self, layers: LayerList, exit_layer: int) -> None:
        super().__init__()
        self._list = layers
        self._exit_layer = exit_layer
        self._lower = layers.without(range(exit_layer, len(layers.layers)))
        # For each draft pass over the current tree: the index of its first node, and the hidden states
        # [1, nodes, size] after the exit layer.
        self._states: list[tuple[int, mx.array]] = []

    @contextmanager
    def active(self, first: int) -> Iterator[None]:
        first_skipped = self._lower[self._exit_layer]
        assert isinstance(first_skipped, SkippedLayer)
        with self._list.replaced(self._lower):
            yield
        assert first_skipped.last_input is not None
        # A pass that was launched early and then discarded may have stored states for the same nodes.
        self._states = [(node, states) for node, states in self._states if node < first]
        self._states.append((first, first_skipped.last_input))
        first_skipped.last_input = None

    def background_arrays(self) -> list[mx.array]:
        return [self._states[-1][1]]

    def end_round(self) -> None:
        self._states = []

    def exit_states(self, count: int) -> mx.array:
        """Return the hidden states [1, count, size] of the first `count` tree nodes after the exit layer."""
        return mx.concatenate([states for _, states in self._states], axis=1)[:, :count]

    def resumed_from(self, states: mx.array) -> AbstractContextManager[None]:
        """Return a context manager inside which passes start after the exit layer with the given states."""
        return self._list.replaced(self._list.resumed_at(self._exit_layer, states))


def _parameter_bytes(module: Any) -> int:
    weights: Any = tree_flatten(module.parameters())
    return sum(weight.nbytes for _, weight in weights)


class PartialModelFactory:
    """Factory for the partial models of one loaded model.

    Attributes:
        low_bits: Weights that can be read with fewer bits, or None if the model was loaded without them.
        unavailable: Reasons why self-draft methods are unavailable, keyed by method name.
    """

    def __init__(self, net: Any, layout: PassLayout, low_bits: LowBitWeights | None) -> None:
        self._net = net
        self._layout = layout
        self.low_bits = low_bits
        self.unavailable: dict[str, str] = {}

    @property
    def layer_count(self) -> int:
        """Number of layers. Raises CapabilityError if the model does not store its layers in one list."""
        return len(LayerList(self._net).layers)

    def layer_bytes(self) -> tuple[list[int], int]:
        """Return the size of each layer, and of the weights that a pass reads after the last layer, in bytes.

        If the model has a separate output head, the embedding table is not counted, because a pass reads
        only a few of its rows.
        """
        layers = [_parameter_bytes(layer) for layer in LayerList(self._net).layers]
        tables = sum(
            _parameter_bytes(one)
            for _, one in self._net.named_modules()
            if type(one).__name__.endswith("Embedding")
        )
        rest = _parameter_bytes(self._net) - sum(layers)
        return layers, rest - tables if rest >= 2 * tables else rest

    def create(self, method: SelfDraft, facts: ModelFacts) -> tuple[PartialModel, str, int]:
        """Create the partial model of a self-draft method.

        Returns:
            The partial model, its description, and the size of the weights added only for it, in bytes.

        Raises:
            CapabilityError: The model does not support this method.
            OptionError: The layers or the attention window of `method` are invalid.
        """
        if isinstance(method, EarlyExit):
            self.check("layerskip", facts)
            partial_model = self.early_exit(method.exit_layer, facts.name)
            return partial_model, f"its first {method.exit_layer} of {self.layer_count} layers", 0
        if isinstance(method, LowBit):
            self.check("lowbit", facts)
            low_bits = self.low_bits
            assert low_bits is not None
            return self.low_bit(method, facts.name), "fewer bits", low_bits.nbytes
        self.check("swift", facts)
        return self.skipped_layers(method.layers, facts.name), f"without {len(method.layers)} layers", 0

    def check(self, name: str, facts: ModelFacts) -> None:
        """Raise CapabilityError if the model does not support the self-draft method with this name."""
        if name not in facts.capabilities.self_draft_methods:
            reason = self.unavailable.get(name, facts.capabilities.reason)
            raise CapabilityError(
                f"{facts.name} cannot draft for itself with {name}: {reason}", "choose another method"
            )

    def early_exit(self, exit_layer: int, name: str) -> EarlyExitModel:
        """Return a partial model that runs only the first `exit_layer` layers.

        Raises:
            OptionError: The exit layer is not between 1 and the number of layers minus 1.
            CapabilityError: The model does not store its layers in a single list.
        """
        layers = LayerList(self._net)
        last = len(layers.layers) - 1
        if not 1 <= exit_layer <= last:
            raise OptionError(
                f"{name} has {last + 1} layers, so it cannot exit after layer {exit_layer}",
                f"choose an exit layer from 1 to {last}",
            )
        return EarlyExitModel(layers, exit_layer)

    def skipped_layers(self, skipped: Collection[int], name: str) -> SkippedLayersModel:
        """Return a partial model that skips the layers at the given indices.

        Raises:
            OptionError: `skipped` contains the first or last layer, or a layer that does not exist.
            CapabilityError: The model does not store its layers in a single list.
        """
        layers = LayerList(self._net)
        last = len(layers.layers) - 1
        for layer in skipped:
            if not 1 <= layer < last:
                raise OptionError(
                    f"layer {layer} of {name} cannot be skipped", f"choose layers from 1 to {last - 1}"
                )
        return SkippedLayersModel(layers, frozenset(skipped))

    def low_bit(self, method: LowBit, name: str) -> LowBitModel:
        """Return a partial model with low-bit weights. The model must have been loaded with `low_bits`.

        Raises:
            CapabilityError: `method` specifies a separate copy of the weights.
            OptionError: The attention window of `method` is invalid.
        """
        if method.copy is not None:
            raise CapabilityError(
                f"{name} stores both precisions itself and does not accept a copy", "omit the copy"
            )
        window = None
        if method.window_tokens is not None:
            if method.window_tokens < 1 or method.sink_tokens < 0:
                raise OptionError(
                    f"an attention window of the first {method.sink_tokens} and the last"
                    f" {method.window_tokens} tokens is invalid",
                    "choose a window with at least one recent token",
                )
            window = SinkWindow(method.sink_tokens, method.window_tokens)
        assert self.low_bits is not None
        return LowBitModel(self.low_bits, self._layout, window)
