"""Let MLX compute matrix products with OpenBLAS on Linux.

MLX's CPU package for Linux contains the reference implementation of BLAS. With OpenBLAS, matrix products took
about a thirtieth of the time (512 x 576 by 576 x 1,536 in float32, two cores with AVX-512).
"""

from __future__ import annotations

import ctypes
import sys

_LIBRARY = "libopenblas.so.0"
_loaded: list[ctypes.CDLL] = []


def load_openblas() -> None:
    """Load OpenBLAS if it is installed, so that MLX finds its functions first.

    Has no effect if this process has already imported MLX. Only training calls this function. It would change
    how replies are rounded.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules or _loaded:
        return
    try:
        # The dynamic linker searches this library before libraries that are loaded later.
        _loaded.append(ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL))
    except OSError:
        return


def why_slow() -> str:
    """Return why MLX is slow on the CPU and what to do about it, or an empty string."""
    if sys.platform != "linux" or _loaded:
        return ""
    return (
        "MLX computes matrix products slowly on this machine, because it does not use OpenBLAS; with OpenBLAS"
        " (on Debian and Ubuntu, the package libopenblas0), training is many times as fast"
    )
