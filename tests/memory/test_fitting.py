"""The planner with a pair of round sizes: what it reduces, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import OptionError
from edgespec.memory.budget import Budget
from edgespec.memory.fitting import PlanChoice, PlanOption, Preference, fit_to_budget
from edgespec.memory.plan import Item, MemoryPlan
from edgespec.model.memory_estimate import ExpertShares, Pool

_KV_BYTES = {"auto": 16, "q8_0": 9, "q4_0": 5}
_WEIGHTS, _WIDENED, _DRAFT, _DRAFT_KV, _LAYERS = 50_000, 4_000, 9_000, 2, 16
START = PlanChoice(8192)
_NO_BUDGET = Budget(0, "here")


def measure(choice: PlanChoice, budget: Budget = _NO_BUDGET) -> MemoryPlan:
    """Plan a target and its draft model."""
    cache = choice.context_tokens * _KV_BYTES[choice.kv_type]
    weights = _WEIGHTS + (_WIDENED if choice.float32 else 0)
    items = [
        Item("target", "target weights", "weights", weights),
        Item("target", "target cache", "cache", cache),
    ]
    if choice.draft:
        seen = min(choice.context_tokens, choice.draft_window or choice.context_tokens)
        items.append(Item("draft", "draft weights", "weights", _DRAFT + seen * _DRAFT_KV))
    return MemoryPlan(budget, choice.context_tokens, choice.kv_type, tuple(items))


def within(budget_bytes: int) -> Callable[[PlanChoice], MemoryPlan]:
    return partial(measure, budget=Budget(budget_bytes, "here"))


def _fit(
    budget_bytes: int, fixed: frozenset[PlanOption] = frozenset(), prefer: Preference = "speed"
) -> tuple[PlanChoice, MemoryPlan]:
    return fit_to_budget(START, within(budget_bytes), fixed=fixed, prefer=prefer)


def _total(choice: PlanChoice) -> int:
    return sum(item.bytes for item in measure(choice).items)


def test_a_plan_that_fits_is_unchanged() -> None:
    choice, plan = _fit(_total(START))
    assert choice == START
    assert plan.fits
    assert plan.decisions == ()
    assert plan.total_bytes == _total(START)


def test_prefer_speed_shortens_the_context_first_and_only_as_far_as_needed() -> None:
    choice, plan = _fit(_total(START) - 1)
    assert choice == replace(START, context_tokens=8192 - 256)
    (decision,) = plan.decisions
    assert decision.what == "a context of 7,936 tokens instead of 8,192"
    assert decision.bytes == 256 * (16 + _DRAFT_KV)


def test_prefer_context_quantises_the_cache_first() -> None:
    choice, plan = _fit(_total(replace(START, float32=False)) - 1, prefer="context")
    assert choice == replace(START, kv_type="q8_0")
    (decision,) = plan.decisions
    assert (decision.what, decision.bytes) == ("a KV cache of type q8_0", 8192 * (16 - 9))


def test_a_larger_step_undoes_earlier_ones_that_are_no_longer_needed() -> None:
    """Without its draft model, the target fits unchanged, so the planner reports only the draft model."""
    fixed: frozenset[PlanOption] = frozenset({"context"})
    alone = replace(START, draft=False)
    least = replace(START, kv_type="q4_0", draft_window=1024)
    only = frozenset[PlanOption]({"context", "kv_type", "draft_window"})
    choice, plan = _fit(_total(alone), only)
    assert choice == alone
    assert [decision.what for decision in plan.decisions] == ["no draft model"]
    choice, plan = _fit(_total(least), fixed)
    assert choice == least
    assert len(plan.decisions) == 2


def test_the_smallest_plan_may_not_fit() -> None:
    choice, plan = _fit(1000)
    assert not plan.fits
    assert choice == PlanChoice(512, "q4_0", draft=False, float32=False)
    assert {decision.what.split()[0] for decision in plan.decisions} == {"a", "no", "16-bit"}


def test_steps_that_free_nothing_are_not_reported() -> None:
    """The draft model's KV cache uses the target's type, unless it has its own."""

    def follows(choice: PlanChoice) -> MemoryPlan:
        taken = 512 * _KV_BYTES[choice.draft_kv_type or choice.kv_type]
        measured = within(1000)(choice)
        return replace(measured, items=(*measured.items, Item("draft", "draft cache", "cache", taken)))

    choice, plan = fit_to_budget(START, follows, fixed=frozenset({"draft"}))
    assert not plan.fits
    assert choice.draft_kv_type == choice.kv_type == "q4_0"
    assert all(decision.bytes > 0 for decision in plan.decisions)


def test_steps_that_the_model_does_not_support_are_skipped() -> None:
    def no_q8(choice: PlanChoice) -> MemoryPlan:
        if choice.kv_type == "q8_0":
            raise OptionError("heads of 20 elements cannot be quantised")
        return within(_total(START) - 1)(choice)

    fixed: frozenset[PlanOption] = frozenset({"context", "draft", "draft_window", "float32"})
    choice, plan = fit_to_budget(START, no_q8, fixed=fixed)
    assert plan.fits
    assert choice.kv_type == "q4_0"


class TestCards:
    """Two memory pools: some layers on the graphics card, and the others in main memory."""

    def _measure(self, choice: PlanChoice, budget: Budget) -> MemoryPlan:
        there = _LAYERS + 1 if choice.gpu_layers is None else choice.gpu_layers
        on_card = _WEIGHTS * there // (_LAYERS + 1)
        items = (
            Item("target", "target weights", "weights", _WEIGHTS - on_card),
            Item("target", "target weights", "weights", on_card, "gpu"),
        )
        return MemoryPlan(budget, choice.context_tokens, "f16", items)

    @pytest.mark.parametrize("card_bytes", [_WEIGHTS, _WEIGHTS // 2, 4000, 0])
    def test_the_card_gets_as_many_layers_as_fit(self, card_bytes: int) -> None:
        budget = Budget(_WEIGHTS, "here", gpu_bytes=card_bytes)
        start = PlanChoice(512, draft=False)
        choice, plan = fit_to_budget(start, partial(self._measure, budget=budget), gpu_layers=_LAYERS)
        assert plan.fits
        assert plan.pools == ("memory", "gpu")
        assert plan.free_bytes("gpu") >= 0
        assert (choice.gpu_layers is None) == (card_bytes == _WEIGHTS)
        assert ("gpu_budget_bytes", card_bytes) in plan.to_json().items()

    def test_a_fixed_number_of_gpu_layers_is_unchanged(self) -> None:
        budget = Budget(_WEIGHTS, "here", gpu_bytes=_WEIGHTS // 2)
        start = PlanChoice(512, draft=False, gpu_layers=17)
        choice, plan = fit_to_budget(
            start,
            partial(self._measure, budget=budget),
            fixed=frozenset({"gpu_layers"}),
            gpu_layers=_LAYERS,
        )
        assert choice == start
        assert not plan.fits


class TestExperts:
    """A card, and a model whose layers consist mostly of experts."""

    _EXPERTS, _REST = 2_000, 500

    def _measure(self, choice: PlanChoice, budget: Budget) -> MemoryPlan:
        there = _LAYERS if choice.gpu_layers is None else choice.gpu_layers
        there, experts = min(there, _LAYERS), _LAYERS - min(_LAYERS, choice.experts)
        on_card = there * self._REST + min(there, experts) * self._EXPERTS
        cache = choice.context_tokens * _KV_BYTES[choice.kv_type] // 8
        items = (
            Item("target", "target weights", "weights", _LAYERS * (self._REST + self._EXPERTS) - on_card),
            Item("target", "target weights", "weights", on_card, "gpu"),
            Item("target", "target cache", "cache", cache, "gpu"),
            *((Item("draft", "draft weights", "weights", _DRAFT, "gpu"),) if choice.draft else ()),
        )
        shares = ExpertShares(_LAYERS, _LAYERS - experts, 0, 0)
        return MemoryPlan(budget, choice.context_tokens, "f16", items, experts=shares)

    def _fit(
        self, card_bytes: int, start: PlanChoice, fixed: frozenset[PlanOption] = frozenset()
    ) -> tuple[PlanChoice, MemoryPlan]:
        budget = Budget(100_000, "here", gpu_bytes=card_bytes)
        return fit_to_budget(start, partial(self._measure, budget=budget), fixed=fixed, gpu_layers=_LAYERS)

    @pytest.mark.parametrize("in_memory", [0, 1, 7, _LAYERS])
    def test_the_card_gets_as_many_experts_as_fit_after_everything_else(self, in_memory: int) -> None:
        others = _LAYERS * self._REST + 8192 * 2 + _DRAFT
        card_bytes = others + (_LAYERS - in_memory) * self._EXPERTS
        choice, plan = self._fit(card_bytes + self._EXPERTS - 1, START)
        assert choice == replace(START, experts=in_memory)
        assert plan.fits
        what = [decision.what for decision in plan.decisions]
        assert what == ([f"the experts of {in_memory} layers in main memory"] if in_memory else [])
        assert sum(each.bytes for each in plan.decisions) == in_memory * self._EXPERTS

    def test_layers_follow_only_if_moving_all_experts_is_not_enough(self) -> None:
        choice, plan = self._fit(_LAYERS * self._REST // 2, PlanChoice(256, draft=False))
        assert plan.fits
        assert choice.experts == _LAYERS
        assert choice.gpu_layers is not None

    def test_a_fixed_number_is_unchanged(self) -> None:
        start = PlanChoice(256, draft=False, experts=3)
        choice, plan = self._fit(_LAYERS * self._REST * 2, start, frozenset({"experts", "gpu_layers"}))
        assert choice.experts == 3
        assert not plan.fits


class TestDraftersOnTheCard:
    """A target whose layers can move off the card, and a draft model or heads that stay on it."""

    _LAYER, _OUTPUT = 3_000, 2_000
    _TARGET = _LAYERS * _LAYER + _OUTPUT

    def _measure(
        self, choice: PlanChoice, budget: Budget, draft_bytes: int, head_bytes: int = 0
    ) -> MemoryPlan:
        most = _LAYERS + 1
        there = most if choice.gpu_layers is None else min(most, choice.gpu_layers)
        on_card = max(0, there - 1) * self._LAYER + bool(there) * self._OUTPUT
        cache = choice.context_tokens * _KV_BYTES[choice.kv_type] // 8
        cache_on_card = cache * max(0, there - 1) // _LAYERS
        drafters_at: Pool = "gpu" if there else "memory"
        items = (
            Item("target", "target weights", "weights", self._TARGET - on_card),
            Item("target", "target weights", "weights", on_card, "gpu"),
            Item("target", "target cache", "cache", cache - cache_on_card),
            Item("target", "target cache", "cache", cache_on_card, "gpu"),
            *((Item("draft", "draft weights", "weights", draft_bytes, drafters_at),) if choice.draft else ()),
            Item("head", "head weights", "weights", head_bytes * choice.heads, drafters_at),
        )
        return MemoryPlan(budget, choice.context_tokens, "f16", items)

    def _fit(
        self,
        card_bytes: int,
        draft_bytes: int,
        start: PlanChoice = START,
        fixed: frozenset[PlanOption] = frozenset(),
        prefer: Preference = "speed",
        head_bytes: int = 0,
    ) -> tuple[PlanChoice, MemoryPlan]:
        budget = Budget(1_000_000, "here", gpu_bytes=card_bytes)
        plan = partial(self._measure, budget=budget, draft_bytes=draft_bytes, head_bytes=head_bytes)
        return fit_to_budget(start, plan, fixed=fixed, prefer=prefer, gpu_layers=_LAYERS)

    def test_a_small_draft_model_is_worth_a_few_layers_on_the_cpu(self) -> None:
        choice, plan = self._fit(self._TARGET + 512 * 2, self._TARGET // 25)
        assert choice.draft
        assert choice.gpu_layers == _LAYERS + 1 - 2  # The draft model and the context need some memory too.
        assert plan.fits

    def test_a_large_draft_model_is_dropped_if_the_whole_target_then_fits_on_the_card(self) -> None:
        choice, plan = self._fit(self._TARGET + 512 * 2, self._TARGET // 4)
        assert (choice.draft, choice.gpu_layers) == (False, None)
        assert plan.fits

    def test_a_large_draft_model_is_kept_if_many_layers_are_on_the_cpu_anyway(self) -> None:
        choice, plan = self._fit(self._TARGET // 2, self._TARGET // 8)
        assert choice.draft
        assert choice.gpu_layers is not None
        assert plan.fits
        assert [each.what.split()[0] for each in plan.decisions] == ["a", "only"]

    def test_heads_are_kept_with_layers_on_the_cpu(self) -> None:
        start = replace(START, draft=False, heads=2)
        choice, _ = self._fit(self._TARGET // 2, 0, start, head_bytes=500)
        assert choice.heads == 2

    def test_moving_layers_changes_neither_the_cache_nor_a_preferred_context(self) -> None:
        choice, _ = self._fit(self._TARGET // 2, 0, prefer="context")
        assert choice == replace(START, gpu_layers=choice.gpu_layers)
        choice, _ = self._fit(self._TARGET // 2, 0)
        assert (choice.kv_type, choice.context_tokens >= 2048) == ("auto", True)

    def test_a_draft_model_that_does_not_fit_on_the_card_takes_no_layers_from_it(self) -> None:
        choice, plan = self._fit(self._TARGET // 4, self._TARGET // 3)
        assert not choice.draft
        assert choice.gpu_layers
        assert plan.fits

    @given(
        st.integers(0, 80_000),
        st.integers(0, 5_000),
        st.integers(0, 30_000),
        st.sampled_from(["speed", "context"]),
        st.sets(st.sampled_from(["context", "kv_type", "draft"])),
    )
    def test_layers_and_drafters_on_cards_of_all_sizes(
        self,
        card_bytes: int,
        more_bytes: int,
        draft_bytes: int,
        prefer: Preference,
        fixed: set[PlanOption],
    ) -> None:
        choice, plan = self._fit(card_bytes, draft_bytes, fixed=frozenset(fixed), prefer=prefer)
        assert plan.fits  # Main memory is large enough for everything.
        assert all(plan.planned_bytes(pool) <= plan.budget_bytes(pool) for pool in plan.pools)

        def fits(other: PlanChoice) -> bool:
            return self._measure(other, plan.budget, draft_bytes).fits

        if choice.gpu_layers is not None:
            assert not fits(replace(choice, gpu_layers=choice.gpu_layers + 1))
        if not choice.draft:
            assert not fits(replace(choice, draft=True))
        larger, _ = self._fit(card_bytes + more_bytes, draft_bytes, fixed=frozenset(fixed), prefer=prefer)
        most = _LAYERS + 1
        layers, more_layers = (most if it.gpu_layers is None else it.gpu_layers for it in (choice, larger))
        # A draft model that has become small enough for the card can take the place of layers there.
        assert more_layers >= layers or (larger.draft and not choice.draft)


def test_a_drafter_is_restored_if_later_reductions_leave_room_for_it() -> None:
    """16-bit weights would save more memory than the draft model needs, but are the last resort."""

    def widened(choice: PlanChoice, budget_bytes: int = 0) -> MemoryPlan:
        plan = within(budget_bytes)(choice)
        more = Item("target", "target weights", "weights", 3 * _DRAFT if choice.float32 else 0)
        return replace(plan, items=(*plan.items, more))

    cheapest = replace(START, float32=False)
    room = widened(cheapest).total_bytes
    fixed: frozenset[PlanOption] = frozenset({"context", "kv_type", "draft_window"})
    choice, plan = fit_to_budget(START, partial(widened, budget_bytes=room), fixed=fixed)
    assert choice == cheapest
    assert plan.fits


_STEPS: list[PlanOption] = ["context", "kv_type", "draft_window", "float32", "draft"]
_FIELDS = {"context": "context_tokens"}


@given(
    st.integers(0, 300_000),
    st.sets(st.sampled_from(_STEPS)),
    st.sampled_from(["speed", "context"]),
    st.integers(1, 64),
)
def test_the_planner_finds_a_plan_if_one_exists_and_changes_no_fixed_option(
    budget_bytes: int, fixed: set[PlanOption], prefer: Preference, blocks: int
) -> None:
    start = PlanChoice(blocks * 256)
    choice, plan = fit_to_budget(start, within(budget_bytes), fixed=frozenset(fixed), prefer=prefer)
    for name in fixed:
        field = _FIELDS.get(name, name)
        assert getattr(choice, field) == getattr(start, field)
    assert plan.total_bytes == _total(choice)
    assert plan.fits == (_total(choice) <= budget_bytes)
    least = PlanChoice(
        start.context_tokens if "context" in fixed else min(start.context_tokens, 512),
        "auto" if "kv_type" in fixed else "q4_0",
        "draft" in fixed,
        None if "draft_window" in fixed else 1024,
        float32="float32" in fixed,
    )
    assert plan.fits == (_total(least) <= budget_bytes)
    assert bool(plan.decisions) == (choice != start)
    if plan.fits and choice.context_tokens < start.context_tokens:
        assert _total(replace(choice, context_tokens=choice.context_tokens + 256)) > budget_bytes
