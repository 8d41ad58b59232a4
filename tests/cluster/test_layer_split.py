"""The division of layers among devices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.cluster.machines import split_layers


def test_layers_follow_the_memory() -> None:
    assert split_layers([10] * 8, [100, 100]) == [4, 4]
    assert split_layers([10] * 8, [300, 100]) == [6, 2]
    assert split_layers([10] * 8, [0, 100]) == [0, 8]
    assert split_layers([10] * 8, [-5, 40, 40]) == [0, 4, 4]


def test_layers_that_do_not_fit() -> None:
    assert split_layers([10] * 8, [30, 40]) is None
    assert split_layers([10] * 8, [0, 0]) is None


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
)
def test_no_device_gets_more_than_it_holds(layers: list[int], rooms: list[int]) -> None:
    counts = split_layers(layers, rooms)
    if counts is None:
        return
    assert sum(counts) == len(layers)
    first = 0
    for count, room in zip(counts, rooms, strict=True):
        assert sum(layers[first : first + count]) <= room
        first += count
