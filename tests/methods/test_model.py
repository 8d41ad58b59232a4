"""The draft model drafter: its cache follows the sequence, and drafts contain only shared tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError
from edgespec.methods.model.drafter import ModelDrafter
from tests.raising import raises
from tests.tables import END, VOCAB, near, runtime, table

GREEDY = SamplingParams(temperature=0.0, logit_bias={END: -np.inf})


def propose(drafter: ModelDrafter, tokens: list[int], draft_length: int) -> TokenTree:
    sampler = Sampler(GREEDY, 0, tokens)
    tree = drafter.propose(sampler, Invariant(), draft_length)
    assert sampler.position == len(tokens)
    return tree


class TestCache:
    @settings(max_examples=60)
    @given(
        st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=8),
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), max_size=8),
        st.sampled_from([(), (2,), (2, 2)]),
    )
    def test_cache_follows_the_sequence_whatever_is_accepted(
        self, prompt: list[int], rounds: list[tuple[int, int, bool]], branches: tuple[int, ...]
    ) -> None:
        """Run random rounds of (draft length, accepted tokens, whether a draft was requested)."""
        model, tokens = table(3), list(prompt)
        drafter = ModelDrafter(model, VOCAB, branches=branches)
        drafter.begin(tokens)
        for draft_length, accepted, asked in rounds:
            emitted: list[int] = []
            if asked and draft_length:
                tree = propose(drafter, tokens, draft_length)
                fresh = ModelDrafter(table(3), VOCAB, branches=branches)
                fresh.begin(tokens)
                assert tree == propose(fresh, tokens, draft_length)
                node = 0
                while tree.children(node) and len(emitted) < accepted:
                    node = tree.children(node)[-1]
                    emitted.append(tree.tokens[node])
            emitted.append((sum(tokens) + accepted) % (VOCAB - 1))
            drafter.commit(tuple(emitted))
            tokens += emitted
            held = model._tokens
            assert held == tokens[: len(held)]
            assert len(held) < len(tokens)

    def test_a_draft_is_no_longer_than_the_model_can_draft(self) -> None:
        model = table(3)
        capabilities = replace(model.facts.capabilities, max_draft_length=2)
        model.facts = replace(model.facts, capabilities=capabilities)
        drafter = ModelDrafter(model, VOCAB)
        drafter.begin([1, 2])
        assert propose(drafter, [1, 2], 5).drafted == 2

    def test_after_full_acceptance_the_cache_lacks_one_token(self) -> None:
        model, tokens = table(3), [0, 1, 2]
        drafter = ModelDrafter(model, VOCAB)
        drafter.begin(tokens)
        tree = propose(drafter, tokens, 4)
        drafter.commit((*tree.tokens[1:], 0))
        assert model.length == len(tokens) + 4 - 1

    def test_no_draft_for_a_prompt_beyond_its_context(self) -> None:
        drafter = ModelDrafter(table(3, context_tokens=10), VOCAB)
        tokens = [0, 1] * 20
        drafter.begin(tokens)
        assert propose(drafter, tokens, 4).drafted == 0
        drafter.commit((1,))
        drafter.begin([0, 1, 2])
        assert propose(drafter, [0, 1, 2], 4).drafted == 4


class TestDrafts:
    def test_a_larger_vocabulary_than_the_targets(self) -> None:
        """Tokens unique to the draft model are never drafted, and those unique to the target never fail."""
        big, small = table(1, vocab=12), table(2)
        with runtime(small, big) as pair:
            expected = pair.generate("abcab", method="none", seed=2, max_tokens=40)
            got = pair.generate("abcab", method="model", seed=2, max_tokens=40, draft_length=5)
        assert got.tokens == expected.tokens
        with runtime(table(1, vocab=12), table(2)) as pair:
            expected = pair.generate("ablkj", method="none", seed=2, max_tokens=40)
            got = pair.generate("ablkj", method="model", seed=2, max_tokens=40, draft_length=5)
        assert got.tokens == expected.tokens
        assert max(got.tokens) >= VOCAB

    @pytest.mark.parametrize(("branches", "leaves"), [((), 1), ((2,), 2), ((3, 2), 6), ((2, 2, 2), 8)])
    def test_the_tree_has_the_requested_branches(self, branches: tuple[int, ...], leaves: int) -> None:
        drafter = ModelDrafter(table(3), VOCAB, branches=branches)
        drafter.begin([0, 1, 2])
        tree = propose(drafter, [0, 1, 2], 5)
        assert tree.leaf_count == leaves
        assert max(tree.depths) == 5
        for node in range(tree.width):
            children = [tree.tokens[child] for child in tree.children(node)]
            assert len(set(children)) == len(children)

    def test_a_draft_ends_with_the_first_token_below_min_confidence(self) -> None:
        flat = table(3, spread=0.01)
        drafter = ModelDrafter(flat, VOCAB, min_confidence=0.5)
        drafter.begin([0, 1, 2])
        assert propose(drafter, [0, 1, 2], 5).drafted == 1

    def test_a_model_without_rollback_is_an_error(self) -> None:
        with raises(CapabilityError, code="rollback_not_supported"):
            ModelDrafter(table(3, rollback=False), VOCAB)

    def test_a_model_without_trees_drafts_chains(self) -> None:
        drafter = ModelDrafter(table(3, tree=False), VOCAB, branches=(3,))
        drafter.begin([0, 1, 2])
        assert propose(drafter, [0, 1, 2], 4).is_chain


def test_warm_up_measures_the_draft_model() -> None:
    model = table(3)
    drafter = ModelDrafter(model, VOCAB)
    assert (drafter.pass_seconds, drafter.prefill_token_seconds) == (0.0, 0.0)
    drafter.warm_up()
    assert drafter.pass_seconds > 0.0
    assert drafter.prefill_token_seconds > 0.0
    assert model.length == 0
    drafter.begin([0, 1, 2])
    assert propose(drafter, [0, 1, 2], 4).drafted == 4


def test_warm_up_leaves_a_cache_in_use_alone() -> None:
    model = table(3)
    model.prefill([0, 1])
    ModelDrafter(model, VOCAB).warm_up()
    assert model.length == 2


def test_a_similar_draft_model_has_a_high_acceptance_rate() -> None:
    with runtime(table(1), near(table(1), 2, noise=0.2)) as pair:
        reply = pair.generate("abcab", method="model", seed=1, max_tokens=60, temperature=0.8)
    assert (reply.stats.acceptance_rate or 0.0) > 0.5
    assert (reply.stats.tokens_per_target_pass or 0.0) > 2.0
