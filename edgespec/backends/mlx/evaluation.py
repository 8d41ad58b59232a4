"""Evaluation, with MLX's errors translated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from edgespec.errors import BackendError, OutOfMemoryError

__all__ = [
    "evaluate",
    "freed_buffers_bytes",
    "limit_freed_buffers",
    "release_thread_state",
    "start_evaluation",
    "translate_errors",
]

# What is kept of freed buffers: those of a step, which are small. Where the memory is a graphics processor's,
# making one is dear.
_KEPT_BYTES, _KEPT_BYTES_BY_GPU = 2 * 2**20, 64 * 2**20


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Errors of MLX in here become a BackendError that begins with `what`."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, MemoryError) as error:
        text = " ".join(str(error).split())
        if "alloc" in text.lower() or "memory" in text.lower():
            raise OutOfMemoryError(
                f"{what}: {text}", "free some memory or use a smaller --context"
            ) from error
        raise BackendError(f"{what}: {text}", "try another model, or report this one") from error


def start_evaluation(*arrays: mx.array) -> None:
    """Let these be computed in the background. Raises BackendError."""
    with translate_errors("MLX failed"):
        mx.async_eval(*arrays)


def evaluate(*arrays: mx.array) -> None:
    """Wait until these are computed. Raises BackendError."""
    with translate_errors("MLX failed"):
        mx.eval(*arrays)


def freed_buffers_bytes() -> int:
    """How much MLX keeps of buffers that were freed, to use them again."""
    return _KEPT_BYTES if mx.default_device() == mx.cpu else _KEPT_BYTES_BY_GPU


def limit_freed_buffers() -> None:
    """Let MLX keep no more than that: by itself it keeps as much as the machine has."""
    mx.set_cache_limit(freed_buffers_bytes())


def release_thread_state() -> None:
    """Let go of what MLX keeps for this thread, which may be about to end.

    Compiled functions are kept for each thread, and freeing them needs the interpreter: where a thread and
    the process end together, that aborts the process. The thread may go on with MLX all the same.
    """
    if threading.current_thread() is threading.main_thread():
        return
    mx.synchronize()
    mx.clear_streams()
    for kind in (mx.cpu, mx.gpu):
        if mx.is_available(kind):
            mx.set_default_stream(mx.new_stream(kind))
