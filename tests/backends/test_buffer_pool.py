"""The buffer pool reuses memory, but never memory that is still referenced."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.llamacpp.buffer_pool import BufferPool


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.integers(0, 10)), max_size=30))
def test_buffers_in_use_are_not_overwritten(steps: list[tuple[int, bool, int]]) -> None:
    pool = BufferPool()
    held: list[tuple[memoryview, bytes]] = []
    for number, (size, keep, released) in enumerate(steps):
        taken = pool.take(size)
        assert taken.size == size
        taken[:] = number
        if keep:
            # Hold a view of some of the bytes instead of the array itself.
            held.append((taken.data[: size // 2], bytes([number]) * (size // 2)))
        del taken
        for view, expected in held:
            assert view == expected
        if released < len(held):
            del held[released]


def test_released_buffers_are_reused() -> None:
    pool = BufferPool()
    places = {pool.take(size).ctypes.data for size in (1000, 10, 500, 1000)}
    assert len(places) == 1
    first = pool.take(600)
    assert pool.take(10).ctypes.data == first.ctypes.data + 600
