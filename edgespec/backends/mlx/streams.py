"""Free MLX's state for a thread when the thread ends, and reuse the thread's CPU stream.

By default, MLX creates a CPU stream for each thread that computes anything, and each CPU stream starts a
system thread that never exits. A server that loads and unloads models for days would accumulate thousands of
them.
"""

from __future__ import annotations

import threading

import mlx.core as mx

__all__ = ["release_streams", "reuse_stream"]

_free: list[mx.Stream] = []


class _Lease:
    """A stream used by a single thread. When that thread ends, another one can take it over.

    Python deletes the lease while the thread can still run Python code, and the lease then frees the thread's
    compiled functions and streams. MLX would free them only after the thread has left Python. Doing so
    requires the interpreter, and aborts the process if the interpreter is already exiting.

    Attributes:
        is_used: Whether the thread may have used MLX since `release_streams`. If not, there is nothing to
            free, and calling MLX while the thread and Python are exiting could abort the process.
    """

    def __init__(self) -> None:
        self.is_used = True
        self._thread = threading.get_ident()
        try:
            self.stream = _free.pop()
        except IndexError:
            # Only this kind of stream can be handed to another thread later.
            self.stream = mx.new_thread_unsafe_stream(mx.cpu)

    def __del__(self) -> None:
        # When Python exits, the main thread deletes the leases of threads that are still running, but must
        # not clear their streams.
        if self.is_used and threading.get_ident() == self._thread:
            mx.synchronize()
            mx.clear_streams()
        _free.append(self.stream)


class _Leases(threading.local):
    lease: _Lease | None = None


_leases = _Leases()


def reuse_stream() -> None:
    """Assign a free CPU stream to the calling thread. When the thread ends, MLX's state for it is freed.

    Every thread must call this before its first MLX operation. Further calls return immediately.
    """
    if (lease := _leases.lease) is not None:
        lease.is_used = True
    elif threading.current_thread() is not threading.main_thread():
        _lease_stream()


def release_streams() -> None:
    """Free the streams that MLX created for the calling thread. The thread can still use MLX."""
    mx.synchronize()
    mx.clear_streams()
    _lease_stream().is_used = False
    if mx.is_available(mx.gpu):
        mx.set_default_stream(mx.new_stream(mx.gpu))


def _lease_stream() -> _Lease:
    lease = _leases.lease = _leases.lease or _Lease()
    mx.set_default_stream(lease.stream)
    return lease
