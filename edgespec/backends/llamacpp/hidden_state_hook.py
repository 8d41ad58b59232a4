"""Copy hidden states out of a running llama.cpp forward pass with an eval callback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import ggml, library
from edgespec.errors import BackendError

__all__ = ["HiddenStateHook", "layer_output"]


class HiddenStateHook:
    """Copies tensors with given names from every forward pass, as float32 arrays [rows, row_size].

    Each hook belongs to one context and is used only by the thread that runs its forward passes. llama.cpp
    calls the hook for every node in the computation graph, which takes about a microsecond per node.

    Attributes:
        stop_after: Whether to stop a forward pass once all chosen tensors have been copied.
        callback: The C callback for `llama_context_params.cb_eval`.
    """

    def __init__(self, names: Sequence[str], row_size: int) -> None:
        self.stop_after = False
        self.set_names(names)
        self._row_size = row_size
        self._rows: dict[bytes, NDArray[np.float32]] = {}
        self._ggml = ggml()
        # Keep a reference to the callback, because C code may call it later, and ctypes holds no reference.
        self.callback = library().ggml_backend_sched_eval_callback(self._on_node)

    def set_names(self, names: Sequence[str]) -> None:
        """Choose the tensors to copy, by their names in the computation graph."""
        self._names = frozenset(name.encode() for name in names)

    def clear(self) -> None:
        """Discard tensors that are left from an interrupted pass."""
        self._rows.clear()

    def _on_node(self, tensor: int, is_query: bool, _user_data: object) -> bool:
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
                "choose another model, because the hidden states of this one cannot be read",
            )
        return rows.reshape(count, self._row_size)


def layer_output(layer: int) -> str:
    """Return the name of the llama.cpp tensor that contains the hidden states after a layer."""
    return f"l_out-{layer}"
