"""The best draft length, compared with exhaustive search, also for costs that are not monotone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.methods.layerskip.drafter import best_draft_length


def expected_tokens(agreement: float, length: int) -> float:
    """Return the expected number of emitted tokens, summed over the position of the first rejection."""
    broken = sum(agreement**i * (1 - agreement) * (i + 1) for i in range(length))
    return broken + agreement**length * (length + 1)


@given(st.floats(0, 1), st.lists(st.floats(0.1, 50), min_size=1, max_size=14))
def test_best_draft_length_equals_exhaustive_search(agreement: float, costs: list[float]) -> None:
    length, speed_up = best_draft_length(agreement, lambda k: costs[k - 1], len(costs))
    tried = [expected_tokens(agreement, k) / cost for k, cost in enumerate(costs, 1)]
    assert speed_up == pytest.approx(max(tried))
    assert tried[length - 1] == pytest.approx(speed_up)


def test_a_longer_draft_wins_if_the_cost_is_not_monotone() -> None:
    """Passes of 2 and 3 rows are slower than plain decoding, and one of 4 rows is faster."""
    costs = {1: 1.88, 2: 2.49, 3: 1.57, 4: 2.63}
    length, speed_up = best_draft_length(0.7, costs.__getitem__, 4)
    assert length == 3
    assert speed_up == pytest.approx(2.533 / 1.57)
    assert best_draft_length(0.7, costs.__getitem__, 2)[1] < 1.0
