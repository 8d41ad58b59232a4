"""Choose which combinations of parameters every test run covers, and which only `-m long`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from edgespec.options.methods import method_names

__all__ = ["covering", "first", "needs_methods"]


def covering(*axes: Sequence[Any], count: int | None = None) -> list[Any]:
    """Return parameter sets for all combinations of the values of several parameters.

    Every value occurs in a test run without `-m long`, which runs as many combinations as the longest axis
    has values, or the first `count` of these. The other combinations are marked as long.
    """
    sizes = [len(axis) for axis in axes]
    short = {tuple(i % size for size in sizes) for i in range(count or max(sizes))}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, indices, strict=True)),
            marks=() if indices in short else pytest.mark.long,
        )
        for indices in product(*map(range, sizes))
    ]


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return parameters of which only the first `count` run without `-m long`."""
    return [
        value if place < count else pytest.param(value, marks=pytest.mark.long)
        for place, value in enumerate(values)
    ]


def needs_methods(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless edgespec has these methods, whose folders can be removed."""
    missing = ", ".join(sorted({*names} - {*method_names()}))
    return pytest.mark.skipif(bool(missing), reason=f"edgespec has no method named {missing}")
