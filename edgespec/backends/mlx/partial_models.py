"""Partial models: the target with fewer layers or fewer bits, used to draft for itself.

A partial model takes effect while the graph of a draft pass is built. The rows that a draft pass writes into
the caches belong to a round that the target ends.
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
    """One way to draft with the target's weights and caches.

    Attributes:
        run_ahead: Whether to prelaunch the next draft step; see `LanguageModel.run_ahead`.
    """

    def __init__(self) -> None:
        self.run_ahead = False

    @abstractmethod
    def active(self, first: int) -> AbstractContextManager[None]:
        """Return a context manager in which passes run this partial model.

        Args:
            first: First tree node of the pass.
        """

    def background_arrays(self) -> list[mx.array]:
        """Return the arrays of the last draft pass that a later pass needs."""
        return []

    def end_round(self) -> None:  # noqa: B027
        """Drop the data of the current round."""


class SkippedLayersModel(PartialModel):
    """The target without some layers (SWIFT, arXiv 2410.06916)."""

    def __init__(self, layers: LayerList, skipped: frozenset[int]) -> None:
        super().__init__()
        self._list = layers
        self._remaining = layers.without(skipped)

    def active(self, first: int) -> AbstractContextManager[None]:  # noqa: ARG002
        return self._list.replaced(self._remaining)


class LowBitModel(PartialModel):
    """The target at fewer bits, optionally with attention to a sink window only (QSpec, arXiv 2410.11305)."""

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
    """The layers below `exit_layer`, the final norm and the output head (LayerSkip, arXiv 2404.16710).

    It holds the hidden states at the exit layer for each node of the round, so that the verify pass can
    resume there instead of computing the lower layers again.
    """

    def __init__(self, layers: LayerList, exit_layer: int) -> None:
        super().__init__()
        self._list = layers
        self._exit_layer = exit_layer
        self._lower = layers.without(range(exit_layer, len(layers.layers)))
        # (first node, hidden states [1, nodes, size]) of each draft pass of the round.
        self._states: list[tuple[int, mx.array]] = []

    @contextmanager
    def active(self, first: int) -> Iterator[None]:
        first_skipped = self._lower[self._exit_layer]
        assert isinstance(first_skipped, SkippedLayer)
        with self._list.replaced(self._lower):
            yield
        assert first_skipped.last_input is not None
        # A prelaunched pass that was discarded has left states of the same nodes.
        self._states = [(node, states) for node, states in self._states if node < first]
        self._states.append((first, first_skipped.last_input))
        first_skipped.last_input = None

    def background_arrays(self) -> list[mx.array]:
        return [self._states[-1][1]]

    def end_round(self) -> None:
        self._states = []

    def exit_states(self, count: int) -> mx.array:
        """Return the hidden states [1, count, size] at the exit layer of the first nodes of the round."""
        return mx.concatenate([states for _, states in self._states], axis=1)[:, :count]

    def resumed_from(self, states: mx.array) -> AbstractContextManager[None]:
        """Return a context manager in which passes start at the exit layer, with states [1, tokens, size]."""
        return self._list.replaced(self._list.resumed_at(self._exit_layer, states))


def _parameter_bytes(module: Any) -> int:
    weights: Any = tree_flatten(module.parameters())
    return sum(weight.nbytes for _, weight in weights)


class PartialModelFactory:
    """Creates the partial models of one loaded model.

    Attributes:
        low_bits: Weights that can be read at fewer bits; None if the model was loaded without them.
        unavailable: Why a self-draft method cannot be used, by the name of the method.
    """

    def __init__(self, net: Any, layout: PassLayout, low_bits: LowBitWeights | None) -> None:
        self._net = net
        self._layout = layout
        self.low_bits = low_bits
        self.unavailable: dict[str, str] = {}

    @property
    def layer_count(self) -> int:
        """Number of layers. Raises CapabilityError if the model does not hold its layers in one list."""
        return len(LayerList(self._net).layers)

    def layer_bytes(self) -> tuple[list[int], int]:
        """Return the bytes of each layer, and the bytes that a pass reads after the last layer.

        An embedding table beside a separate output head is not counted, as a pass reads few rows of it.
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
            The partial model, its description, and the bytes of weights held for it alone.

        Raises:
            CapabilityError: The model cannot draft this way, or not exactly.
            OptionError: `method` names layers that the model does not have.
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
        """Raise CapabilityError with the reason if the model cannot use the self-draft method `name`."""
        if name not in facts.capabilities.self_draft_methods:
            reason = self.unavailable.get(name, facts.capabilities.reason)
            raise CapabilityError(
                f"{facts.name} cannot draft for itself with {name}: {reason}", "choose another method"
            )

    def early_exit(self, exit_layer: int, name: str) -> EarlyExitModel:
        """Return the model that runs its first `exit_layer` layers.

        Raises:
            OptionError: The exit layer is not between 1 and the number of layers minus 1.
            CapabilityError: The model does not hold its layers in one list.
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
        """Return the model that skips these layers, counted from 0.

        Raises:
            OptionError: One of them is the first or the last layer, or does not exist.
            CapabilityError: The model does not hold its layers in one list.
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
        """Return the model that reads its weights at fewer bits. It must have been loaded with `low_bits`.

        Raises:
            CapabilityError: `method` names a copy of the weights.
            OptionError: The attention window of `method` has no recent tokens.
        """
        if method.copy is not None:
            raise CapabilityError(
                f"{name} holds both precisions itself and takes no copy", "leave the copy out"
            )
        window = None
        if method.window_tokens is not None:
            if method.window_tokens < 1 or method.sink_tokens < 0:
                raise OptionError(
                    f"an attention window of the first {method.sink_tokens} and the last"
                    f" {method.window_tokens} tokens is invalid",
                    "choose a window of at least one last token",
                )
            window = SinkWindow(method.sink_tokens, method.window_tokens)
        assert self.low_bits is not None
        return LowBitModel(self.low_bits, self._layout, window)
