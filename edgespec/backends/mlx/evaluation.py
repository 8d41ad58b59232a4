"""Evaluate MLX arrays and copy their bytes, translate MLX errors, and limit and free MLX's memory.

By default, MLX creates a CPU stream for each thread that computes anything, and each CPU stream starts a
system thread that never exits. A server that loads and unloads models for days would accumulate thousands of
them, so threads reuse the CPU streams of earlier threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.errors import BackendError, OutOfMemoryError

__all__ = [
    "array_bytes",
    "array_header",
    "array_size",
    "evaluate",
    "freed_buffers_bytes",
    "read_array",
    "release_thread_state",
    "reuse_stream",
    "start_evaluation",
    "translate_errors",
]

# Maximum size in bytes of freed memory that MLX keeps for reuse, on CPUs and on GPUs. The GPU limit is
# higher, because allocating GPU memory is slow.
_CPU_FREED_BUFFERS_BYTES, _GPU_FREED_BUFFERS_BYTES = 2 * 2**20, 64 * 2**20
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.uint16, mx.uint32, mx.int8, mx.int16, mx.int32,
        mx.int64, mx.bool_,
    )
}  # fmt: skip
# Streams that no thread uses. See `_Lease`.
_free: list[mx.Stream] = []


@contextmanager
def translate_errors(failure: str) -> Iterator[None]:
    """Convert MLX exceptions inside the block to BackendErrors whose message starts with `failure`."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, MemoryError) as error:
        text = " ".join(str(error).split())
        # MLX raises the same exceptions for lack of memory as for other causes.
        if "alloc" in text.lower() or "memory" in text.lower():
            raise OutOfMemoryError(
                f"{failure}: {text}", "free some memory or use a smaller --context"
            ) from error
        raise BackendError(f"{failure}: {text}", "try another model, or report this as a bug") from error


def start_evaluation(*arrays: mx.array) -> None:
    """Start evaluating arrays in the background. Raise BackendError if MLX fails."""
    with translate_errors("MLX failed"):
        mx.async_eval(*arrays)


def evaluate(*arrays: mx.array) -> None:
    """Evaluate arrays and wait for the results. Raise BackendError if MLX fails."""
    with translate_errors("MLX failed"):
        mx.eval(*arrays)


def array_header(array: mx.array) -> dict[str, Any]:
    """Describe an array for `read_array`."""
    return {"dtype": str(array.dtype), "shape": list(array.shape)}


def array_bytes(array: mx.array) -> memoryview:
    """Return the bytes of an evaluated array, copying them only if the array is not contiguous."""
    flat = mx.contiguous(array.reshape(-1)).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]


def array_size(header: dict[str, Any]) -> int:
    """Return the size in bytes of an array, given its header. Raises ValueError if the header is invalid."""
    dtype, shape = _DTYPES.get(str(header.get("dtype"))), header.get("shape")
    if dtype is None or not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError("an array has no valid data type and shape")
    if min(shape, default=1) < 0:
        raise ValueError(f"an array cannot have the shape {shape}")
    return dtype.size * math.prod(shape)


def read_array(header: dict[str, Any], data: bytes | bytearray | memoryview) -> mx.array:
    """Return the unevaluated array with this header and these bytes. Raises ValueError if they differ."""
    if array_size(header) != len(data):
        raise ValueError(
            f"an array of shape {header['shape']} and type {header['dtype']} has {len(data):,} bytes instead"
            f" of {array_size(header):,}"
        )
    dtype = _DTYPES[header["dtype"]]
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(header["shape"])


def freed_buffers_bytes() -> int:
    """Return how much freed memory MLX may keep for reuse on its default device, in bytes."""
    return _CPU_FREED_BUFFERS_BYTES if runs_on_cpu() else _GPU_FREED_BUFFERS_BYTES


def release_thread_state() -> None:
    """Free the compiled functions and streams that MLX holds for the calling thread.

    Call this before a thread exits. Otherwise, MLX frees them at thread exit, which aborts the process if the
    interpreter is already shutting down. The thread can still use MLX after this call.
    """
    if threading.current_thread() is threading.main_thread():
        return
    mx.synchronize()
    mx.clear_streams()
    _lease_stream().is_used = False
    if mx.is_available(mx.gpu):
        mx.set_default_stream(mx.new_stream(mx.gpu))


class _Lease:
    """A stream used by a single thread. When that thread ends, another thread can take over the stream.

    Python deletes the lease while the thread can still run Python code, and the lease then frees the thread's
    compiled functions and streams. MLX would free them only after the thread has left Python. This requires
    the interpreter, and aborts the process if the interpreter is already shutting down.

    Attributes:
        is_used: Whether the thread may have used MLX since `release_thread_state`. If not, there is nothing
            to free, and calling MLX while both the thread and Python are exiting could abort the process.
    """

    def __init__(self) -> None:
        self.is_used = True
        self._thread = threading.get_ident()
        try:
            self.stream = _free.pop()
        except IndexError:
            # Only a thread-unsafe stream can later be handed to another thread.
            self.stream = mx.new_thread_unsafe_stream(mx.cpu)

    def __del__(self) -> None:
        # When Python exits, the main thread deletes the leases of threads that are still running. It must not
        # clear their streams.
        if self.is_used and threading.get_ident() == self._thread:
            mx.synchronize()
            mx.clear_streams()
        _free.append(self.stream)


_this_thread = threading.local()


def reuse_stream() -> None:
    """Assign a free CPU stream to the calling thread. When the thread ends, its MLX state is freed.

    Every thread must call this before its first MLX operation. Further calls return immediately.
    """
    if (lease := getattr(_this_thread, "lease", None)) is not None:
        lease.is_used = True
    elif threading.current_thread() is not threading.main_thread():
        _lease_stream()


def _lease_stream() -> _Lease:
    lease: _Lease = getattr(_this_thread, "lease", None) or _Lease()
    _this_thread.lease = lease
    mx.set_default_stream(lease.stream)
    return lease
