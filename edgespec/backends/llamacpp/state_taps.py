"""Copy hidden states from every pass of a llama.cpp context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.hidden_state_log import POST_NORM
from edgespec.backends.llamacpp.gemma4_assistant_files import ASSISTANT_TARGET
from edgespec.backends.llamacpp.hidden_state_hook import HiddenStateHook, layer_output
from edgespec.backends.llamacpp.layer_taps import LayerTaps, copied_rows
from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.mtp_files import MTP_GRAPHS
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.staging_api import TAPPED_ARCHITECTURES, layer_input_api, nextn_api
from edgespec.errors import CapabilityError

__all__ = ["StateTaps"]


class StateTaps:
    """The hidden states to copy in every pass of a context, numbered as in `HiddenStateSource`.

    For some architectures, llama.cpp itself can copy the inputs of layers (`LayerTaps`). For architectures
    with multi-token prediction (MTP) layers, it can also copy the final hidden states that the MTP layers
    read. A hook copies all other hidden states, and must be registered when the context is created.

    Attributes:
        hook: The hook, which the context must register.
        uses_hook: Whether the hook copies any hidden states.
        needs_all_rows: Whether the hook copies hidden states that llama.cpp computes only for tokens whose
            logits are requested.
    """

    def __init__(self, model: Any) -> None:
        lib = library()
        size: int = lib.llama_model_n_embd(model)
        self._layer_count: int = lib.llama_model_n_layer(model)
        self._architecture = metadata(model, "general.architecture")
        self._has_layer_taps = layer_input_api() is not None and self._architecture in TAPPED_ARCHITECTURES
        self._layers, self._size = LayerTaps(size), size
        # The indices of the final hidden states that llama.cpp itself can copy.
        self._final = _final_states(self._architecture or "", self._layer_count) if nextn_api() else ()
        self.hook = HiddenStateHook((), size)
        self._select(())

    def _select(self, states: Sequence[int]) -> None:
        layers = range(self._layer_count) if self._has_layer_taps else range(0)
        self._states = states
        self._tapped = [state for state in states if state in layers]
        hooked = (state for state in states if state not in layers and state not in self._final)
        self._hooked = {state: _tensor(state) for state in hooked}
        self.uses_hook = bool(self._hooked)
        self.needs_all_rows = not self._hooked.keys().isdisjoint((POST_NORM, self._layer_count))
        self.hook.set_names(list(self._hooked.values()))

    def set(self, context: Any, states: Sequence[int]) -> None:
        """Choose the hidden states to copy from the next pass on. `context` is None if it was freed.

        Raises:
            CapabilityError: One of the hidden states does not exist in the model or cannot be read.
        """
        for state in states:
            if not (POST_NORM <= state <= self._layer_count or state in self._final):
                raise CapabilityError(
                    f"hidden state {state} does not exist in a model with {self._layer_count} layers",
                    "choose the head that was published for this target",
                )
        if 0 in states and not self._has_layer_taps:
            raise CapabilityError(
                f"the input of the first layer cannot be read from the architecture {self._architecture!r}",
                "choose another head, or another method, such as suffix",
            )
        self._select(states)
        self._layers.set(context, self._tapped)
        self._copy_final(context)

    def apply(self, context: Any) -> None:
        """Copy the chosen hidden states in a newly created context."""
        self._layers.apply(context)
        if self._copies_final:
            self._copy_final(context)

    @property
    def _copies_final(self) -> bool:
        return not set(self._final).isdisjoint(self._states)

    def _copy_final(self, context: Any) -> None:
        """Switch llama.cpp's own copying of the final hidden state on or off, as chosen."""
        if context and self._final and (api := nextn_api()):
            api.switch(context, self._copies_final, False)

    def rows(self, context: Any, count: int) -> NDArray[np.float32]:
        """Return the hidden states from the last pass of `count` tokens, as float32 [tokens, states, size].

        Raises:
            BackendError: llama.cpp did not compute one of the hidden states for all tokens.
        """
        found = dict(zip(self._tapped, self._layers.rows(context, count), strict=True))
        found |= {state: self.hook.take(name, count) for state, name in self._hooked.items()}
        if self._copies_final and (api := nextn_api()):
            rows = copied_rows(api.address(context), count, len(self._final) * self._size)
            found |= zip(self._final, np.split(rows, len(self._final), axis=1), strict=True)
        return np.stack([found[state] for state in self._states], axis=1)


def _final_states(architecture: str, layer_count: int) -> tuple[int, ...]:
    """Return the indices of the final hidden states that MTP heads read, or none without MTP heads."""
    if architecture == ASSISTANT_TARGET:
        return (POST_NORM,)
    graph = MTP_GRAPHS.get(architecture)
    return graph.states_read(layer_count) if graph else ()


def _tensor(state: int) -> str:
    """Return the name of the llama.cpp tensor that contains a hidden state."""
    return "result_norm" if state == POST_NORM else layer_output(state - 1)
