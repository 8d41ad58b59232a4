"""Memory that is used again is never taken from somebody who still reads it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.llamacpp.buffer_pool import BufferPool


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.integers(0, 10)), max_size=30))
def test_what_is_held_stays_as_it_is(steps: list[tuple[int, bool, int]]) -> None:
    store = BufferPool()
    held: list[tuple[memoryview, bytes]] = []
    for number, (size, keep, let_go) in enumerate(steps):
        taken = store.take(size)
        assert taken.size == size
        taken[:] = number
        if keep:
            # As the holder of a few of the bytes, the array itself is gone.
            held.append((taken.data[: size // 2], bytes([number]) * (size // 2)))
        del taken
        for view, expected in held:
            assert view == expected
        if let_go < len(held):
            del held[let_go]


def test_what_is_let_go_of_is_given_out_again() -> None:
    store = BufferPool()
    places = {store.take(size).ctypes.data for size in (1000, 10, 500, 1000)}
    assert len(places) == 1
    first = store.take(600)
    assert store.take(10).ctypes.data == first.ctypes.data + 600
