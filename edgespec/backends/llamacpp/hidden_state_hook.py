"""Reading a tensor out of a running pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import library
from edgespec.errors import BackendError

__all__ = ["HiddenStateHook", "layer_output"]


class HiddenStateHook:
    """Copies tensors of every pass, by name: float32 [rows, row_size].

    llama.cpp asks for each node of a pass whether it is wanted, so a tapped context is slower by about a
    microsecond a node. `last`: nothing after the tensor is computed.
    """

    def __init__(self, names: Sequence[str], row_size: int) -> None:
        self.last = False
        self._names = frozenset(name.encode() for name in names)
        self._row_size = row_size
        self._rows: dict[bytes, NDArray[np.float32]] = {}
        self._ggml = _ggml()
        # ctypes keeps no reference to a callback that C holds.
        self.callback = library().ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, tensor: int, asks: bool, _user_data: object) -> bool:
        name = self._ggml.ggml_get_name(tensor)
        if asks:
            return name in self._names
        size = self._ggml.ggml_nbytes(tensor)
        rows = np.empty(size // 4, np.float32)
        self._ggml.ggml_backend_tensor_get(tensor, rows.ctypes.data, 0, size)
        self._rows[name] = rows.reshape(-1, self._row_size)
        return not self.last

    def take(self, name: str, count: int) -> NDArray[np.float32]:
        """The rows of a tensor in the last pass. Raises BackendError when it had none with `count` rows."""
        rows = self._rows.pop(name.encode(), None)
        if rows is None or len(rows) != count:
            raise BackendError(
                f"llama.cpp gave {0 if rows is None else len(rows)} rows of {name} where {count} were run",
                "this kind of model cannot be read between its layers",
            )
        return rows


@cache
def _ggml() -> Any:
    """ggml's own functions: llama_cpp loads the library but names few of them."""
    from llama_cpp._ggml import libggml

    libggml.ggml_get_name.restype = ctypes.c_char_p
    libggml.ggml_get_name.argtypes = [ctypes.c_void_p]
    libggml.ggml_nbytes.restype = ctypes.c_size_t
    libggml.ggml_nbytes.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_tensor_get.restype = None
    libggml.ggml_backend_tensor_get.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
    ]
    return libggml


def layer_output(layer: int) -> str:
    """What llama.cpp calls the hidden states after a layer."""
    return f"l_out-{layer}"
