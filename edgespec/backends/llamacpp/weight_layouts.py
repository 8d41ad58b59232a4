"""Choose the weight layouts that llama.cpp may use on this CPU, excluding AMX if it does not work.

llama.cpp can convert weights to layouts that are faster on the CPU. One of them is for AMX. If llama.cpp was
compiled with GCC 12, it crashes when it uses AMX, because the compiler drops the code that fills in the tile
configuration. llama.cpp's own option, `use_extra_bufts`, turns off all of these layouts, which makes models
slower. This module removes only AMX from the array of layouts that llama.cpp reads when it loads a model.

Because a crash cannot be caught, `main` tests AMX in a child process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.llamacpp.native import ggml, library_identity
from edgespec.model.formats.gguf_header import GgufTensor
from edgespec.system.child_process import CRASH_SIGNALS
from edgespec.system.facts import Facts

__all__ = [
    "AMX",
    "amx_added_bytes",
    "choose_layouts",
    "layout_names",
    "main",
    "remove_layout",
    "why_layout_fails",
]

AMX = "AMX"
# Value of GGML_BACKEND_DEVICE_TYPE_CPU.
_CPU = 0
# All weight types for which llama.cpp's AMX layout has kernels.
_KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16")
# For each ggml type that AMX's layout can hold: a number of weights that must divide the length of a row, and
# the bytes that the layout adds to that many weights. The numbers were derived from `supports_op` in
# `ggml-cpu/amx/amx.cpp` and `get_row_size` in `mmq.cpp`. Q8_0 gets an int32 per block, which corrects for
# signed inputs. The scales and minimums of Q4_K and Q5_K, and the scales of IQ4_XS, are unpacked.
_AMX_TYPES = {
    1: (16, 0),  # F16
    2: (32, 0),  # Q4_0
    3: (32, 0),  # Q4_1
    8: (32, 4),  # Q8_0
    12: (256, 4),  # Q4_K
    13: (256, 4),  # Q5_K
    14: (256, 0),  # Q6_K
    23: (256, 2),  # IQ4_XS
}
# AMX holds only matrices whose number of rows is a multiple of this: two tiles of 16 rows.
_AMX_ROWS = 32
# Size of the tested matrix: the smallest numbers of rows and columns that divide the work between two threads
# and suit all types. The kernels differ between one row, a part of a tile and more than one tile.
_OUTPUTS, _INPUTS, _ROWS = 64, 256, (1, 3, 40)
# Maximum difference from products with the unconverted weights, relative to the largest product. Both kinds
# of products round their inputs to 8 bits, so correct results differ far less.
_MAX_DIFFERENCE = 0.02
# Exit status of the child process if the products are wrong.
_WRONG_STATUS = 3
# Time limit of the child process in seconds. The test takes about one second, most of it for imports.
_MAX_SECONDS = 60.0
# Code of the child process. It must not import modules from the current folder, which may contain untrusted
# files.
_CODE = (
    "import json, sys; path, layout, kinds = json.loads(sys.argv[1]); sys.path[:] = path;"
    " from edgespec.backends.llamacpp.weight_layouts import main; main(layout, kinds)"
)
_lock = threading.Lock()


def choose_layouts() -> str:
    """Remove AMX from llama.cpp's layouts unless it works on this machine.

    Call this before llama.cpp loads a model. Only the first call in a process changes anything, because
    llama.cpp may read its layouts in other threads later.

    Returns:
        Why AMX was removed, or an empty string if it works or this CPU does not have it.
    """
    with _lock:
        return _choose_layouts()


@cache
def _choose_layouts() -> str:
    problem = _amx_problem() if AMX in layout_names() else ""
    if problem:
        remove_layout(AMX)
    return problem


def amx_added_bytes(tensor: GgufTensor) -> int | None:
    """Return how many bytes more a matrix takes in AMX's layout than in a file.

    Returns None if AMX's layout cannot hold the tensor.
    """
    if tensor.kind not in _AMX_TYPES or len(tensor.shape) != 2:
        return None
    weights, added_bytes = _AMX_TYPES[tensor.kind]
    inputs, outputs = tensor.shape
    return None if inputs % weights or outputs % _AMX_ROWS else outputs * inputs // weights * added_bytes


def layout_names() -> list[str]:
    """Return the names of the layouts that llama.cpp may use, in llama.cpp's order of preference."""
    return [_name(layout) for layout in _layouts()]


def remove_layout(name: str) -> None:
    """Make llama.cpp stop using a layout for models that it loads from now on.

    Models that already use the layout keep it, because llama.cpp looks up its kernels in another list.
    """
    array = _array()
    for place, layout in enumerate([*(each for each in _layouts() if _name(each) != name), None]):
        array[place] = layout


def _layouts() -> list[int]:
    """Return the addresses of the buffer types for llama.cpp's layouts."""
    array = _array()
    found: list[int] = []
    while array and array[len(found)]:
        found.append(array[len(found)])
    return found


def _name(layout: int) -> str:
    name: bytes = ggml().ggml_backend_buft_name(layout)
    return name.decode()


def _array() -> Any:
    """Return llama.cpp's own array of layouts, which ends with NULL. Return a null pointer if it has none."""
    lib, pointers = ggml(), ctypes.POINTER(ctypes.c_void_p)
    device = lib.ggml_backend_dev_by_type(_CPU)
    address = lib.ggml_backend_reg_get_proc_address(
        lib.ggml_backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts"
    )
    return ctypes.CFUNCTYPE(pointers, ctypes.c_void_p)(address)(device) if address else pointers()


def _amx_problem() -> str:
    """Return why AMX cannot be used, or an empty string. The result is saved for this build of llama.cpp."""
    key = repr(library_identity())
    saved = Facts().get("amx", key)
    if isinstance(saved, str):
        return saved
    try:
        problem = why_layout_fails(AMX)
    except (OSError, subprocess.SubprocessError) as error:
        # Do not save this, because the cause may be temporary.
        return f"it could not be tested in a separate process: {error}"
    Facts().put("amx", {key: problem})
    return problem


def why_layout_fails(layout: str, kinds: Sequence[str] = _KINDS) -> str:
    """Test a layout in a child process.

    Args:
        layout: The name of the layout.
        kinds: The types of weights to test, such as `Q4_0`.

    Returns:
        What went wrong, or an empty string if the layout works.

    Raises:
        OSError, subprocess.SubprocessError: The layout could not be tested.
    """
    path = [str(Path(__file__).parents[3]), *filter(os.path.isabs, sys.path)]
    if not sys.executable:
        raise OSError("no Python interpreter was found (sys.executable is not set)")
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CODE, json.dumps([path, layout, kinds])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Keep ggml from starting a debugger to print a backtrace when it aborts.
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        start_new_session=True,
        timeout=_MAX_SECONDS,
        check=False,
    )
    if done.returncode == _WRONG_STATUS:
        return "its results were wrong in a test"
    if -done.returncode in CRASH_SIGNALS:
        return f"it crashed in a test ({signal.Signals(-done.returncode).name})"
    done.check_returncode()
    return ""


def main(layout: str, kinds: Sequence[str]) -> None:
    """Exit with status 0 if products with weights in a layout are correct. Runs in the child process."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (address,) = (each for each in _layouts() if _name(each) == layout)
    sys.exit(0 if all(_is_right(address, kind) for kind in kinds) else _WRONG_STATUS)


def _is_right(layout: int, type_name: str) -> bool:
    """Return whether products with weights in a layout equal those with the unconverted weights."""
    # Imported only in the child process, because importing gguf takes 0.2 seconds.
    from gguf import GGMLQuantizationType

    from edgespec.backends.llamacpp.matrices import GgmlProducts

    kind = GGMLQuantizationType[type_name]
    random = np.random.default_rng(0)
    weights = random.normal(size=(_OUTPUTS, _INPUTS)).astype(np.float32)
    stored = np.empty(_OUTPUTS * ggml().ggml_row_size(kind, _INPUTS), np.uint8)
    ggml().ggml_quantize_chunk(kind, weights.ctypes.data, stored.ctypes.data, 0, _OUTPUTS, _INPUTS, None)
    plain, converted = (
        GgmlProducts(lambda: 2, each).stored_product(stored, kind, _OUTPUTS, _INPUTS)
        for each in (None, layout)
    )
    for count in _ROWS:
        rows = random.normal(size=(count, _INPUTS)).astype(np.float32)
        expected = plain(rows)
        difference = np.abs(converted(rows) - expected).max()
        # A difference of NaN is not allowed either.
        if not difference <= _MAX_DIFFERENCE * np.abs(expected).max():
            return False
    return True
