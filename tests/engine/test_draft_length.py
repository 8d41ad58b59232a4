"""How much to draft: by going through where a chain may break, and over the hills of what passes cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.draft_length import best_draft_length


def expected_tokens(agreement: float, length: int) -> float:
    """The mean of what a chain emits, by where it may break."""
    broken = sum(agreement**i * (1 - agreement) * (i + 1) for i in range(length))
    return broken + agreement**length * (length + 1)


@given(st.floats(0, 1), st.lists(st.floats(0.1, 50), min_size=1, max_size=14))
def test_the_best_chain_by_trying_all(agreement: float, costs: list[float]) -> None:
    length, speed_up = best_draft_length(agreement, lambda k: costs[k - 1], len(costs))
    tried = [expected_tokens(agreement, k) / cost for k, cost in enumerate(costs, 1)]
    assert speed_up == pytest.approx(max(tried))
    assert tried[length - 1] == pytest.approx(speed_up)


def test_a_chain_reaches_over_a_hill_into_a_dip() -> None:
    """Passes of 2 and 3 rows do not pay, one of 4 does: their cost is not monotone."""
    costs = {1: 1.88, 2: 2.49, 3: 1.57, 4: 2.63}
    length, speed_up = best_draft_length(0.7, costs.__getitem__, 4)
    assert length == 3
    assert speed_up == pytest.approx(2.533 / 1.57)
    assert best_draft_length(0.7, costs.__getitem__, 2)[1] < 1.0
