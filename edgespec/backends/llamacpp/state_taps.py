"""Copy hidden states from every pass of a llama.cpp context.

llama-cpp-python does not declare libllama's functions for this. They are declared in llama.cpp's staging
header `llama-ext.h`, which can change with every release. If a function is missing, the drafting methods
that need it are unavailable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.metadata import metadata
from edgespec.backends.llamacpp.mtp_files import ASSISTANT_TARGET, MTP_GRAPHS
from edgespec.backends.llamacpp.native import ggml, library
from edgespec.errors import BackendError, CapabilityError
from edgespec.model.hidden_states import POST_NORM

__all__ = [
    "HiddenStateHook",
    "StateTaps",
    "copied_rows",
    "layer_output",
    "lists_target_layers",
    "nextn",
    "nextn_api",
    "target_layer_ids",
]

# Architectures for which llama.cpp can copy layer inputs. With any other architecture, it aborts.
_TAPPED_ARCHITECTURES = frozenset(
    {
        "bailingmoe3", "deepseek4", "gemma4", "hunyuan-vl", "lfm2", "llama", "mimo2", "minimax-01",
        "minimax-m2", "nanbeige", "nemotron-h", "openai-moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
        "qwen3next",
    }
)  # fmt: skip


class HiddenStateHook:
    """Copies tensors with given names from every forward pass, as float32 arrays [rows, row_size].

    Each hook belongs to one context and is used only by the thread that runs its forward passes. llama.cpp
    calls the hook for every node in the computation graph, which costs about a microsecond per node.

    Attributes:
        names: The names of the chosen tensors.
        stop_after: Whether to stop a forward pass once all chosen tensors have been copied.
        callback: The C callback for `llama_context_params.cb_eval`.
    """

    def __init__(self, names: Sequence[str], row_size: int) -> None:
        self.stop_after = False
        self.set_names(names)
        self._row_size = row_size
        self._rows: dict[bytes, NDArray[np.float32]] = {}
        self._ggml = ggml()
        # Keep a reference to the callback, because ctypes does not and C code may call it later.
        self.callback = library().ggml_backend_sched_eval_callback(self.on_node)

    def set_names(self, names: Sequence[str]) -> None:
        """Choose the tensors to copy, by their names in the computation graph."""
        self.names = tuple(names)
        self._names = frozenset(name.encode() for name in names)

    def clear(self) -> None:
        """Discard tensors left over from an interrupted pass."""
        self._rows.clear()

    def on_node(self, tensor: int, is_query: bool, _user_data: object) -> bool:
        """Handle a node of the computation graph. See llama.cpp's `cb_eval` for the return value."""
        name = self._ggml.ggml_get_name(tensor)
        if is_query:  # Before computing a node, llama.cpp asks whether the hook needs its result.
            return name in self._names
        size = self._ggml.ggml_nbytes(tensor)
        rows = np.empty(size // 4, np.float32)
        self._ggml.ggml_backend_tensor_get(tensor, rows.ctypes.data, 0, size)
        self._rows[name] = rows
        return not (self.stop_after and len(self._rows) == len(self._names))

    def take(self, name: str, count: int) -> NDArray[np.float32]:
        """Remove and return a tensor copied from the last forward pass, as a float32 array [count, row_size].

        Raises:
            BackendError: The tensor was not copied, or has an unexpected size.
        """
        rows = self._rows.pop(name.encode(), np.empty(0, np.float32))
        if rows.size != count * self._row_size:
            raise BackendError(
                f"llama.cpp returned {rows.size:,} values of {name} for {count} tokens instead of"
                f" {count * self._row_size:,}",
                "choose another model, because edgespec cannot read the hidden states of this one",
            )
        return rows.reshape(count, self._row_size)


def layer_output(layer: int) -> str:
    """Return the name of the llama.cpp tensor that contains the hidden states after a layer."""
    return f"l_out-{layer}"


def copied_rows(address: int, count: int, size: int) -> NDArray[np.float32]:
    """Return a copy of the float32 array [count, size] at an address."""
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, (count, size)).copy()


class StateTaps:
    """The hidden states to copy in every pass of a context, numbered as in `HiddenStateSource`.

    For some architectures, llama.cpp itself can copy layer inputs. For architectures with multi-token
    prediction (MTP) layers, it can also copy the final hidden states that the MTP layers read. A hook copies
    all other hidden states, and must be registered when the context is created.

    Attributes:
        hook: The hook, which the context must register.
        uses_hook: Whether the hook copies any hidden states.
        needs_all_rows: Whether the hook copies hidden states that llama.cpp computes only for tokens whose
            logits are requested.
    """

    def __init__(self, model: Any) -> None:
        lib = library()
        self._size: int = lib.llama_model_n_embd(model)
        self._layer_count: int = lib.llama_model_n_layer(model)
        self._architecture = metadata(model, "general.architecture")
        self._layer_api = _layer_input_api() if self._architecture in _TAPPED_ARCHITECTURES else None
        # Indices of the final hidden states that llama.cpp can copy itself.
        self._final = _final_states(self._architecture or "", self._layer_count) if nextn_api() else ()
        self.hook = HiddenStateHook((), self._size)
        self._select(())

    def _select(self, states: Sequence[int]) -> None:
        layers = range(self._layer_count) if self._layer_api else range(0)
        self._states = states
        self._tapped = [state for state in states if state in layers]
        hooked = (state for state in states if state not in layers and state not in self._final)
        self._hooked = {state: _tensor(state) for state in hooked}
        self._copies_final = not set(self._final).isdisjoint(states)
        self.uses_hook = bool(self._hooked)
        self.needs_all_rows = not self._hooked.keys().isdisjoint((POST_NORM, self._layer_count))
        self.hook.set_names(list(self._hooked.values()))

    def set(self, context: Any, states: Sequence[int]) -> None:
        """Choose the hidden states that later passes copy. `context` is None if it was freed.

        Raises:
            CapabilityError: One of the hidden states does not exist in the model or cannot be read.
        """
        for state in states:
            if not (POST_NORM <= state <= self._layer_count or state in self._final):
                raise CapabilityError(
                    f"hidden state {state} does not exist in a model with {self._layer_count} layers",
                    "choose the draft head that was published for this model",
                    code="head_mismatch",
                )
        if 0 in states and not self._layer_api:
            raise CapabilityError(
                "cannot read the input of the first layer in models with architecture"
                f" {self._architecture!r}",
                "choose another draft head, or another method, such as suffix",
            )
        before = self._tapped
        self._select(states)
        if context:
            self._switch_layers(context, (*before, *self._tapped))
            if self._final:
                nextn().switch(context, self._copies_final, False)

    def apply(self, context: Any) -> None:
        """Make a newly created context copy the chosen hidden states."""
        self._switch_layers(context, self._tapped)
        if self._copies_final:
            nextn().switch(context, True, False)

    def _switch_layers(self, context: Any, layers: Sequence[int]) -> None:
        """Make a context copy the inputs of the chosen ones of `layers`, and stop copying those of others."""
        if self._layer_api:
            for layer in layers:
                self._layer_api.switch(context, layer, layer in self._tapped)

    def rows(self, context: Any, count: int) -> NDArray[np.float32]:
        """Return the last pass's hidden states for its `count` tokens, as float32 [tokens, states, size].

        Raises:
            BackendError: llama.cpp did not compute one of the hidden states for all tokens.
        """
        found = {state: self.hook.take(name, count) for state, name in self._hooked.items()}
        if self._layer_api:
            for layer in self._tapped:
                found[layer] = copied_rows(self._layer_api.address(context, layer), count, self._size)
        if self._copies_final:
            rows = copied_rows(nextn().address(context), count, len(self._final) * self._size)
            found |= zip(self._final, np.split(rows, len(self._final), axis=1), strict=True)
        return np.stack([found[state] for state in self._states], axis=1)


def _final_states(architecture: str, layer_count: int) -> tuple[int, ...]:
    """Return the indices of the final hidden states that MTP layers read, or () if there are none."""
    if architecture == ASSISTANT_TARGET:
        return (POST_NORM,)
    graph = MTP_GRAPHS.get(architecture)
    return graph.states_read(layer_count) if graph else ()


def _tensor(state: int) -> str:
    """Return the name of the llama.cpp tensor that holds a hidden state."""
    return "result_norm" if state == POST_NORM else layer_output(state - 1)


@dataclass(frozen=True, slots=True)
class LayerInputApi:
    """Functions for reading the inputs of a context's layers.

    Attributes:
        switch: Makes a context copy a layer's input in every pass, or stop copying it.
        address: Returns the address of the copied input of a layer, float32 [tokens, embedding size].
    """

    switch: Callable[[Any, int, bool], None]
    address: Callable[[Any, int], int]


@dataclass(frozen=True, slots=True)
class NextnApi:
    """Functions that read the final hidden states and select the multi-token prediction (MTP) layer to run.

    Attributes:
        switch: Makes a context copy the final hidden states in every pass, or stop copying them. If the last
            argument is True, only tokens whose logits are requested are copied.
        address: Returns the address of the copied hidden states, float32 [tokens, embedding size].
        select_layer: Chooses the MTP layer that a context runs.
    """

    switch: Callable[[Any, bool, bool], None]
    address: Callable[[Any], int]
    select_layer: Callable[[Any, int], None]


_POINTER, _NUMBER, _FLAG = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool


@cache
def _layer_input_api() -> LayerInputApi | None:
    """Return the functions for reading layer inputs, or None if llama.cpp lacks any of them."""
    found = _functions(
        ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, _POINTER, _NUMBER, _FLAG),
        ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", _POINTER, _POINTER, _NUMBER),
    )
    return LayerInputApi(*found) if found else None


@cache
def nextn_api() -> NextnApi | None:
    """Return the functions for MTP layers and final states, or None if llama.cpp lacks any of them."""
    found = _functions(
        ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, _POINTER, _FLAG, _FLAG),
        ("_Z26llama_get_embeddings_nextnP13llama_context", _POINTER, _POINTER),
        ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, _POINTER, ctypes.c_int32),
    )
    return NextnApi(*found) if found else None


def nextn() -> NextnApi:
    """Return the functions for MTP layers and final states, which this llama.cpp must have."""
    api = nextn_api()
    assert api is not None
    return api


@cache
def _target_layer_functions() -> list[Any]:
    return _functions(
        ("_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), _POINTER),
        ("_Z30llama_model_target_layer_ids_nPK11llama_model", _NUMBER, _POINTER),
    )


def lists_target_layers() -> bool:
    """Return whether llama.cpp has the functions that `target_layer_ids` needs."""
    return bool(_target_layer_functions())


def target_layer_ids(head: Any) -> list[int]:
    """Return the indices of the target layers whose inputs a head reads, given its llama_model handle."""
    ids, count = _target_layer_functions()
    return list(ids(head)[: count(head)])


def _functions(*signatures: tuple[Any, ...]) -> list[Any]:
    """Load functions from libllama. Return an empty list if any of them is missing.

    Args:
        *signatures: (symbol, result type, *argument types) tuples.
    """
    loaded = library().llama_cpp._lib
    functions = []
    for symbol, result, *arguments in signatures:
        try:
            function = getattr(loaded, symbol)
        except AttributeError:
            return []
        function.restype, function.argtypes = result, arguments
        functions.append(function)
    return functions
