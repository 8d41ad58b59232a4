"""How a model's own draft runs a pass: with less of the model than there is.

While a draft's graph is built, something is left out; what is written into the caches belongs to a round
that the target ends.
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
    """One way to draft with the target's weights and memory.

    runs_ahead: the hint of `LanguageModel.run_ahead`.
    """

    def __init__(self) -> None:
        self.runs_ahead = False

    @abstractmethod
    def drafting(self, first: int) -> AbstractContextManager[None]:
        """Passes in here are drafts; this one holds nodes `first` and up."""

    def background_arrays(self) -> list[mx.array]:
        """Arrays of the last draft pass that will be needed later."""
        return []

    def let_go(self) -> None:  # noqa: B027
        """What was kept of the round is needed no more."""


class SkippedLayersModel(PartialModel):
    """Without some layers."""

    def __init__(self, layers: LayerList, skipped: frozenset[int]) -> None:
        super().__init__()
        self._list = layers
        self._left = layers.without(skipped)

    def drafting(self, first: int) -> AbstractContextManager[None]:  # noqa: ARG002
        return self._list.replaced(self._left)


class LowBitModel(PartialModel):
    """With fewer bits of the weights; where a window is given, with the first and last cached tokens only."""

    def __init__(self, low_bits: LowBitWeights, shape: PassLayout, sink_window: SinkWindow | None) -> None:
        super().__init__()
        self._low_bits = low_bits
        self._shape = shape
        self._window = sink_window

    @contextmanager
    def drafting(self, first: int) -> Iterator[None]:  # noqa: ARG002
        self._shape.sink_window = self._window
        try:
            with self._low_bits.lowered():
                yield
        finally:
            self._shape.sink_window = None


class EarlyExitModel(PartialModel):
    """With the layers below `exit_layer`, the norm and the head.

    What those layers said of each node is kept, so that the target can go on from there.
    """

    def __init__(self, layers: LayerList, exit_layer: int) -> None:
        super().__init__()
        self._list = layers
        self._exit = exit_layer
        self._lower = layers.without(range(exit_layer, len(layers.layers)))
        # (first node, hidden states [1, nodes, size]) of each pass of the round.
        self._said: list[tuple[int, mx.array]] = []

    @contextmanager
    def drafting(self, first: int) -> Iterator[None]:
        above = self._lower[self._exit]
        assert isinstance(above, SkippedLayer)
        with self._list.replaced(self._lower):
            yield
        assert above.given is not None
        # A pass that was begun in vain is written over.
        self._said = [(node, states) for node, states in self._said if node < first]
        self._said.append((first, above.given))
        above.given = None

    def background_arrays(self) -> list[mx.array]:
        return [self._said[-1][1]]

    def let_go(self) -> None:
        self._said = []

    def said(self, count: int) -> mx.array:
        """Hidden states [1, count, size] of the first nodes of the round."""
        return mx.concatenate([states for _, states in self._said], axis=1)[:, :count]

    def going_on(self, states: mx.array) -> AbstractContextManager[None]:
        """Passes in here begin at the exit with these states [1, tokens, size]."""
        return self._list.replaced(self._list.after(self._exit, states))


def _bytes(module: Any) -> int:
    weights: Any = tree_flatten(module.parameters())
    return sum(weight.nbytes for _, weight in weights)


class PartialModelFactory:
    """Makes them for one loaded model.

    low_bits: None where it was not made ready for fewer. missing: why one of `self_draft_methods`
    cannot be taken, by name.
    """

    def __init__(self, net: Any, shape: PassLayout, low_bits: LowBitWeights | None) -> None:
        self._net = net
        self._shape = shape
        self.low_bits = low_bits
        self.missing: dict[str, str] = {}

    @property
    def layer_count(self) -> int:
        """Raises CapabilityError where the layers are not to be found."""
        return len(LayerList(self._net).layers)

    def layer_bytes(self) -> tuple[list[int], int]:
        """Bytes of each layer, and of what a pass reads after the last one.

        A table beside a head of its own is looked up in, and not read.
        """
        layers = [_bytes(layer) for layer in LayerList(self._net).layers]
        tables = sum(
            _bytes(one) for _, one in self._net.named_modules() if type(one).__name__.endswith("Embedding")
        )
        rest = _bytes(self._net) - sum(layers)
        return layers, rest - tables if rest >= 2 * tables else rest

    def make(self, how: SelfDraft, facts: ModelFacts) -> tuple[PartialModel, str, int]:
        """A part, what it is called, and the bytes kept for it alone.

        Raises CapabilityError where it is not exact or not there, OptionError for layers that are not there.
        """
        if isinstance(how, EarlyExit):
            self.check("layerskip", facts)
            exit_ = self.leaving(how.exit_layer, facts.name)
            return exit_, f"its first {how.exit_layer} of {self.layer_count} layers", 0
        if isinstance(how, LowBit):
            self.check("lowbit", facts)
            low_bits = self.low_bits
            assert low_bits is not None
            return self.lowered(how, facts.name), "fewer bits", low_bits.nbytes
        self.check("swift", facts)
        return self.skipping(how.layers, facts.name), f"without {len(how.layers)} layers", 0

    def check(self, way: str, facts: ModelFacts) -> None:
        """Raises CapabilityError with the reason why the model cannot draft for itself that way."""
        if way not in facts.capabilities.self_draft_methods:
            why = self.missing.get(way, facts.capabilities.reason)
            raise CapabilityError(
                f"{facts.name} cannot draft for itself by {way}: {why}", "choose another method"
            )

    def leaving(self, exit_layer: int, name: str) -> EarlyExitModel:
        """The first `exit_layer` layers, 1 to all but one, of the model called `name`.

        Raises OptionError for another number, CapabilityError where the layers are not to be found.
        """
        layers = LayerList(self._net)
        last = len(layers.layers) - 1
        if not 1 <= exit_layer <= last:
            raise OptionError(
                f"{name} has {last + 1} layers and cannot be left after {exit_layer}",
                f"choose an exit from 1 to {last}",
            )
        return EarlyExitModel(layers, exit_layer)

    def skipping(self, skipped: Collection[int], name: str) -> SkippedLayersModel:
        """All layers of the model called `name` but these, counted from 0. The first and the last stay.

        Raises OptionError for another layer, CapabilityError where the layers are not to be found.
        """
        layers = LayerList(self._net)
        last = len(layers.layers) - 1
        for layer in skipped:
            if not 1 <= layer < last:
                raise OptionError(
                    f"layer {layer} of {name} cannot be skipped", f"choose layers from 1 to {last - 1}"
                )
        return SkippedLayersModel(layers, frozenset(skipped))

    def lowered(self, how: LowBit, name: str) -> LowBitModel:
        """Fewer bits of the weights of the model called `name`, which has to be made ready for them.

        Raises CapabilityError for a copy of the weights, OptionError for a window without a last token.
        """
        if how.copy is not None:
            raise CapabilityError(
                f"{name} holds both precisions itself and takes no copy", "leave the copy out"
            )
        window = None
        if how.window_tokens is not None:
            if how.window_tokens < 1 or how.sink_tokens < 0:
                raise OptionError(
                    f"a window of {how.sink_tokens} first and {how.window_tokens} last tokens is none",
                    "choose at least one last token",
                )
            window = SinkWindow(how.sink_tokens, how.window_tokens)
        assert self.low_bits is not None
        return LowBitModel(self.low_bits, self._shape, window)
