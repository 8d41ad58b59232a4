"""In invariant mode, neither the drafter nor the draft length changes the text for a given seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.api.runtime import Runtime
from edgespec.decode.reply import Reply
from edgespec.engine.tree import TokenTree
from tests.cases import first
from tests.tables import (
    END,
    PROMPT,
    VOCAB,
    Saying,
    knowing,
    near,
    runtime,
    sampling_settings,
    table,
    with_drafter,
)

SETTINGS = sampling_settings((0.0, 0.7, 1.2))
# Every run tests each draft with one of three targets, and `-m long` with all three.
STEPS = pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
TREES: list[tuple[int, ...]] = [(), (2,), (3,), (2, 2), (1, 3), (4, 2, 2)]
TREES_AT_THE_END: list[tuple[int, ...]] = [(), (2, 2), (4, 4)]


def plain(target_seed: int, **options: Any) -> Reply:
    with runtime(table(target_seed)) as alone:
        return alone.generate(PROMPT, method="none", **options)


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
class TestEveryDrafter:
    @STEPS
    @pytest.mark.parametrize("method", ["model", "ngram", "model+ngram", "ngram+model"])
    def test_every_draft_length(self, method: str, sampling: dict[str, Any], step: int) -> None:
        for seed in range(2):
            expected = plain(seed, seed=seed, max_tokens=36, **sampling)
            with runtime(table(seed), near(table(seed), seed + 50)) as pair:
                for draft_length in range(1 + seed % step, 17, step):
                    got = pair.generate(
                        PROMPT, method=method, draft_length=draft_length, seed=seed, max_tokens=36, **sampling
                    )
                    assert got.tokens == expected.tokens
                    assert got.text == expected.text
                    assert got.finish_reason == expected.finish_reason

    @STEPS
    @pytest.mark.parametrize("branches", TREES, ids=str)
    def test_every_tree(self, branches: tuple[int, ...], sampling: dict[str, Any], step: int) -> None:
        drafts = list(product(("model", "model+ngram"), (1, 2, 3, 6)))
        for seed in range(2):
            expected = plain(seed, seed=seed, max_tokens=36, **sampling)
            with runtime(table(seed), near(table(seed), seed + 50), branches=branches) as pair:
                for method, draft_length in drafts[seed % step :: step]:
                    got = pair.generate(
                        PROMPT, method=method, draft_length=draft_length, seed=seed, max_tokens=36, **sampling
                    )
                    assert got.tokens == expected.tokens

    def test_a_draft_equal_to_the_target_is_always_accepted(self, sampling: dict[str, Any]) -> None:
        forever = sampling | {"logit_bias": sampling.get("logit_bias", {}) | {END: -np.inf}}
        with runtime(table(4), table(4)) as pair:
            for draft_length in (1, 4, 7):
                reply = pair.generate(
                    PROMPT, method="model", draft_length=draft_length, seed=3, max_tokens=64, **forever
                )
                assert reply.stats.acceptance_rate == 1.0
                assert reply.stats.target_passes == -(-64 // (draft_length + 1))

    def test_a_target_without_tree_support(self, sampling: dict[str, Any]) -> None:
        expected = plain(2, seed=1, max_tokens=60, **sampling)
        with runtime(table(2, tree=False), near(table(2), 3), branches=(3, 2)) as pair:
            got = pair.generate(PROMPT, method="model+ngram", seed=1, max_tokens=60, **sampling)
        assert got.tokens == expected.tokens

    def test_a_target_without_rollback(self, sampling: dict[str, Any]) -> None:
        expected = plain(2, seed=1, max_tokens=60, **sampling)
        with runtime(table(2, rollback=False)) as alone:
            got = alone.generate(PROMPT, method="ngram", seed=1, max_tokens=60, **sampling)
        assert got.tokens == expected.tokens
        assert got.method.effective == "none"


def _garbage(tokens: list[int], draft_length: int) -> TokenTree:
    random = np.random.default_rng(len(tokens))
    width = int(random.integers(1, 12))
    parents = (-1, *(int(random.integers(0, node)) for node in range(1, width)))
    drafted = (tokens[-1], *(int(t) for t in random.integers(-3, VOCAB + 3, width - 1)))
    return TokenTree(drafted, parents, (None,) * width)


def _wrong_root(tokens: list[int], draft_length: int) -> TokenTree:
    return TokenTree.chain((tokens[-1] + 1) % VOCAB, [0, 1])


def _twins(tokens: list[int], draft_length: int) -> TokenTree:
    return TokenTree((tokens[-1], 2, 2, 2, 1, 1), (-1, 0, 0, 1, 2, 2), (None,) * 6)


HOSTILE: dict[str, Callable[[list[int], int], TokenTree | Sequence[int]]] = {
    "garbage": _garbage,
    "only ends": lambda tokens, length: [END] * length,
    "an end first": lambda tokens, length: [END, 0, 1],
    "outside the vocabulary": lambda tokens, length: [VOCAB] * length,
    "far outside the vocabulary": lambda tokens, length: [2**40, 1],
    "negative": lambda tokens, length: [-1, 0, -5],
    "empty": lambda tokens, length: [],
    "enormous": lambda tokens, length: [len(tokens) % VOCAB] * 10_000,
    "enormous fan": lambda tokens, length: TokenTree(
        (tokens[-1], *(i % VOCAB for i in range(3000))), (-1, *(0,) * 3000), (None,) * 3001
    ),
    "about another text": _wrong_root,
    "the same guess twice": _twins,
    "the past": lambda tokens, length: tokens[:length],
}


@pytest.mark.parametrize("say", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_hostile_drafter_changes_nothing(
    say: Callable[[list[int], int], TokenTree | Sequence[int]], sampling: dict[str, Any]
) -> None:
    for seed in range(2):
        expected = plain(seed, seed=seed, max_tokens=30, **sampling)
        with with_drafter(table(seed, context_tokens=300), Saying(say)) as hostile:
            got = hostile.generate(PROMPT, seed=seed, max_tokens=30, draft_length=5, **sampling)
        assert got.tokens == expected.tokens
        assert got.finish_reason == expected.finish_reason


@settings(max_examples=50)
@given(st.data())
def test_any_drafter_changes_nothing(data: st.DataObject) -> None:
    """Hypothesis chooses the drafts."""
    expected = plain(1, seed=5, max_tokens=12, temperature=0.9)

    def say(tokens: list[int], draft_length: int) -> TokenTree:
        width = data.draw(st.integers(1, 8))
        parents = (-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, width)))
        drafted = tuple(data.draw(st.integers(-1, VOCAB)) for _ in range(1, width))
        return TokenTree((tokens[-1], *drafted), parents, (None,) * width)

    with with_drafter(table(1), Saying(say)) as pair:
        got = pair.generate(PROMPT, seed=5, max_tokens=12, temperature=0.9, draft_length=4)
    assert got.tokens == expected.tokens


class TestEndsInsideADraft:
    """A correct draft may extend beyond the end of the reply, but the reply must end there."""

    @staticmethod
    def both(options: dict[str, Any], draft_length: int, **table_options: Any) -> tuple[Reply, Reply]:
        with runtime(table(3, **table_options)) as alone:
            expected = alone.generate(PROMPT, method="none", **options)
            endless = alone.generate(
                PROMPT,
                method="none",
                **options | {"max_tokens": 64, "stop": (), "logit_bias": {END: -np.inf}},
            )
            prompt = alone.vocabulary.tokenize(PROMPT, special=True, start=True)
        drafter = knowing([*prompt, *expected.tokens, *endless.tokens[len(expected.tokens) :]])
        with with_drafter(table(3, **table_options), drafter) as pair:
            got = pair.generate(PROMPT, draft_length=draft_length, **options)
            # The cache must contain the emitted tokens and nothing after them.
            again = pair.generate(PROMPT, draft_length=draft_length, **options)
        assert again.tokens == got.tokens
        assert again.stats.cached_prompt_tokens == len(prompt) - 1
        return expected, got

    @pytest.mark.parametrize("draft_length", range(1, 17))
    def test_end_token_inside_a_draft(self, draft_length: int) -> None:
        expected, got = self.both({"seed": 2, "temperature": 1.2}, draft_length)
        assert expected.finish_reason == "stop"
        assert expected.tokens[-1] == END
        assert 6 < len(expected.tokens) < 60
        assert (got.tokens, got.text, got.finish_reason) == (expected.tokens, expected.text, "stop")
        assert got.stats.accepted_tokens <= len(got.tokens)

    @pytest.mark.parametrize("draft_length", range(1, 17))
    @pytest.mark.parametrize("max_tokens", first([5, 1, 2, 6]))
    def test_max_tokens_inside_a_draft(self, draft_length: int, max_tokens: int) -> None:
        expected, got = self.both({"seed": 2, "max_tokens": max_tokens}, draft_length)
        assert len(got.tokens) == max_tokens
        assert (got.tokens, got.text, got.finish_reason) == (expected.tokens, expected.text, "length")

    @pytest.mark.parametrize("draft_length", [1, 3, 8, 16])
    def test_stop_string_inside_a_draft(self, draft_length: int) -> None:
        with runtime(table(3)) as alone:
            text = alone.generate(PROMPT, seed=2, max_tokens=40, temperature=1.2).text
        for length in (1, 2, 3):
            stop = text[4 : 4 + length]
            expected, got = self.both({"seed": 2, "temperature": 1.2, "stop": [stop]}, draft_length)
            assert (got.tokens, got.text, got.finish_reason) == (expected.tokens, expected.text, "stop")
            assert got.text == text[: text.index(stop)]

    @pytest.mark.parametrize("draft_length", range(1, 17))
    def test_end_of_the_context_inside_a_draft(self, draft_length: int) -> None:
        options = {"seed": 2, "logit_bias": {END: -np.inf}}
        expected, got = self.both(options, draft_length, context_tokens=16)
        assert (got.tokens, got.text, got.finish_reason) == (expected.tokens, expected.text, "length")
        assert len(got.tokens) == 16 - len(PROMPT) + 1

    @pytest.mark.parametrize("branches", TREES_AT_THE_END)
    def test_a_draft_model_at_the_end_of_its_context(self, branches: tuple[int, ...]) -> None:
        # Each number of branches is tested with every third size, so all sizes are tested.
        for context in range(6 + TREES_AT_THE_END.index(branches), 30, 3):
            options: dict[str, Any] = {"seed": 2, "logit_bias": {END: -np.inf}}
            with runtime(table(3, context_tokens=context)) as alone:
                expected = alone.generate(PROMPT, method="none", **options)
            target = table(3, context_tokens=context)
            for draft_context in (context, 6, context // 2 + 3):
                draft = near(table(3, context_tokens=draft_context), 1)
                with runtime(target, draft, branches=branches) as pair:
                    got = pair.generate(PROMPT, method="model+ngram", draft_length=4, **options)
                assert got.tokens == expected.tokens
                target = table(3, context_tokens=context)


class TestManyReplies:
    """Several replies of one runtime in any order share only the KV cache."""

    @settings(max_examples=30)
    @given(
        st.lists(
            st.tuples(
                st.text(alphabet="abcdefg", min_size=1, max_size=12),
                st.sampled_from(["none", "model", "ngram", "model+ngram"]),
                st.integers(1, 8),
                st.sampled_from([0.0, 1.0]),
                st.sampled_from(["invariant", "rejection"]),
                st.integers(1, 20),
            ),
            max_size=8,
        )
    )
    def test_any_sequence_of_requests(self, requests: list[tuple[str, str, int, float, str, int]]) -> None:
        # The drafts of a combination depend on what was accepted before, and sampled tokens on the drafts.
        requests = [
            request
            for request in requests
            if (request[1], request[3], request[4]) != ("model+ngram", 1.0, "rejection")
        ]

        def reply(pair: Runtime, request: tuple[str, str, int, float, str, int]) -> tuple[int, ...]:
            prompt, method, draft_length, temperature, acceptance, max_tokens = request
            return pair.generate(
                prompt,
                method=method,
                draft_length=draft_length,
                temperature=temperature,
                acceptance=acceptance,
                max_tokens=max_tokens,
                seed=7,
            ).tokens

        with runtime(table(5), near(table(5), 6)) as lasting:
            for request in requests:
                with runtime(table(5), near(table(5), 6)) as newborn:
                    assert reply(lasting, request) == reply(newborn, request)
