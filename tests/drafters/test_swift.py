"""SWIFT searches for layers to skip between replies, and drafts only where it is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.model_facts import Capabilities
from edgespec.drafters.swift import (
    MAX_SETS,
    MAX_SETS_PER_IDLE_PERIOD,
    LayerSet,
    SwiftDrafter,
    SwiftSearch,
)
from edgespec.errors import CapabilityError, OptionError
from edgespec.saved_arrays import SavedArrays
from tests.tables import PROMPT, table, with_drafter
from tests.tabular import TabularModel

LAYERS = 12
GOOD = (2, 4, 5, 7, 9)


def free_pass(width: int) -> float:
    return 1.0


class Skippable(TabularModel):
    """A table model with simulated layers. Those in `GOOD` can be skipped without loss."""

    def __init__(self, harm: float = 0.15, base: float = 0.97) -> None:
        super().__init__(table(1)._table)
        self.facts = replace(
            self.facts, capabilities=Capabilities(True, True, self_draft_methods=frozenset({"swift"}))
        )
        self.layer_count = LAYERS
        self.harm, self.base = harm, base
        self.asked: list[LayerSet] = []
        self.left = 0

    def top1_agreement(self, layers: Sequence[int], tokens: Sequence[int]) -> float:
        if not 0 < min(layers) <= max(layers) < LAYERS - 1:
            raise OptionError(f"{layers} cannot be skipped")
        assert list(tokens) == self._tokens[-len(tokens) :]
        self.asked.append(tuple(layers))
        return max(0.0, self.base - self.harm * len(set(layers) - set(GOOD)))

    def release_thread_state(self) -> None:
        self.left += 1


def rest(runtime: Any, times: int) -> None:
    for _ in range(times):
        runtime.generate(PROMPT * 8, seed=1, max_tokens=8)
        runtime._session.run_idle_work(lambda: True)


class TestSearch:
    def test_finds_the_layers_that_are_not_needed(self) -> None:
        target = Skippable()
        with with_drafter(target, SwiftDrafter(target)) as runtime:
            rest(runtime, 8)
            best = runtime._session.drafters.choose("swift")[0]
            assert isinstance(best, SwiftDrafter)
            found = best._search.best
        assert found is not None
        assert set(found.layers) <= set(GOOD)
        assert len(found.layers) >= 4
        assert target.left >= 8, "idle work also runs between the two replies"

    @pytest.mark.parametrize("seed", range(5))
    def test_the_search_beats_random_sets(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        harm = np.append(0.0, random.uniform(0.0, 0.12, 22))
        search = SwiftSearch(24, free_pass, seed)

        def quality(layers: LayerSet) -> float:
            return max(0.0, 1.0 - float(harm[list(layers)].sum()))

        while search.tried < 100:
            layers = search.next_set()
            search.record(layers, round(64 * quality(layers)), 64)
        assert search.best is not None
        drawn = [quality(search._random_set()) for _ in range(100)]
        assert quality(search.best.layers) > max(drawn)

    @settings(max_examples=100)
    @given(st.integers(3, 80), st.integers(0, 1000))
    def test_sets_keep_the_first_and_last_layer_and_the_ratio(self, count: int, seed: int) -> None:
        search = SwiftSearch(count, free_pass, seed)
        for _ in range(30):
            layers = search.next_set()
            assert 0 < min(layers) <= max(layers) < count - 1
            assert list(layers) == sorted(set(layers))
            assert abs(len(layers) - 0.45 * count) <= 2
            search.record(layers, seed % 64, 64)

    def test_the_number_of_sets_is_bounded_and_the_best_stay(self) -> None:
        search = SwiftSearch(40, free_pass, 0)
        search.record((1, 2, 3), 64, 64)
        for _ in range(600):
            search.record(search._random_set(), 20, 64)
        assert len(search._counts) <= 256
        assert search.best is not None
        assert search.best.layers == (1, 2, 3)

    @settings(max_examples=50)
    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 64)), max_size=40))
    def test_only_the_recorded_set_is_scored_again(self, counted: list[tuple[int, int]]) -> None:
        weighed: list[int] = []

        def pass_cost(width: int) -> float:
            weighed.append(width)
            return 1.0 + 0.1 * width

        search = SwiftSearch(LAYERS, pass_cost, 0)
        for which, right in counted:
            weighed.clear()
            search.record((1, which + 2), right, 64)
            once = len(weighed)
            assert search.best == search.best
            assert len(weighed) == once <= 2 * 8
        fresh = SwiftSearch(LAYERS, pass_cost, 0)
        fresh.restore(search.saved_arrays())
        assert fresh.best == search.best

    def test_rounds_do_not_rank_the_sets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def best(search: SwiftSearch, look: Any = SwiftSearch.best.fget) -> Any:  # type: ignore[attr-defined]
            asked.append(search)
            return look(search)

        target = Skippable()
        with with_drafter(target, SwiftDrafter(target)) as runtime:
            rest(runtime, 2)
            monkeypatch.setattr(SwiftDrafter, "run_idle_work", lambda drafter, should_continue: None)
            monkeypatch.setattr(SwiftSearch, "best", property(best))
            reply = runtime.generate(PROMPT, seed=1, max_tokens=30)
        assert reply.stats.target_passes > 4
        assert len(asked) <= 2, "once when the reply began and once for its note"

    def test_no_speed_up_with_a_steep_cost_curve(self) -> None:
        for pass_cost, faster in ((free_pass, True), (float, False)):
            search = SwiftSearch(20, pass_cost)
            search.record(tuple(range(1, 10)), 64, 64)
            assert search.best is not None
            assert (search.best.speed_up > 1.0) == faster


class TestDrafting:
    def test_no_draft_before_a_set_was_tried(self) -> None:
        target = Skippable()
        with with_drafter(target, SwiftDrafter(target)) as runtime:
            reply = runtime.generate(PROMPT, seed=1, max_tokens=20)
            assert reply.stats.drafted_tokens == 0
            assert "does not draft yet" in runtime._session.report("swift").note

    def test_no_draft_while_it_is_not_faster(self) -> None:
        target = Skippable(base=0.3)
        with with_drafter(target, SwiftDrafter(target)) as runtime:
            rest(runtime, 1)
            assert runtime.generate(PROMPT, seed=1, max_tokens=20).stats.drafted_tokens == 0
            assert "it would not be faster" in runtime._session.report("swift").note

    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
    @pytest.mark.parametrize("acceptance", ["invariant", "rejection"])
    def test_replies_are_identical_with_idle_work_in_between(
        self, temperature: float, acceptance: str
    ) -> None:
        target = Skippable()
        options: dict[str, Any] = {"temperature": temperature, "max_tokens": 30}
        with with_drafter(target, SwiftDrafter(target)) as runtime:
            rest(runtime, 2)
            drafted = 0
            for seed in range(4):
                got = runtime.generate(PROMPT, seed=seed, acceptance=acceptance, **options)
                drafted += got.stats.drafted_tokens
                runtime._session.run_idle_work(lambda: True)
                plain = runtime.generate(PROMPT, seed=seed, method="none", **options)
                if acceptance == "invariant" or temperature == 0.0:
                    assert got.tokens == plain.tokens
            assert drafted
            assert runtime._session.report("swift").note.startswith("swift: ")

    def test_accepted_tokens_count_in_the_search(self) -> None:
        """The evaluation reports high agreement, but few drafted tokens are accepted."""
        target = Skippable(harm=0.0, base=1.0)
        drafter = SwiftDrafter(target)
        with with_drafter(target, drafter) as runtime:
            rest(runtime, 1)
            assert all(right == total for right, total in drafter._search._counts.values())
            for seed in range(40):
                runtime.generate(PROMPT, seed=seed, temperature=1.2, max_tokens=40)
            assert sum(total - right for right, total in drafter._search._counts.values()) > 10

    def test_a_model_that_cannot_skip_layers_is_an_error(self) -> None:
        target = Skippable()
        target.facts = replace(target.facts, capabilities=Capabilities(True, True, "it has one layer"))
        with pytest.raises(CapabilityError, match="it has one layer"):
            SwiftDrafter(target)


class TestSaving:
    def test_a_later_run_continues_the_search(self, tmp_path: Path) -> None:
        notes = SavedArrays("swift", "one", tmp_path)
        target = Skippable()
        with with_drafter(target, SwiftDrafter(target, store=notes)) as runtime:
            rest(runtime, 3)
            said = runtime._session.report("swift").note
        target = Skippable()
        with with_drafter(target, SwiftDrafter(target, store=notes)) as runtime:
            assert runtime._session.report("swift").note == said
            assert runtime.generate(PROMPT, seed=1, max_tokens=30).stats.drafted_tokens

    def test_the_note_reports_save_errors(self, tmp_path: Path) -> None:
        notes, target = SavedArrays("swift", "one", tmp_path), Skippable()
        with with_drafter(target, SwiftDrafter(target, store=notes)) as runtime:
            notes.notice = "the disk is full"
            assert runtime._session.report("swift").note.endswith("· the disk is full")

    def test_arrays_of_another_model_are_ignored(self) -> None:
        search = SwiftSearch(LAYERS, free_pass, 0)
        search.record((1, 2), 60, 64)
        kept = search.saved_arrays()
        other = SwiftSearch(LAYERS + 1, free_pass, 0)
        other.restore(kept)
        assert other.best is None
        broken: list[dict[str, Any]] = [
            {},
            {**kept, "sets": kept["sets"][:0]},
            {**kept, "counts": kept["counts"][:, :1]},
            {**kept, "counts": -kept["counts"]},
            {**kept, "tried": np.array([1, 2])},
            {**kept, "sets": np.ones_like(kept["sets"])},
        ]
        for values in broken:
            fresh = SwiftSearch(LAYERS, free_pass, 0)
            fresh.restore(values)
            assert fresh.best is None

    def test_sets_per_idle_period_and_in_total_are_bounded(self) -> None:
        target = Skippable()
        drafter = SwiftDrafter(target)
        with with_drafter(target, drafter) as runtime:
            rest(runtime, 1)
            assert len(target.asked) == MAX_SETS_PER_IDLE_PERIOD
            drafter._search.tried = MAX_SETS
            best = drafter._search.best
            rest(runtime, 1)
            assert best is not None
            assert target.asked[MAX_SETS_PER_IDLE_PERIOD:] == [best.layers], (
                "the best set is evaluated again, because the text may have changed"
            )
