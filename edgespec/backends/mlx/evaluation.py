"""Helpers around MLX evaluation: error translation, a buffer-cache limit, and per-thread cleanup."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from edgespec.backends.mlx.build_info import runs_on_cpu
from edgespec.backends.mlx.streams import release_streams
from edgespec.errors import BackendError, OutOfMemoryError

__all__ = ["evaluate", "freed_buffers_bytes", "release_thread_state", "start_evaluation", "translate_errors"]

# Maximum size in bytes of the freed memory that MLX keeps for reuse. The GPU limit is higher, because
# allocating GPU memory is slow.
_CPU_FREED_BUFFERS_BYTES, _GPU_FREED_BUFFERS_BYTES = 2 * 2**20, 64 * 2**20


@contextmanager
def translate_errors(failure: str) -> Iterator[None]:
    """Convert MLX exceptions inside the block to BackendErrors whose message starts with `failure`."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, MemoryError) as error:
        text = " ".join(str(error).split())
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


def freed_buffers_bytes() -> int:
    """Return the number of freed bytes that MLX keeps for reuse on its default device."""
    return _CPU_FREED_BUFFERS_BYTES if runs_on_cpu() else _GPU_FREED_BUFFERS_BYTES


def release_thread_state() -> None:
    """Free the compiled functions and streams that MLX holds for the calling thread.

    Call this before a thread exits. Otherwise, MLX frees them at thread exit, which aborts the process if the
    interpreter is already shutting down. The thread can still use MLX after this call.
    """
    if threading.current_thread() is threading.main_thread():
        return
    release_streams()
