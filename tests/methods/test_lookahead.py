"""Lookahead decoding matches a reference implementation, and drafts only where it is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import OptionError
from edgespec.methods.base import Drafter
from edgespec.methods.constants import MAX_NGRAMS_PER_TOKEN
from edgespec.methods.costs.curve import CostCurve
from edgespec.methods.lookahead.drafter import LookaheadDrafter, LookaheadWindow, NgramPool, choose_window
from edgespec.model.model_facts import Capabilities
from tests.raising import raises
from tests.tables import END, PROMPT, VOCAB, runtime, table, with_drafter
from tests.tabular import TabularModel

FREE = Capabilities(True, True)


def forced(window: LookaheadWindow, able: Capabilities = FREE) -> LookaheadDrafter:
    return LookaheadDrafter(able, window=window)


def columns(drafter: LookaheadDrafter) -> list[list[int]]:
    return [list(column.tokens) for column in drafter._columns]


def pool_of(drafter: LookaheadDrafter) -> set[tuple[int, ...]]:
    return {
        (token, *rest) for token in range(VOCAB) for rest in drafter._pool.after(token, MAX_NGRAMS_PER_TOKEN)
    }


def best(model: TabularModel, tokens: Sequence[int]) -> int:
    """Return the greedy token of the table after a sequence."""
    a, b = tokens[-2:]
    return int(model._table[a * VOCAB + b].argmax())


class TestJacobiWindow:
    """Compare every step with a reference computed only from the table."""

    @pytest.mark.parametrize(
        "window", [LookaheadWindow(3, 3, 2), LookaheadWindow(4, 4, 2), LookaheadWindow(2, 2, 2)], ids=str
    )
    @pytest.mark.parametrize("seed", range(3))
    def test_window_and_pool_match_a_reference(self, window: LookaheadWindow, seed: int) -> None:
        target = table(seed)
        drafter = forced(window)
        params = SamplingParams(temperature=0.0, logit_bias={END: -np.inf})
        tokens = [0, 1, 2, 0, 1]
        target._table[:, END] = -50
        drafter.begin(tokens)
        text_ngrams = {
            tuple(tokens[i : i + window.ngram_tokens]) for i in range(len(tokens) - window.ngram_tokens + 1)
        }
        assert pool_of(drafter) == text_ngrams
        target.prefill(tokens[:-1])
        ages: list[int] = []
        long_rounds = 0
        for _ in range(25):
            sampler = Sampler(params, 0, tokens)
            known = drafter._pool.after(tokens[-1], window.candidates)
            tree = drafter.propose(sampler, Invariant(), 12)
            before = columns(drafter)
            ages += [0] * (window.columns - len(ages))
            # Each column follows the first tokens of the nearer columns, and each candidate follows the root.
            paths = {path_of(tree, node) for node in range(tree.width)}
            expected_paths: set[tuple[int, ...]] = {()}
            for w, column in enumerate(before):
                trunk = [other[0] for other in before[: w + 1]]
                expected_paths |= prefixes((*trunk, *column[1:]))
            for candidate in known:
                expected_paths |= prefixes(candidate)
            assert paths == expected_paths
            assert tree.width == len(paths) <= window.rows
            assert tree.leaf_count <= window.leaves
            assert max(tree.depths) <= window.depth
            logits = target.verify(tree)
            verdict = Invariant().accept(tree, logits, sampler)
            drafter.observe(tree, logits, sampler)
            assert sampler.position == len(tokens)
            emitted = (*(tree.tokens[node] for node in verdict.path), verdict.token)
            target.commit(verdict.path)
            drafter.commit(emitted)
            said = [
                best(target, [*tokens, *(other[0] for other in before[: w + 1]), *column[1:]])
                for w, column in enumerate(before)
            ]
            ages = [age + 1 for age in ages]
            jacobi = {
                (*column, new)
                for column, new, age in zip(before, said, ages, strict=True)
                if age >= window.levels
            }
            tokens += emitted
            text_ngrams |= {
                tuple(tokens[i : i + window.ngram_tokens])
                for i in range(len(tokens) - window.ngram_tokens + 1)
            } | jacobi
            assert pool_of(drafter) == text_ngrams
            shifted = [[*column[1:], new] for column, new in zip(before, said, strict=True)]
            assert columns(drafter) == shifted[len(emitted) - 1 :]
            ages = ages[len(emitted) - 1 :]
            long_rounds += len(emitted) > 1
        assert all(best(target, tokens[:i]) == tokens[i] for i in range(5, len(tokens)))
        assert long_rounds, "no round emitted several tokens, so the test checks too little"

    def test_repeated_text_is_accepted_in_whole_ngrams(self) -> None:
        """In a model of order one, whole n-grams are accepted once every n-gram is in the pool."""
        logits = np.full((VOCAB, VOCAB), -5.0, np.float32)
        for token in range(VOCAB - 1):
            logits[token, (token * 3 + 1) % (VOCAB - 1)] = 5.0
        with with_drafter(TabularModel(logits), forced(LookaheadWindow(4, 4, 4))) as pair:
            reply = pair.generate("b", method="lookahead", temperature=0.0, max_tokens=60)
        assert (reply.stats.tokens_per_target_pass or 0) > 2.5

    def test_predictions_use_the_noise_of_their_position(self) -> None:
        """A column on the true sequence predicts the token that plain decoding samples at that position."""
        target, tokens = table(1), [0, 1, 2, 0, 1]
        sampling: dict[str, Any] = {
            "temperature": 1.2,
            "presence_penalty": 1.0,
            "penalty_window": 4,
            "logit_bias": {END: -np.inf},
        }
        params = SamplingParams(**sampling)
        with runtime(table(1)) as pair:
            truth = pair.generate(PROMPT, method="none", seed=5, max_tokens=4, **sampling).tokens
        drafter = forced(LookaheadWindow(2, 3, 1))
        drafter.begin(tokens)
        drafter.propose(Sampler(params, 5, tokens), Invariant(), 9)
        for w, column in enumerate(drafter._columns):
            column.tokens = list(truth[w : w + 2])
        tree = drafter.propose(Sampler(params, 5, tokens), Invariant(), 9)
        target.prefill(tokens[:-1])
        drafter.observe(tree, target.verify(tree), Sampler(params, 5, tokens))
        assert [column.next for column in drafter._columns] == list(truth[2:4])


def path_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(path))


def prefixes(path: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {path[:end] for end in range(1, len(path) + 1)}


FLAT = CostCurve((1, 64), (1.0, 1.01))
STEEP = CostCurve((1, 2, 64), (1.0, 2.0, 64.0))


class TestWhetherItIsFaster:
    def rounds(self, drafter: Drafter, tokens: list[int], emit: Sequence[int], length: int = 8) -> list[int]:
        """Emit one token per round and return the number of drafted tokens in each."""
        drafter.begin(tokens)
        drafted = []
        text = list(tokens)
        for token in emit:
            drafted.append(drafter.propose(Sampler(SamplingParams(), 0, text), Invariant(), length).drafted)
            drafter.commit((token,))
            text.append(token)
        return drafted

    def test_off_if_cost_is_proportional_to_width(self) -> None:
        drafter = LookaheadDrafter(FREE, STEEP)
        assert drafter.note().startswith(
            "lookahead is off: it would not save time here (checking 7 tokens takes 7.00 times"
        )
        assert self.rounds(drafter, [1, 2, 3], [1, 2, 3] * 40) == [0] * 120

    @pytest.mark.parametrize(
        "able", [Capabilities(True, True, max_branches=2), Capabilities(True, True, max_width=4)]
    )
    def test_off_if_no_window_fits_the_target(self, able: Capabilities) -> None:
        drafter = LookaheadDrafter(able, FLAT)
        assert "the model cannot check" in drafter.note()
        assert self.rounds(drafter, [1, 2], [1, 2, 1, 2]) == [0] * 4

    def test_off_while_the_draft_length_is_too_small(self) -> None:
        drafter = LookaheadDrafter(FREE, FLAT)
        assert self.rounds(drafter, [1, 2], [1, 2, 1, 2], length=2) == [0] * 4
        assert drafter.note() == "lookahead is off: it needs a draft length of at least 3, not 2"
        assert all(self.rounds(drafter, [1, 2], [1, 2, 1, 2], length=3))

    def test_off_without_a_cost_curve(self) -> None:
        assert "is off" in LookaheadDrafter(FREE).note()

    def test_on_if_wider_passes_cost_nothing(self) -> None:
        drafter = LookaheadDrafter(Capabilities(True, True, max_branches=8), FLAT)
        assert drafter.note().startswith("lookahead runs with W ")
        assert all(self.rounds(drafter, [1, 2, 3], [1, 2, 3] * 5))

    def test_a_window_that_the_target_cannot_verify_is_an_error(self) -> None:
        narrow = Capabilities(True, True, max_width=20, max_branches=8)
        with raises(
            OptionError,
            "28 tokens",
            "9 branches",
            "20 tokens",
            "8 branches",
            "W 6",
            code="option_not_supported",
        ):
            LookaheadDrafter(narrow, window=LookaheadWindow(6, 4, 3))


class TestNgramPool:
    def test_the_latest_ngrams_come_first_and_the_oldest_are_evicted(self) -> None:
        pool = NgramPool()
        for last in range(MAX_NGRAMS_PER_TOKEN + 4):
            pool.add((7, 1, last))
        pool.add((7, 1, 5))
        assert pool.after(7, 2) == [(1, 5), (1, MAX_NGRAMS_PER_TOKEN + 3)]
        assert len(pool.after(7, 99)) == MAX_NGRAMS_PER_TOKEN
        assert pool.after(8, 3) == []


def test_rows_leaves_and_depth() -> None:
    window = LookaheadWindow(5, 4, 3)
    assert (window.levels, window.rows, window.leaves, window.depth) == (3, 25, 8, 7)
    assert LookaheadWindow(5, 2, 3).leaves == 4, "with one level, the columns form a chain"
    chain = LookaheadWindow(0, 4, 1)
    assert (chain.rows, chain.leaves, chain.depth) == (4, 1, 3)
    assert LookaheadWindow(4, 3, 4).expected_tokens == pytest.approx((1 - 0.6**4 + 1 - (1 - 0.16) ** 4) / 3)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.2, 4), min_size=4, max_size=4),
    st.booleans(),
    st.integers(1, 80),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_the_best_fitting_window_is_chosen(
    seconds: list[float], tree: bool, max_width: int, max_branches: int, draft_length: int
) -> None:
    curve = CostCurve((1, 8, 16, 40), (1.0, *seconds[1:]))
    able = Capabilities(True, tree, "", max_width, max_branches)
    shapes = (
        [LookaheadWindow(w, n, g) for w in range(2, 17) for n in range(3, 7) for g in range(1, w + 1)]
        if tree
        else [LookaheadWindow(0, n, 1) for n in range(3, 7)]
    )
    speed_ups = {
        shape: (1 + shape.expected_tokens) / curve.v(shape.rows)
        for shape in shapes
        if shape.rows <= max_width
        and shape.depth <= draft_length
        and (not tree or shape.leaves <= max_branches)
    }
    best = max(speed_ups.values(), default=0.0)
    chosen = choose_window(curve, able, draft_length)
    assert (None if chosen is None else speed_ups[chosen]) == (best if best > 1 else None)
