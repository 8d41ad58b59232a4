"""Several drafters at once: same tokens, exact distributions, and rarely slower than the best one.

Merged trees contain every path. Tokens chosen by a drafter are distinguished from those that a constraint
determines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.engine.acceptance import Invariant
from edgespec.engine.logits import HostLogits
from edgespec.engine.loop import decode
from edgespec.engine.sampling import Distribution, Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.combined_drafter import ChosenTokens, CombinedDrafter, merge_trees, prune_optional
from edgespec.methods.base import Drafter, ForcedDraft
from edgespec.methods.costs.curve import CostFunction, PassLimits, assumed_cost
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.ngram.drafter import NgramDrafter
from edgespec.methods.tree_growth import AdaptiveTreeGrowth
from tests.cases import covering, first
from tests.engine.exact import ExactModel, Path, assert_law, random_table
from tests.engine.test_acceptance_exact import ROOT, RULES, FixedGuess, Rule, one_round, proposal
from tests.tables import VOCAB, Saying, near, table, with_drafter

WORDS = 50
LAW = Distribution(np.arange(3), np.array([0.2, 0.3, 0.5]))
# The root is 9, followed by the forced token 1 and the chosen siblings 2 and 3. After 2, tokens 4 and 5 are
# forced, and 6 is chosen.
TREE = TokenTree((9, 1, 2, 3, 4, 5, 6), (-1, 0, 1, 1, 2, 4, 5), (None,) * 7)
DRAFT = ForcedDraft(TREE, frozenset({1, 4, 5}))


class Simulation:
    """A target that generates a given text in passes of v(width) seconds, and drafters of its parts."""

    def __init__(self, text: list[int], curve: CostFunction) -> None:
        self.text = text
        self.curve = curve
        self.seconds = 0.0
        self._length = 0

    free_tokens = 1 << 20

    def clock(self) -> float:
        return self.seconds

    def verify(self, tree: TokenTree) -> HostLogits:
        self.seconds += self.curve(tree.width)
        rows = np.zeros((tree.width, WORDS), np.float32)
        for node, depth in enumerate(tree.depths):
            rows[node, self.text[(self._length + depth + 1) % len(self.text)]] = 1.0
        return HostLogits(rows)

    def commit(self, path: tuple[int, ...]) -> None:
        self._length += 1 + len(path)

    def drafter(self, right: list[bool], cost: float = 0.0) -> Saying:
        """Return a drafter that is right where `right` is true. With a `cost` of 0, it acts as a lookup."""

        def say(tokens: list[int], draft_length: int) -> list[int]:
            self.seconds += cost * draft_length
            places = range(len(tokens), len(tokens) + draft_length)
            known = [at % len(self.text) for at in places]
            return [self.text[at] if right[at] else (self.text[at] + 1) % WORDS for at in known]

        drafter = Saying(say)
        drafter.is_lookup = cost == 0.0
        return drafter

    def run(self, drafter: Drafter, draft_length: int, max_tokens: int) -> float:
        """Return the duration of the text."""
        started, self._length = self.seconds, 0
        drafter.begin(self.text[:1])
        sampler = Sampler(SamplingParams(temperature=0.0), 0, self.text[:1])
        steps = decode(
            self,
            drafter,
            Invariant(),
            sampler,
            self.text[0],
            vocab_size=WORDS,
            draft_length=draft_length,
            max_tokens=max_tokens,
            is_stop=lambda token: False,
            is_cancelled=lambda: False,
            stats=Stats(),
        )
        emitted = [token for step in steps for token in step.tokens]
        assert emitted == self.text[1 : max_tokens + 1]
        return self.seconds - started


def mixed(random: np.random.Generator, rates: list[float], length: int) -> list[bool]:
    """Return sections of text, each with its own acceptance rate of the drafter."""
    return [bool(random.random() < rates[at * len(rates) // length]) for at in range(length)]


LENGTH = 400
TEXTS = {
    "a copy": ([0.98], [0.8]),
    "a copy the model knows better": ([0.85], [0.97]),
    "nothing to look up": ([0.02], [0.75]),
    "nothing the model knows": ([0.7], [0.05]),
    "by turns": ([0.97, 0.05, 0.97, 0.05], [0.7, 0.7, 0.7, 0.7]),
    "both half": ([0.5], [0.6]),
}


@pytest.mark.parametrize(
    ("kind", "limits", "costs"),
    covering(list(TEXTS), (PassLimits(), PassLimits(max_branches=1)), ((0.05, 0.15), (0.3, 0.05))),
)
def test_combination_is_about_as_fast_as_the_better_drafter(
    kind: str, limits: PassLimits, costs: tuple[float, float]
) -> None:
    """The difference is at most 3 % after one reply, for any text and any costs of drafts and rows."""
    cost, rise = costs
    ratios = []
    for seed in range(2):
        random = np.random.default_rng(seed)
        text = random.integers(0, WORDS, LENGTH + 20).tolist()
        looked_up, known = (mixed(random, rates, len(text)) for rates in TEXTS[kind])
        simulation = Simulation(text, lambda rows: 1.0 + rise * (rows - 1))
        lookup, model = simulation.drafter(looked_up), simulation.drafter(known, cost)
        both = CombinedDrafter([model, lookup], limits=limits, v=simulation.curve, clock=simulation.clock)
        better_half = min(simulation.run(drafter, 5, LENGTH) for drafter in (lookup, model))
        simulation.run(both, 5, LENGTH)
        ratios.append(simulation.run(both, 5, LENGTH) / better_half)
    assert np.exp(np.mean(np.log(ratios))) < 1.03, ratios


def test_model_is_not_asked_where_the_lookup_is_reliable() -> None:
    text = list(range(WORDS)) * 8
    simulation = Simulation(text, assumed_cost)
    asked: list[int] = []

    def model(tokens: list[int], draft_length: int) -> list[int]:
        asked.append(len(tokens))
        simulation.seconds += 0.3 * draft_length
        return [text[at % len(text)] for at in range(len(tokens), len(tokens) + draft_length)]

    lookup = simulation.drafter([at > 100 for at in range(len(text))])
    both = CombinedDrafter([Saying(model), lookup], clock=simulation.clock)
    simulation.run(both, 6, 390)
    assert len([at for at in asked if at < 100]) > 10
    # Sparse tries apart.
    assert len([at for at in asked if at > 130]) <= 2


def test_drafts_of_all_drafters_are_verified_in_one_pass() -> None:
    """Where rows are cheap and both drafters are new."""
    drafters = [Saying(lambda tokens, length: [1, 2]), lookup_of([1, 3])]
    both = CombinedDrafter(drafters, v=lambda rows: 1.0 + 0.001 * rows)
    both.begin([0])
    tree = both.propose(Sampler(SamplingParams(), 0, [0]), Invariant(), 2)
    assert tree.tokens == (0, 1, 2, 3)
    assert tree.parents == (-1, 0, 1, 1)


def test_a_model_that_drafted_nothing_is_asked_again_for_a_longer_draft() -> None:
    """A new model may learn that drafting one token does not help, but drafting three does."""
    model = Saying(lambda tokens, length: [1, 2, 3] if length >= 3 else [])
    model.is_lookup, model.chooses_length = False, True
    alone = CombinedDrafter([model])
    alone.begin([0])

    def drafted(length: int) -> int:
        return alone.propose(Sampler(SamplingParams(), 0, [0]), Invariant(), length).drafted

    assert [drafted(1), drafted(1), drafted(3)] == [0, 0, 3]


def lookup_of(guess: list[int]) -> Saying:
    drafter = Saying(lambda tokens, length: guess[:length])
    drafter.is_lookup = True
    return drafter


class TestSameTokens:
    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
    @pytest.mark.parametrize("tree", [True, False])
    def test_combinations_emit_the_tokens_of_plain_decoding(self, temperature: float, tree: bool) -> None:
        for seed in range(4):
            target = table(seed, tree=tree)
            limits = PassLimits(9, 3 if tree else 1)
            growth = AdaptiveTreeGrowth(limits, lambda rows: 1.0 + 0.01 * rows)
            drafters: list[Drafter] = [
                ModelDrafter(near(target, seed, 0.3), VOCAB, branches=growth),
                Saying(lambda tokens, length: [tokens[-1] % 7, 1, 2][:length]),
                lookup_of([3, 4]),
                NgramDrafter(),
            ]
            with with_drafter(target, CombinedDrafter(drafters, limits=limits)) as pair:
                options: dict[str, Any] = {"seed": seed, "max_tokens": 60, "temperature": temperature}
                plain = pair.generate("abcab", method="none", **options)
                reply = pair.generate("abcab", method="ngram", draft_length=5, **options)
                assert reply.tokens == plain.tokens
                assert reply.stats.drafted_tokens > 0


class Lookup(FixedGuess):
    """A lookup, whose tokens are optional."""

    is_lookup = True


class TestExactDistributions:
    """Whether a draft is requested or pruned must not depend on the sampled tokens."""

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("guess", [(0,), (1, 1), (2, 0)])
    @pytest.mark.parametrize("can_branch", [True, False])
    @pytest.mark.parametrize("seed", first(range(2)))
    def test_a_growing_tree_and_a_lookup(self, rule: Rule, guess: Path, can_branch: bool, seed: int) -> None:
        target, law = random_table(seed, 3), random_table(seed + 100, 3)

        def both() -> CombinedDrafter:
            model: Any = ExactModel(law, 3)
            limits = PassLimits(5, 3 if can_branch else 1)
            growth = AdaptiveTreeGrowth(limits, lambda rows: 1.0 + 0.02 * (rows - 1), 2, lambda: 0.0)
            drafters = [ModelDrafter(model, 3, branches=growth), Lookup(guess)]
            return CombinedDrafter(drafters, limits=limits, clock=lambda: 0.0)

        assert_law(one_round(rule, target, proposal(both, 2)), target, ROOT, 3)

    @pytest.mark.parametrize("right", [True, False])
    @pytest.mark.parametrize("seed", range(2))
    def test_with_statistics_about_the_lookup(self, right: bool, seed: int) -> None:
        target, law = random_table(seed, 3), random_table(seed + 100, 3)

        def both() -> CombinedDrafter:
            model: Any = ExactModel(law, 3)
            drafters = [ModelDrafter(model, 3, branches=(2,)), Lookup((1, 2))]
            combined = CombinedDrafter(drafters, v=lambda rows: 0.9 + 0.1 * rows, clock=lambda: 0.0)
            for _ in range(30):
                combined._stats[1].acceptance.record_outcome(
                    TokenTree.chain(0, [1, 2]), (1, 2) if right else (0,)
                )
            return combined

        shapes = set()

        def propose(sampler: Any, acceptance: Any) -> TokenTree:
            tree = proposal(both, 2)(sampler, acceptance)
            shapes.add(tree.width)
            return tree

        assert_law(one_round(RULES[1].values[0], target, propose), target, ROOT, 3)  # type: ignore[arg-type]
        assert (max(shapes) > 5) == right, "a lookup that is never right takes no rows"


@st.composite
def trees(draw: st.DrawFn, laws: tuple[Distribution | None, ...] = (None, LAW)) -> TokenTree:
    """Return any tree below the root 9 with distinct siblings."""
    law = draw(st.sampled_from(laws))
    tokens, parents = [9], [-1]
    for _ in range(draw(st.integers(0, 7))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents), (None, *[law] * (len(tokens) - 1)))


def path(tree: TokenTree, node: int) -> tuple[int, ...]:
    tokens = []
    while node:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(tokens[::-1])


class TestMergeTrees:
    def test_equal_greedy_tokens_share_a_node(self) -> None:
        tree = merge_trees([TokenTree.chain(9, [1, 2, 3]), TokenTree.chain(9, [1, 2, 4, 5])]).tree
        assert tree.tokens == (9, 1, 2, 3, 4, 5)
        assert tree.parents == (-1, 0, 1, 2, 2, 4)
        assert not tree.block_verifiable

    def test_drawn_tokens_come_first_and_keep_their_distributions(self) -> None:
        drawn = TokenTree.chain(9, [1, 2], [LAW, LAW])
        joined = merge_trees([TokenTree.chain(9, [2, 0]), drawn])
        assert joined.tree.tokens == (9, 1, 2, 2, 0)
        assert joined.tree.draft_probs == (None, LAW, LAW, None, None)
        assert joined.node_maps == ((0, 3, 4), (0, 1, 2))

    def test_a_single_tree_is_unchanged(self) -> None:
        chain: Any = TokenTree.chain(9, [1, 2], [LAW, LAW])
        assert merge_trees([TokenTree.chain(9), chain]).tree is chain
        assert merge_trees([TokenTree.chain(9), TokenTree.chain(9)]).tree.drafted == 0

    def test_a_merged_chain_is_no_block(self) -> None:
        drawn = TokenTree.chain(9, [1, 2], [LAW, LAW])
        tree = merge_trees([drawn, TokenTree.chain(9, [1, 2])]).tree
        assert tree.is_chain
        assert not tree.block_verifiable

    @given(st.lists(trees(), min_size=1, max_size=4))
    def test_every_input_path_is_in_the_merged_tree(self, proposals: list[TokenTree]) -> None:
        joined = merge_trees(proposals)
        for tree, places in zip(proposals, joined.node_maps, strict=True):
            for node in range(tree.width):
                assert path(joined.tree, places[node]) == path(tree, node)
                assert (
                    tree.draft_probs[node] is joined.tree.draft_probs[places[node]]
                    or tree.draft_probs[node] is None
                )
        drawn = sum(tree.drafted for tree in proposals if tree.draft_probs[-1] is not None)
        assert sum(law is not None for law in joined.tree.draft_probs) == drawn

    @given(trees((None,)), st.lists(trees((None,)), max_size=3))
    def test_nodes_of_the_first_tree_come_first(self, first: TokenTree, others: list[TokenTree]) -> None:
        """So the target can reuse the computation of a self-draft."""
        tree = merge_trees([first, *others]).tree
        assert tree.tokens[: first.width] == first.tokens
        assert tree.parents[: first.width] == first.parents


class TestPruneOptional:
    @given(
        st.lists(st.tuples(trees(), st.floats(0.0, 1.0)), min_size=1, max_size=4),
        st.integers(1, 12),
        st.integers(1, 5),
        st.lists(st.floats(0.5, 4.0), min_size=40, max_size=40),
    )
    def test_only_optional_nodes_are_pruned_and_limits_hold(
        self, said: list[tuple[TokenTree, float]], width: int, leaves: int, curve: list[float]
    ) -> None:
        proposals = [tree for tree, _ in said]
        optional = [range(tree.width if tree.draft_probs[-1] is None else 0) for tree in proposals]
        joined = merge_trees(proposals)
        chances = [[1.0, *[chance] * tree.drafted] for tree, chance in said]
        tree = prune_optional(
            joined, chances, optional, PassLimits(width, leaves), lambda rows: curve[rows - 1], 0.1
        )
        paths = [(path(tree, node), tree.draft_probs[node]) for node in range(tree.width)]
        whole = [
            (path(joined.tree, node), joined.tree.draft_probs[node]) for node in range(joined.tree.width)
        ]
        rest = iter(whole)
        assert all(any(each == other for other in rest) for each in paths), "not the same order"
        firm = [each for each, may_go in zip(proposals, optional, strict=True) if not may_go]
        fixed = merge_trees(firm or [TokenTree.chain(9)]).tree
        held = [(path(fixed, node), fixed.draft_probs[node]) for node in range(fixed.width)]
        assert all(paths.count(each) >= held.count(each) for each in held)
        assert tree.width <= max(width, fixed.width)
        assert tree.leaf_count <= max(leaves, fixed.leaf_count)

    def test_unlikely_nodes_are_pruned(self) -> None:
        proposals = [TokenTree.chain(9, [1, 1]), TokenTree.chain(9, [2, 2])]
        for chance, width in ((0.02, 3), (0.9, 5)):
            chances = [[1.0, 0.5, 0.5], [1.0, chance, chance]]
            tree = prune_optional(
                merge_trees(proposals), chances, [(), {1, 2}], PassLimits(), assumed_cost, 0.2
            )
            assert tree.width == width

    def test_a_single_lookup_is_pruned_where_rows_are_expensive(self) -> None:
        chain, chances = TokenTree.chain(9, [1] * 6), [[1.0, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1]]
        merged, optional = merge_trees([chain]), [range(7)]
        assert prune_optional(merged, chances, optional, PassLimits(), assumed_cost, 0.0).drafted == 3
        assert prune_optional(merged, chances, optional, PassLimits(), float, 0.0).drafted == 0

    def test_an_optional_node_stays_before_one_that_is_not(self) -> None:
        chain, chances = TokenTree.chain(9, [1] * 4), [[1.0, 0.1, 0.1, 0.1, 0.1]]
        tree = prune_optional(merge_trees([chain]), chances, [{1, 2, 4}], PassLimits(), float, 0.0)
        assert tree.drafted == 3


def test_the_tree_holds_only_chosen_tokens() -> None:
    chosen = ChosenTokens(DRAFT)
    assert (chosen.tree.tokens, chosen.tree.parents) == ((9, 2, 3, 6), (-1, 0, 0, 1))
    assert chosen.nodes == [0, 2, 3, 6]


@pytest.mark.parametrize(
    ("tokens", "emitted"),
    [
        ((), ()),
        ((8,), ()),  # The target wrote the forced token differently, which says nothing about 2 and 3.
        ((1,), ()),
        ((1, 8), (8,)),  # Both choices were rejected.
        ((1, 3, 7), (3, 7)),
        ((1, 2), (2,)),
        ((1, 2, 4, 8), (2,)),
        ((1, 2, 4, 5, 8), (2, 8)),
        ((1, 2, 4, 5, 6, 7), (2, 6, 7)),
    ],
)
def test_the_emitted_tokens_that_could_have_been_chosen(
    tokens: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    assert ChosenTokens(DRAFT).emitted(tokens) == emitted


def test_a_draft_without_forced_tokens_is_left_as_it_is() -> None:
    tree = TokenTree.chain(9, [1, 2])
    chosen = ChosenTokens(ForcedDraft(tree))
    assert (chosen.tree.tokens, chosen.tree.parents) == (tree.tokens, tree.parents)
    assert chosen.emitted((1, 5)) == (1, 5)
