"""Adaptive trees: their shapes and limits, unchanged tokens, and exact distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.methods.costs.curve import CostFunction, PassLimits, assumed_cost
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.tree_growth import AdaptiveTreeGrowth
from edgespec.model.model_facts import Capabilities
from tests.cases import first
from tests.engine.exact import ExactModel, assert_law, random_table
from tests.engine.test_acceptance_exact import ROOT, RULES, Rule, one_round, proposal
from tests.tables import END, VOCAB, near, table, with_drafter
from tests.tabular import TabularModel

GREEDY = SamplingParams(temperature=0.0, logit_bias={END: -np.inf})


def ticking(step: float = 1.0) -> Callable[[], float]:
    """Return a clock that advances by one step per reading, so that nothing depends on the machine."""
    ticks = count()
    return lambda: next(ticks) * step


def flat(rows: int) -> float:
    return 1.0 + 0.001 * (rows - 1)


def steep(rows: int) -> float:
    return float(rows)


def grown(
    limits: PassLimits | None = None, curve: CostFunction = assumed_cost, siblings: int = 4
) -> AdaptiveTreeGrowth:
    return AdaptiveTreeGrowth(limits, curve, siblings, ticking())


def taught(growth: AdaptiveTreeGrowth, rank: int | None, rounds: int = 300) -> AdaptiveTreeGrowth:
    """Return a growth that has only seen this rank accepted, whatever the draft's probabilities."""
    for prob in np.linspace(0.01, 0.99, 30):
        for _ in range(rounds // 30):
            growth.record_outcome(np.full(4, prob), rank)
    return growth


def draft(growth: AdaptiveTreeGrowth, model: TabularModel | None = None, depth: int = 8) -> TokenTree:
    drafter = ModelDrafter(model or table(3), VOCAB, branches=growth)
    drafter.begin([0, 1, 2])
    return drafter.propose(Sampler(GREEDY, 0, [0, 1, 2]), Invariant(), depth)


class TestShape:
    def test_reliable_drafts_are_deep_and_narrow(self) -> None:
        tree = draft(taught(grown(), 0))
        assert max(tree.depths) == 8
        assert tree.is_chain

    def test_accepted_second_children_cause_branches(self) -> None:
        tree = draft(taught(grown(curve=flat), 1))
        assert len(tree.children(0)) >= 2
        deepest = max(range(tree.width), key=tree.depths.__getitem__)
        path = []
        while deepest:
            siblings = tree.children(tree.parents[deepest])
            path.append(siblings.index(deepest))
            deepest = tree.parents[deepest]
        assert path
        assert set(path[1:]) == {1}

    def test_rejected_drafts_stop_until_the_statistics_decay(self) -> None:
        growth = taught(grown(), None)
        assert draft(growth).drafted == 0
        for _ in range(1000):
            growth.begin_round(8)
        assert draft(growth).drafted > 0

    def test_width_follows_the_cost_of_rows(self) -> None:
        wide = draft(grown(curve=flat))
        assert wide.leaf_count > 2
        assert draft(grown(curve=steep)).drafted == 0

    def test_growth_looks_beyond_a_local_maximum_of_the_curve(self) -> None:
        """Q4_0 on two cores: three rows cost more than four."""
        measured = [1.0, 1.88, 2.49, 1.57, 2.63, 3.01, 3.01, 3.01]
        for seed in range(5):
            tree = draft(taught(grown(PassLimits(8, 8), lambda rows: measured[rows - 1]), 0, 60), table(seed))
            assert tree.width == 4

    def test_low_probabilities_give_short_drafts(self) -> None:
        sure, unsure = table(3, spread=6.0), table(3, spread=0.1)
        assert draft(grown(), sure).drafted > draft(grown(), unsure).drafted

    def test_drafts_are_longer_if_one_pass_predicts_them(self) -> None:
        """If draft passes take as long as target passes, they only help if additional tokens are free."""
        able = Capabilities(True, True)
        lengths = []
        for in_one_pass in (False, True):
            limits = PassLimits.of(able, replace(able, drafts_in_one_pass=in_one_pass))
            growth = AdaptiveTreeGrowth(limits, flat, 1, ticking(), initial_pass_cost=1.0)
            lengths.append(draft(taught(growth, 0)).drafted)
        assert lengths == [0, 8]

    def test_chain_models_draft_a_block(self) -> None:
        limits = PassLimits.of(Capabilities(True, True), Capabilities(True, False))
        tree = draft(grown(limits, flat), table(3, tree=False))
        assert tree.is_chain
        assert tree.block_verifiable
        assert tree.drafted > 1

    @pytest.mark.long
    @settings(max_examples=100)
    @given(
        st.integers(1, 20),
        st.integers(1, 9),
        st.integers(1, 6),
        st.lists(st.floats(0.0, 3.0), min_size=20, max_size=20),
        st.lists(st.sampled_from([0, 1, 2, None]), max_size=30),
        st.integers(0, 5),
    )
    def test_drafts_stay_within_the_pass_limits(
        self, width: int, leaves: int, depth: int, rises: list[float], seen: list[int | None], seed: int
    ) -> None:
        costs = np.maximum(np.cumsum([1.0, *rises]) - np.arange(21) * 1.2, 1.0)
        growth = grown(PassLimits(width, leaves), lambda rows: float(costs[rows - 1]))
        for rank in seen:
            growth.record_outcome(np.full(4, 0.5), rank)
        tree = draft(growth, table(seed), depth)
        assert tree.width <= width
        assert tree.leaf_count <= leaves
        assert max(tree.depths) <= depth
        assert tree.pruned(VOCAB, depth, width, leaves) is tree

    def test_nodes_run_by_the_draft_model_come_first(self) -> None:
        """This order lets a target that shares its memory with the draft model take over the nodes."""
        model = table(3)
        passes: list[TokenTree] = []
        verify = model.verify

        def watched(tree: TokenTree, first: int = 0) -> Any:
            passes.append(tree)
            return verify(tree, first)

        model.verify = watched  # type: ignore[method-assign]
        tree = draft(grown(curve=flat), model)
        ran = passes[-1]
        assert 1 < ran.width < tree.width
        assert tree.tokens[: ran.width] == ran.tokens
        assert tree.parents[: ran.width] == ran.parents


class TestDraftCosts:
    def test_slow_draft_models_draft_less(self) -> None:
        depths = []
        for seconds in (0.01, 0.9):
            # Times at which a round begins, its draft is complete, and the target has run two rows.
            moments = np.cumsum([0.0, seconds, assumed_cost(2)] * 5).tolist()
            growth = AdaptiveTreeGrowth(
                PassLimits(16, 1), assumed_cost, clock=iter([*moments, *[0.0] * 9]).__next__
            )
            for _ in range(5):
                growth.begin_round(8)
                growth.grow_level([1.0], lambda i: np.array([0.9]))
                growth.finish_draft()
                growth.record_verify_pass(2)
            assert growth.draft_pass_cost == pytest.approx(seconds)
            depths.append(draft(growth).drafted)
        assert depths[0] > depths[1]


class TestSameTokens:
    @pytest.mark.long
    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
    @pytest.mark.parametrize("curve", [assumed_cost, flat])
    def test_growth_emits_the_tokens_of_plain_decoding(self, temperature: float, curve: CostFunction) -> None:
        for seed in range(4):
            target = table(seed)
            drafter = ModelDrafter(near(target, seed, noise=0.3), VOCAB, branches=grown(curve=curve))
            with with_drafter(target, drafter) as pair:
                options: dict[str, Any] = {"seed": seed, "max_tokens": 60, "temperature": temperature}
                plain = pair.generate("abcab", method="none", **options)
                reply = pair.generate("abcab", method="model", draft_length=6, **options)
                assert reply.tokens == plain.tokens
                assert reply.stats.accepted_tokens > 0

    @settings(max_examples=60)
    @given(
        st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=8),
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), max_size=8),
    )
    def test_draft_cache_holds_the_emitted_tokens(
        self, prompt: list[int], rounds: list[tuple[int, int, bool]]
    ) -> None:
        model, tokens = table(3), list(prompt)
        drafter = ModelDrafter(model, VOCAB, branches=grown(curve=flat))
        drafter.begin(tokens)
        for draft_length, accepted, asked in rounds:
            emitted: list[int] = []
            if asked and draft_length:
                tree = drafter.propose(Sampler(GREEDY, 0, tokens), Invariant(), draft_length)
                node = 0
                while tree.children(node) and len(emitted) < accepted:
                    node = tree.children(node)[accepted % len(tree.children(node))]
                    emitted.append(tree.tokens[node])
            emitted.append((sum(tokens) + accepted) % (VOCAB - 1))
            drafter.commit(tuple(emitted))
            tokens += emitted
            held = model._tokens
            assert held == tokens[: len(held)]
            assert len(held) < len(tokens)


class TestExactDistributions:
    """In rejection mode, drafting decisions must not depend on the outcome of their own random draws."""

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("curve", [assumed_cost, flat])
    @pytest.mark.parametrize("seed", first(range(4)))
    def test_one_round(self, rule: Rule, curve: CostFunction, seed: int) -> None:
        target, law = random_table(seed, 3), random_table(seed + 100, 3)
        shapes = set()

        def propose(sampler: Any, acceptance: Any) -> TokenTree:
            tree = proposal(lambda: self.drafter(law, PassLimits(6, 3), curve), 2)(sampler, acceptance)
            shapes.add(tree.parents)
            return tree

        assert_law(one_round(rule, target, propose), target, ROOT, 3)
        assert any(len(shape) > 2 for shape in shapes)

    @pytest.mark.parametrize("learnt", [0, 1, None])
    @pytest.mark.parametrize("seed", first(range(2)))
    def test_after_learning(self, learnt: int | None, seed: int) -> None:
        target, law = random_table(seed, 3), random_table(seed + 100, 3, zeros=0)

        def make() -> ModelDrafter:
            growth = taught(AdaptiveTreeGrowth(PassLimits(6, 3), flat, 2, ticking()), learnt, 60)
            return ModelDrafter(ExactModel(law, 3), 3, branches=growth)  # type: ignore[arg-type]

        assert_law(one_round(RULES[1].values[0], target, proposal(make, 2)), target, ROOT, 3)  # type: ignore[arg-type]

    @pytest.mark.parametrize("limits", [(2, 9), (3, 9), (4, 9), (9, 2)])
    @pytest.mark.parametrize("seed", first(range(2)))
    def test_pruned_to_the_pass_limits(self, limits: tuple[int, int], seed: int) -> None:
        """Near the end of the context, part of the draft is removed, independently of the random draws."""
        target, law = random_table(seed, 3), random_table(seed + 100, 3)

        def propose(sampler: Any, acceptance: Any) -> TokenTree:
            tree = proposal(lambda: self.drafter(law, PassLimits(6, 3), flat, ends=True), 2)(
                sampler, acceptance
            )
            return tree.pruned(3, 2, *limits)

        assert_law(one_round(RULES[1].values[0], target, propose), target, ROOT, 3)  # type: ignore[arg-type]

    @staticmethod
    def drafter(law: Any, limits: PassLimits, curve: CostFunction, ends: bool = False) -> ModelDrafter:
        model: Any = ExactModel(law, 3, ends=ends)
        return ModelDrafter(model, 3, branches=AdaptiveTreeGrowth(limits, curve, 2, ticking()))
