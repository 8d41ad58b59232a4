"""Reuse the CPU streams of threads that have ended.

By default, MLX creates a CPU stream for each thread that computes anything. Every CPU stream has its own
system thread, which MLX never ends. A server that loads and unloads models for days would accumulate
thousands of them.
"""

from __future__ import annotations

import threading

import mlx.core as mx

from edgespec.backends.mlx.build_info import runs_on_cpu

__all__ = ["release_streams", "reuse_stream"]

_free: list[mx.Stream] = []


class _Lease:
    """A stream that only one thread uses. When that thread ends, another one can use the stream."""

    def __init__(self) -> None:
        try:
            self.stream = _free.pop()
        except IndexError:
            # Only this kind of stream can later be used by another thread.
            self.stream = mx.new_thread_unsafe_stream(mx.cpu)

    def __del__(self) -> None:
        _free.append(self.stream)


class _Leases(threading.local):
    lease: _Lease | None = None


_leases = _Leases()


def reuse_stream() -> None:
    """Assign a free CPU stream to the calling thread, if MLX computes on the CPU.

    Every thread must call this before its first MLX operation. Further calls return immediately.
    """
    if _leases.lease is None and runs_on_cpu() and threading.current_thread() is not threading.main_thread():
        _lease_stream()


def release_streams() -> None:
    """Free the streams that MLX created for the calling thread. The thread can still use MLX."""
    mx.synchronize()
    mx.clear_streams()
    _lease_stream()
    if mx.is_available(mx.gpu):
        mx.set_default_stream(mx.new_stream(mx.gpu))


def _lease_stream() -> None:
    _leases.lease = _leases.lease or _Lease()
    mx.set_default_stream(_leases.lease.stream)
