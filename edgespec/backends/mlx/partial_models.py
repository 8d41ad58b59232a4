"""Partial models, which let a target draft for itself with fewer layers or at lower precision.

A partial model changes the target only while the graph of a draft pass is being built. Draft passes append
temporary rows to the target's caches. These rows are discarded before the draft is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx

from edgespec.backends.mlx.attention_cache import PassLayout
from edgespec.backends.mlx.layers import LayerList, SkippedLayer
from edgespec.backends.mlx.low_bit_weights import LowBitWeights
from edgespec.backends.mlx.model_skeleton import parameter_bytes
from edgespec.errors import CapabilityError, OptionError
from edgespec.model.base import EarlyExit, LowBit
from edgespec.model.model_facts import ModelFacts

__all__ = ["EarlyExitModel", "PartialDraft", "PartialModel", "PartialModelFactory"]

PartialDraft: TypeAlias = EarlyExit | LowBit
"""The self-draft methods that run only part of the target."""


class PartialModel:
    """A draft model that uses a subset of the target's weights and shares its caches.

    Attributes:
        description: User-facing description of how the model differs from the target.
        extra_bytes: Size of the weights loaded only for this model, in bytes.
        run_ahead: Whether to launch the next draft step early. See `LanguageModel.run_ahead`.
    """

    def __init__(
        self, description: str, activate: Callable[[], AbstractContextManager[None]], extra_bytes: int = 0
    ) -> None:
        self.description = description
        self.extra_bytes = extra_bytes
        self.run_ahead = False
        self._activate = activate

    def active(self, first: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context manager in which the target runs only this partial model.

        Args:
            first: Index in the draft tree of the first token that the target runs.
        """
        return self._activate()

    def background_arrays(self) -> list[mx.array]:
        """Return the arrays that the last draft pass created for use by later passes."""
        return []

    def end_round(self) -> None:
        """Discard the data that draft passes stored for the current token tree."""


class EarlyExitModel(PartialModel):
    """Partial model that runs only the lower layers and the output head (LayerSkip, arXiv 2404.16710).

    Stores the hidden states after the exit layer, so that the verify pass can resume from them instead of
    running the lower layers again.
    """

    def __init__(self, layers: LayerList, exit_layer: int) -> None:
        lower = layers.without(range(exit_layer, len(layers.layers)))
        super().__init__(
            f"the first {exit_layer} of the model's {len(layers.layers)} layers",
            partial(layers.replaced, lower),
        )
        self._list = layers
        self._exit_layer = exit_layer
        self._first_skipped: SkippedLayer = lower[exit_layer]
        # For each draft pass, the index of its first tree node and the hidden states [1, nodes, size] after
        # the exit layer.
        self._states: list[tuple[int, mx.array]] = []

    @contextmanager
    def active(self, first: int) -> Iterator[None]:
        with self._activate():
            yield
        # Drop hidden states that a discarded draft pass may have stored for the nodes from `first` on.
        self._states = [(node, states) for node, states in self._states if node < first]
        assert self._first_skipped.last_input is not None
        self._states.append((first, self._first_skipped.last_input))
        self._first_skipped.last_input = None

    def background_arrays(self) -> list[mx.array]:
        return [self._states[-1][1]]

    def end_round(self) -> None:
        self._states = []

    def exit_states(self, count: int) -> mx.array:
        """Return the lower layers' output for the first `count` nodes of the draft tree, [1, count, size]."""
        return mx.concatenate([states for _, states in self._states], axis=1)[:, :count]

    def resumed_from(self, states: mx.array) -> AbstractContextManager[None]:
        """Return a context manager in which the model continues from `states`, the lower layers' output."""
        return self._list.replaced(self._list.resumed_at(self._exit_layer, states))


@contextmanager
def _low_precision(low_bits: LowBitWeights, layout: PassLayout, method: LowBit) -> Iterator[None]:
    low_bits.low, layout.window = True, method
    try:
        yield
    finally:
        low_bits.low, layout.window = False, None


class PartialModelFactory:
    """Creates draft models that run fewer layers of a loaded target, or all layers at lower precision.

    Attributes:
        low_bits: Weights that can be read at reduced precision, or None if the model was loaded without them.
        unavailable: Reasons why self-draft methods are unavailable, keyed by method name.
    """

    def __init__(self, net: Any, layout: PassLayout, low_bits: LowBitWeights | None) -> None:
        self._net = net
        self._layout = layout
        self.low_bits = low_bits
        self.unavailable: dict[str, str] = {}

    @property
    def layer_count(self) -> int:
        return len(LayerList(self._net).layers)

    def layer_bytes(self) -> tuple[list[int], int]:
        """Return the size in bytes of each layer and of the output head.

        An untied embedding table is not counted, because a pass reads only a few of its rows.
        """
        layers = [parameter_bytes(layer) for layer in LayerList(self._net).layers]
        modules = (one for _, one in self._net.named_modules() if type(one).__name__.endswith("Embedding"))
        tables = sum(map(parameter_bytes, modules))
        rest = parameter_bytes(self._net) - sum(layers)
        return layers, rest - tables if rest >= 2 * tables else rest

    def check(self, name: str, facts: ModelFacts) -> None:
        """Raise CapabilityError if the model does not support the self-draft method with this name."""
        if name not in facts.capabilities.self_draft_methods:
            refusals = facts.capabilities.self_draft_refusals
            reason = refusals.get(name) or self.unavailable.get(name, facts.capabilities.reason)
            raise CapabilityError(
                f"the {name} method does not work with {facts.name}: {reason}", "choose another method"
            )

    def create(self, method: PartialDraft, name: str) -> PartialModel:
        """Create the draft model for a self-draft method that the target supports.

        Args:
            method: The self-draft method.
            name: Model name for error messages.

        Raises:
            CapabilityError: The target does not store its layers in a single list, or `method` uses a
                separate low-bit copy.
            OptionError: `method` specifies a layer that does not exist.
        """
        if isinstance(method, LowBit):
            if method.copy is not None:
                raise CapabilityError(
                    f"{name} already contains low-bit weights, so it cannot use a separate low-bit copy",
                    "do not set `LowBit.copy`",
                    code="lowbit_not_supported",
                )
            assert self.low_bits is not None
            activate = partial(_low_precision, self.low_bits, self._layout, method)
            return PartialModel("fewer bits", activate, self.low_bits.nbytes)
        layers = LayerList(self._net)
        last = len(layers.layers) - 1
        if not 1 <= method.exit_layer <= last:
            raise OptionError(
                f"{name} has {last + 1} layers, so it cannot draft with the first {method.exit_layer}",
                f"draft with 1 to {last} layers",
            )
        return EarlyExitModel(layers, method.exit_layer)
