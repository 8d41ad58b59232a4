"""Divide the layers of a target among devices in proportion to their memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["split_layers"]


def split_layers(layer_bytes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """Assign consecutive layers to devices. Return the layer count per device, or None if they do not fit.

    Args:
        layer_bytes: The memory of each layer.
        capacities: The memory that layers may use on each device, in layer order. 0 or less if there is none.
    """
    rooms = [max(0, each) for each in capacities]
    if not sum(rooms):
        return None
    ends = [end / sum(rooms) * sum(layer_bytes) for end in accumulate(rooms)]
    # Each device owns an interval of the layers' bytes, and gets the layers whose midpoint falls into it.
    middles = [end - size / 2 for end, size in zip(accumulate(layer_bytes), layer_bytes, strict=True)]
    places = [next((i for i, end in enumerate(ends) if middle < end), len(ends) - 1) for middle in middles]
    counts = [places.count(device) for device in range(len(rooms))]
    return counts if _fits(layer_bytes, counts, rooms) else _fill(layer_bytes, rooms)


def _fits(layer_bytes: Sequence[int], counts: Sequence[int], rooms: Sequence[int]) -> bool:
    first = 0
    for count, room in zip(counts, rooms, strict=True):
        if sum(layer_bytes[first : first + count]) > room:
            return False
        first += count
    return True


def _fill(layer_bytes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """Fill the devices one after another."""
    counts, layer = [], 0
    for room in rooms:
        first, used = layer, 0
        while layer < len(layer_bytes) and used + layer_bytes[layer] <= room:
            used += layer_bytes[layer]
            layer += 1
        counts.append(layer - first)
    return counts if layer == len(layer_bytes) else None
