"""Computing the logits of a text again, with prompts that are read in batches of other sizes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.losslessness.replay import Alone, largest_difference, logit_rows


@pytest.mark.parametrize(("kv_type", "rounds"), [("auto", False), ("f16", True)])
def test_batches_of_other_sizes(demo_target: Path, kv_type: str, rounds: bool) -> None:
    """A cache with one kernel for all widths agrees bit for bit, however a text came to be read."""
    tokens = np.random.default_rng(0).integers(512, 4096, 400).tolist()
    with (
        edgespec.load(str(demo_target), "none", kv_type=kv_type, method="none") as plain,
        plain.borrowed_target() as target,
    ):
        whole = logit_rows(target, tokens[:380], tokens[380:])
        others = [logit_rows(target, tokens[:380], tokens[380:], Alone(size)) for size in (48, 300)]
    error = max(largest_difference(whole, other) for other in others)
    assert (error > 0) is rounds
    assert error < 1.0


def test_nan_is_an_infinite_difference() -> None:
    row = np.array([[1.0, math.inf]], np.float32)
    assert largest_difference(row, row) == 0
    assert largest_difference(row, np.array([[1.5, math.inf]], np.float32)) == 0.5
    assert largest_difference(row, np.array([[math.nan, math.inf]], np.float32)) == math.inf
