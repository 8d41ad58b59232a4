"""The exit layer and the draft length are chosen by agreement, weight bytes and pass costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.methods.costs.curve import CostCurve, assumed_cost
from edgespec.methods.layerskip.drafter import EXIT_WIDTHS, best_draft_length, exit_table

LAYERS = [10, 10, 10, 10, 10]
HEAD = 5


def free(_: int) -> float:
    return 1.0


class TestExpectedSpeedUp:
    def test_an_example_computed_by_hand(self) -> None:
        """One of five layers always agrees. A draft reads 15 of 55 bytes, and the verify pass the rest."""
        only = exit_table({1: 1.0}, LAYERS, HEAD, free).best
        assert only.exit_layer == 1
        assert only.cost == pytest.approx(15 / 55)
        assert only.draft_length == EXIT_WIDTHS[-1] - 1
        assert only.speed_up == pytest.approx(13 / ((12 * 15 + 10 + 45) / 55))

    @given(
        agreements=st.dictionaries(st.integers(1, 4), st.floats(0.0, 1.0), min_size=1),
        layers=st.lists(st.integers(1, 100), min_size=5, max_size=5),
        head=st.integers(0, 400),
        row=st.floats(0.0, 2.0),
    )
    def test_the_best_draft_length_matches_a_search(
        self, agreements: dict[int, float], layers: list[int], head: int, row: float
    ) -> None:
        def v(rows: int) -> float:
            return 1.0 + row * (rows - 1)

        table = exit_table(agreements, layers, head, v)
        assert [one.exit_layer for one in table.exits] == sorted(agreements)
        for one in table.exits:
            lower, upper = sum(layers[: one.exit_layer]), sum(layers[one.exit_layer :])

            def cost(k: int, lower: int = lower, upper: int = upper) -> float:
                read = k * (lower + head) + lower + (upper + head) * v(k + 1)
                return read / (lower + upper + head)

            expected = best_draft_length(agreements[one.exit_layer], cost, EXIT_WIDTHS[-1] - 1)[1]
            assert one.speed_up == pytest.approx(expected)
        assert table.best.speed_up == max(one.speed_up for one in table.exits)
        assert table.is_faster == (table.best.speed_up > 1.0)

    def test_wide_passes_are_not_assumed_to_be_expensive(self) -> None:
        """If only a target step was measured, a pass is not assumed to cost one step per row."""
        agreements = {2: 0.8}
        assert exit_table(agreements, LAYERS, HEAD, CostCurve((1,), (0.55,)).v).is_faster
        assert (
            exit_table(agreements, LAYERS, HEAD).best
            == exit_table(agreements, LAYERS, HEAD, assumed_cost).best
        )
        assert not exit_table(agreements, LAYERS, HEAD, float).is_faster


class TestVerdict:
    @pytest.mark.parametrize(
        ("agreement", "v", "said"),
        [
            (0.9, free, "it predicts the same token as the full model 90% of the time; with a"),
            (0.9, float, "does not benefit from early exit, so it would not be faster here"),
            (0.1, free, "was not trained for early exit, so it would not be faster here"),
        ],
    )
    def test_the_verdict_names_the_reason(self, agreement: float, v: object, said: str) -> None:
        table = exit_table({2: agreement}, LAYERS, HEAD, v)  # type: ignore[arg-type]
        assert said in table.verdict
        assert table.is_faster == (v is free and agreement == 0.9)


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
    """Passes of 2 and 3 rows are slower than plain decoding, but one of 4 rows is faster."""
    costs = {1: 1.88, 2: 2.49, 3: 1.57, 4: 2.63}
    length, speed_up = best_draft_length(0.7, costs.__getitem__, 4)
    assert length == 3
    assert speed_up == pytest.approx(2.533 / 1.57)
    assert best_draft_length(0.7, costs.__getitem__, 2)[1] < 1.0
