"""Acceptance rules emit exactly the target distribution, proven by enumerating all outcomes exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from edgespec.engine.acceptance import Acceptance, RandomDraws, Rejection
from edgespec.engine.loop import decode
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.combined_drafter import CombinedDrafter, merge_trees
from edgespec.methods.base import Drafter
from edgespec.methods.model.drafter import ModelDrafter
from tests.cases import first
from tests.engine.exact import (
    AllChances,
    ExactModel,
    ExactSampler,
    Path,
    Table,
    assert_law,
    exact_distribution,
    random_table,
)

ROOT = (0,)
Rule = Callable[[RandomDraws], Any]


def token_wise(chance: RandomDraws) -> Rejection:
    return Rejection(chance, block_verification=False)


def block_wise(chance: RandomDraws) -> Rejection:
    return Rejection(chance, block_verification=True)


RULES = [pytest.param(token_wise, id="token-wise"), pytest.param(block_wise, id="block")]


class FixedGuess(Drafter):
    """A drafter without probabilities, like an n-gram lookup."""

    name = "fixed"
    is_lookup = True

    def __init__(self, guess: Sequence[int]) -> None:
        self._guess = guess

    def begin(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1]

    def propose(self, sampler: object, acceptance: Acceptance, draft_length: int) -> TokenTree:
        return TokenTree.chain(self._last, self._guess[:draft_length])

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._last = tokens[-1]


class DeadEnds(ExactSampler):
    """A sampler whose processors rule out every token after a 2."""

    def draft_distribution(self, logits: Any, row: int) -> Any:
        allowed = super().draft_distribution(logits, row)
        return None if self.history[-1] == 2 else allowed


def one_round(
    rule: Rule,
    target: Table,
    propose: Callable[[ExactSampler, Any], TokenTree],
    greedy: bool = False,
    make_sampler: type[ExactSampler] = ExactSampler,
) -> dict[Path, Fraction]:
    """Return the exact distribution of the tokens that one round emits."""
    chance = AllChances()
    acceptance = rule(chance)

    def experiment() -> Path:
        sampler = make_sampler(ROOT, greedy)
        tree = propose(sampler, acceptance)
        assert sampler.history == list(ROOT), "the drafter left the sampler elsewhere"
        logits = ExactModel(target, len(target(()))).verify(tree)
        verdict = acceptance.accept(tree, logits, sampler)
        assert sampler.history == list(ROOT), "the rule left the sampler elsewhere"
        return (*(tree.tokens[node] for node in verdict.path), verdict.token)

    return chance.outcomes(experiment)


def model_drafter(draft: Table, **options: Any) -> ModelDrafter:
    return ModelDrafter(ExactModel(draft, len(draft(()))), len(draft(())), **options)  # type: ignore[arg-type]


def proposal(make: Callable[[], Any], depth: int) -> Callable[[ExactSampler, Any], TokenTree]:
    """Return the tree that a fresh drafter proposes after the root."""

    def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
        drafter = make()
        drafter.begin(ROOT)
        tree: TokenTree = drafter.propose(sampler, acceptance, depth)
        return tree

    return propose


class TestOneRound:
    """Test one round with the production drafters, merging and acceptance rules."""

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("guess", [(0,), (2,), (1, 1), (2, 0, 1), (0, 0, 0, 0)])
    @pytest.mark.parametrize("seed", first(range(4), 2))
    def test_drafts_without_probabilities(self, rule: Rule, guess: Path, seed: int) -> None:
        target = random_table(seed, 3)
        assert_law(one_round(rule, target, lambda *_: TokenTree.chain(0, guess)), target, ROOT, 3)

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("seed", first(range(4), 2))
    def test_chain_of_a_draft_model(self, rule: Rule, depth: int, seed: int) -> None:
        target, draft = random_table(seed, 3), random_table(seed + 100, 3)
        emitted = one_round(rule, target, proposal(lambda: model_drafter(draft), depth))
        assert_law(emitted, target, ROOT, 3)

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("seed", first([0, 1, 2, 4, 5, 6], 2))
    def test_chain_whose_length_depends_on_drawn_tokens(self, rule: Rule, seed: int) -> None:
        target, draft = random_table(seed, 3), random_table(seed + 102, 3, zeros=0)
        confidence = float(max(draft(ROOT))) - 1e-9
        lengths = set()

        def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
            tree = proposal(lambda: model_drafter(draft, min_confidence=confidence), 3)(sampler, acceptance)
            lengths.add(tree.drafted)
            return tree

        assert_law(one_round(rule, target, propose), target, ROOT, 3)
        assert len(lengths) > 1, "nothing stopped early: this shows nothing"

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("branches", [(), (2, 2)])
    @pytest.mark.parametrize("seed", first(range(4), 2))
    def test_nothing_is_drafted_after_an_end_token(
        self, rule: Rule, branches: tuple[int, ...], seed: int
    ) -> None:
        """The last token id ends a reply, so drafts stop there."""
        target, draft = random_table(seed, 3), random_table(seed + 100, 3, zeros=0)

        def ending() -> Any:
            model: Any = ExactModel(draft, 3, ends=True)
            return ModelDrafter(model, 3, branches=branches)

        assert_law(one_round(rule, target, proposal(ending, 2)), target, ROOT, 3)

    @pytest.mark.parametrize("branches", [(2,), (3,), (2, 2), (1, 2), (3, 2), (1, 1, 2)])
    @pytest.mark.parametrize("seed", first(range(3)))
    def test_siblings_without_replacement(self, branches: tuple[int, ...], seed: int) -> None:
        target, draft = random_table(seed, 3), random_table(seed + 100, 3, zeros=0.4)
        emitted = one_round(
            block_wise, target, proposal(lambda: model_drafter(draft, branches=branches), len(branches))
        )
        assert_law(emitted, target, ROOT, 3)

    @pytest.mark.parametrize("seed", first([2, 0, 1]))
    def test_siblings_of_a_tree_whose_depth_depends_on_drawn_tokens(self, seed: int) -> None:
        target, draft = random_table(seed, 3), random_table(seed + 100, 3, zeros=0)
        propose = proposal(lambda: model_drafter(draft, branches=(2, 2), min_confidence=0.34), 3)
        assert_law(one_round(block_wise, target, propose), target, ROOT, 3)

    @pytest.mark.parametrize("guess", [(0,), (1, 1), (2, 0), (0, 1, 2)])
    @pytest.mark.parametrize("branches", [(), (2,), (2, 2)])
    @pytest.mark.parametrize("seed", first(range(3)))
    def test_draft_model_merged_with_a_deterministic_draft(
        self, guess: Path, branches: tuple[int, ...], seed: int
    ) -> None:
        target, draft = random_table(seed, 3), random_table(seed + 100, 3)

        def both() -> CombinedDrafter:
            return CombinedDrafter([model_drafter(draft, branches=branches), FixedGuess(guess)])

        assert_law(one_round(block_wise, target, proposal(both, 2)), target, ROOT, 3)

    @pytest.mark.parametrize("limits", [(2, 9), (3, 9), (9, 2), (4, 1)])
    @pytest.mark.parametrize("guess", [(0,), (1, 1), (2, 0)])
    @pytest.mark.parametrize("seed", first(range(2)))
    def test_tree_pruned_to_the_limits_of_a_pass(
        self, limits: tuple[int, int], guess: Path, seed: int
    ) -> None:
        """Near the end of the context, drafts are pruned independently of their tokens."""
        target, draft = random_table(seed, 3), random_table(seed + 100, 3)

        def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
            drafters: list[Any] = [model_drafter(draft, branches=(2,)), FixedGuess(guess)]
            make = proposal(lambda: CombinedDrafter(drafters), 2)
            return make(sampler, acceptance).pruned(3, 2, *limits)

        assert_law(one_round(block_wise, target, propose), target, ROOT, 3)

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("branches", [(), (2,), (2, 2)])
    def test_temperature_zero_emits_the_greedy_tokens(self, rule: Rule, branches: tuple[int, ...]) -> None:
        for seed in range(8):
            target, draft = random_table(seed, 3), random_table(seed // 2, 3)
            propose = proposal(lambda draft=draft: model_drafter(draft, branches=branches), 3)  # type: ignore[misc]
            emitted = one_round(rule, target, propose, greedy=True)
            (tokens,) = emitted
            for i, token in enumerate(tokens):
                law = target(ROOT + tokens[:i])
                assert token == max(range(3), key=lambda t: (law[t], -t))

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("depth", [1, 3])
    def test_a_draft_equal_to_the_target_is_fully_accepted(self, rule: Rule, depth: int) -> None:
        target = random_table(7, 3)
        emitted = one_round(rule, target, proposal(lambda: model_drafter(target), depth))
        assert {len(tokens) for tokens in emitted} == {depth + 1}


class TestDeadEnds:
    """A round ends after a token that nothing may follow, and the distribution stays exact."""

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("guess", [(2,), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 2, 2)])
    @pytest.mark.parametrize("seed", first(range(4), 2))
    def test_drafts_without_probabilities(self, rule: Rule, guess: Path, seed: int) -> None:
        target = random_table(seed, 3)
        emitted = one_round(rule, target, lambda *_: TokenTree.chain(0, guess), make_sampler=DeadEnds)
        assert_law(emitted, target, ROOT, 3)
        assert not any(2 in tokens[:-1] for tokens in emitted)

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("branches", [(), (2,), (2, 2)])
    @pytest.mark.parametrize("seed", first(range(4), 2))
    def test_a_draft_model_that_does_not_know_them(
        self, rule: Rule, branches: tuple[int, ...], seed: int
    ) -> None:
        target, draft = random_table(seed, 3), random_table(seed + 100, 3)

        def propose(_sampler: ExactSampler, acceptance: Any) -> TokenTree:
            drafted = proposal(lambda: model_drafter(draft, branches=branches), 2)
            return drafted(ExactSampler(ROOT), acceptance)

        emitted = one_round(rule, target, propose, make_sampler=DeadEnds)
        assert_law(emitted, target, ROOT, 3)
        assert not any(2 in tokens[:-1] for tokens in emitted)


class TestBlockVerification:
    """Block verification (arXiv 2403.10444) never accepts fewer tokens than token-wise verification."""

    @staticmethod
    def expected(emitted: dict[Path, Fraction]) -> Fraction:
        return sum((len(tokens) * weight for tokens, weight in emitted.items()), Fraction(0))

    @pytest.mark.parametrize("depth", [2, 3])
    def test_block_verification_accepts_at_least_as_many_tokens(self, depth: int) -> None:
        better = 0
        for seed in range(12):
            target, draft = random_table(seed, 3), random_table(seed + 100, 3)
            propose = proposal(lambda draft=draft: model_drafter(draft), depth)  # type: ignore[misc]
            block = self.expected(one_round(block_wise, target, propose))
            single = self.expected(one_round(token_wise, target, propose))
            assert block >= single
            better += block > single
        assert better >= 6, "block verification should help more often than not"


class TestSeveralRounds:
    """Test several rounds of `decode`: the state after one round must not bias the next."""

    MAX_TOKENS = 3

    def run(self, rule: Rule, target: Table, make: Callable[[], Any], depth: int) -> dict[Path, Fraction]:
        chance = AllChances()

        def experiment() -> Path:
            model = ExactModel(target, len(target(())))
            drafter = make()
            drafter.begin(ROOT)
            steps = decode(
                model,  # type: ignore[arg-type]
                drafter,
                rule(chance),
                ExactSampler(ROOT),  # type: ignore[arg-type]
                ROOT[0],
                vocab_size=len(target(())),
                draft_length=depth,
                max_tokens=self.MAX_TOKENS,
                is_stop=lambda token: False,
                is_cancelled=lambda: False,
                stats=Stats(),
            )
            return tuple(token for step in steps for token in step.tokens)

        return chance.outcomes(experiment)

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("branches", [(), (2,)])
    def test_model(self, rule: Rule, branches: tuple[int, ...]) -> None:
        target, draft = random_table(3, 2, zeros=0.1), random_table(4, 2, zeros=0.1)
        emitted = self.run(rule, target, lambda: model_drafter(draft, branches=branches), 2)
        assert {len(tokens) for tokens in emitted} == {self.MAX_TOKENS}
        assert_law(emitted, target, ROOT, 2)

    def test_draft_model_with_a_deterministic_draft(self) -> None:
        target, draft = random_table(5, 2, zeros=0), random_table(6, 2, zeros=0)

        def both() -> CombinedDrafter:
            return CombinedDrafter([model_drafter(draft), FixedGuess((1, 0))])

        assert_law(self.run(block_wise, target, both, 2), target, ROOT, 2)


class TestWrongRulesAreDetected:
    """Typical mistakes in acceptance rules must change the distribution."""

    def refuted(self, propose: Callable[[ExactSampler, Any], TokenTree], rule: Rule = block_wise) -> bool:
        for seed in range(4):
            target = random_table(seed, 3)
            try:
                assert_law(one_round(rule, target, propose), target, ROOT, 3)
            except AssertionError:
                return True
        return False

    def test_dropping_a_token_because_it_was_unlikely(self) -> None:
        draft = random_table(102, 3, zeros=0)

        def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
            tree = proposal(lambda: model_drafter(draft), 1)(sampler, acceptance)
            law = draft(ROOT)
            return tree if law[tree.tokens[1]] == max(law) else TokenTree.chain(0)

        assert self.refuted(propose)

    def test_dropping_a_draft_because_it_was_too_wide(self) -> None:
        """Two drafters that agree give a narrower tree than two that disagree."""
        draft = random_table(102, 3, zeros=0)

        def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
            drafters: list[Any] = [model_drafter(draft), FixedGuess((1,))]
            tree = proposal(lambda: CombinedDrafter(drafters), 1)(sampler, acceptance)
            return tree if tree.width <= 2 else TokenTree.chain(0)

        assert self.refuted(propose)

    def test_draft_probs_that_the_draft_was_not_drawn_from(self) -> None:
        draft, other = random_table(100, 3, zeros=0), random_table(101, 3, zeros=0)

        def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
            tree = proposal(lambda: model_drafter(draft), 1)(sampler, acceptance)
            return TokenTree(tree.tokens, tree.parents, (None, exact_distribution(other(ROOT))))

        assert self.refuted(propose)

    def test_siblings_without_replacement_accepted_as_if_with_replacement(self) -> None:
        draft = random_table(100, 3, zeros=0)

        def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
            tree = proposal(lambda: model_drafter(draft, branches=(2,)), 1)(sampler, acceptance)
            law = exact_distribution(draft(ROOT))
            return TokenTree(tree.tokens, tree.parents, (None, law, law))

        assert self.refuted(propose)

    def test_a_chain_that_arises_only_if_two_drafters_agree(self) -> None:
        """Block verification is only unbiased if it is chosen before tokens are drawn."""
        draft = random_table(100, 3, zeros=0)

        def propose(sampler: ExactSampler, acceptance: Any) -> TokenTree:
            drafted = proposal(lambda: model_drafter(draft), 2)(sampler, acceptance)
            tree = merge_trees([drafted, TokenTree.chain(drafted.tokens[0], (1, 1))]).tree
            if not tree.is_chain:
                return tree
            return TokenTree.chain(tree.tokens[0], tree.tokens[1:], tree.draft_probs[1:])

        assert self.refuted(propose)


def test_tokens_of_probability_zero_are_never_drafted() -> None:
    """A distribution with fewer tokens than branches gives fewer children."""
    chance = AllChances()
    law = exact_distribution([Fraction(0), Fraction(1), Fraction(0)])
    assert chance.outcomes(lambda: tuple(chance.sample_distinct(law, 3))) == {(1,): 1}
    assert np.array_equal(law.tokens, [0, 1, 2])
