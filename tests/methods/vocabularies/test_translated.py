"""A draft model with another vocabulary under the target's ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends import llamacpp
from edgespec.engine.logits import HostLogits
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CancelledError, CapabilityError, ClosedError
from edgespec.losslessness.verify import verify
from edgespec.methods.model.translated import TranslatedLogits, TranslatedModel
from edgespec.methods.model.translation import TokenTranslation
from edgespec.methods.model.windowed import AttentionWindow, WindowedModel
from edgespec.model.base import LoadOptions, Snapshot
from tests.backends.tiny_models import WORDS, write_llama
from tests.losslessness.test_verify import PROMPTS
from tests.methods.vocabularies.pieces import Pieces, conditioned, speaking
from tests.raising import raises
from tests.tables import runtime
from tests.tabular import TabularModel

# The draft model has the target's tokens in a different order, without two of them, and some additional ones.
TARGET = Pieces(["a", "b", "c", "d", "e", "f", "ab", "cde", "<end>"])
DRAFT = Pieces(["f", "e", "d", "c", "b", "a", "ab", "fe", "<stop>"])
SPELT = [(5,), (4,), (3,), (2,), (1,), (0,), (6,), (3, 2, 1), (8,)]
TRANSLATION = TokenTranslation(TARGET, DRAFT)


def translated(draft: Any) -> TranslatedModel:
    return TranslatedModel(draft, TARGET, TRANSLATION)


def spelt(tokens: list[int]) -> list[int]:
    return [its for token in tokens for its in SPELT[token]]


def test_shared_tokens_are_translated() -> None:
    assert TRANSLATION.target_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert TRANSLATION.draft_ids.tolist() == [5, 4, 3, 2, 1, 0, 6, 8]
    assert [TRANSLATION.translate(token, first=False) for token in range(TARGET.size)] == SPELT


def test_the_drafts_start_tokens_come_first() -> None:
    target = Pieces(["a", "b", "<s>", "</s>"], control=2)
    draft = Pieces(["b", "a", "<bos>", "<eos>"], control=2).starting()
    translation = TokenTranslation(target, draft)
    assert translation.translate(0, first=True) == (2, 1)
    assert translation.translate(0, first=False) == (1,)
    target = Pieces(["a", "b", "<s>", "</s>"], control=2).starting()
    translation = TokenTranslation(target, draft)
    assert translation.translate(2, first=True) == (2,)
    assert translation.translate(3, first=False) == (3,)


def test_control_tokens_do_not_match_text() -> None:
    target = Pieces(["<", "s", ">", "<s>", "<end>"])
    draft = Pieces(["<", "s", ">", "<s>", "<end>"], control=2)
    translation = TokenTranslation(target, draft)
    assert translation.translate(3, first=False) == (0, 1, 2)
    assert translation.target_ids.tolist() == [0, 1, 2, 4]


def test_bytes_without_a_token_become_token_0() -> None:
    translation = TokenTranslation(
        Pieces(["a", b"\xf0\x9f", "é", "<end>"]), Pieces(["a", b"\xc3", b"\xa9", "."])
    )
    assert translation.translate(1, first=False) == (0,)
    assert translation.translate(2, first=False) == (1, 2)


TOKENS = st.lists(st.integers(0, TARGET.size - 1), max_size=12)
TREES = {
    "chain": (-1, 0, 1, 2),
    "fork": (-1, 0, 0),
    "binary": (-1, 0, 0, 1, 1, 2, 2),
    "lag": (-1, 0, 1, 1, 2),
}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), TOKENS),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("forget"), st.tuples(st.integers(0, 20), st.integers(0, 20))),
        st.tuples(st.just("snapshot"), st.integers(0, 40)),
        st.tuples(st.just("interrupt"), TOKENS),
        st.tuples(
            st.just("round"),
            st.tuples(st.sampled_from(sorted(TREES)), TOKENS, st.integers(0, 6), st.integers(1, 6)),
        ),
    ),
    max_size=10,
)


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@settings(max_examples=200)
@given(STEPS)
def test_the_inner_cache_holds_the_translated_sequence(steps: list[Any]) -> None:
    inner = speaking(DRAFT, 3)
    model = translated(inner)
    text: list[int] = []
    for what, how in steps:
        if what == "prefill":
            model.prefill(how)
            text += how
        elif what == "truncate":
            model.truncate(how)
            text = text[:how]
        elif what == "forget":
            with pytest.raises(CapabilityError):
                model.remove_range(min(how), max(how))
        elif what == "snapshot":
            saved = model.snapshot()
            model.truncate(how)
            model.restore(saved)
        elif what == "interrupt":
            model.interrupt(True)
            if spelt(how):
                with pytest.raises(CancelledError):
                    model.prefill(how)
            model.interrupt(False)
        else:
            shape, tokens, kept, split = how
            parents = TREES[shape]
            tokens = [(tokens + [1] * len(parents))[i] for i in range(len(parents))]
            tree = TokenTree(tuple(tokens), parents, (None,) * len(parents))
            first = min(split, tree.width - 1)
            begun = TokenTree(tree.tokens[:first], parents[:first], (None,) * first)
            rows = [(model.verify(begun), i, i) for i in range(first)] if first else []
            more = model.verify(tree, first)
            rows = [*rows, *((more, i, first + i) for i in range(tree.width - first))]
            for logits, row, node in rows[first:]:
                read = [0, *spelt(text + [tokens[i] for i in path_to(parents, node)])]
                place = read[-2] * DRAFT.size + read[-1]
                expected = inner._table[place][TRANSLATION.draft_ids]
                np.testing.assert_array_equal(logits.at(row, TRANSLATION.target_ids), expected)
            node = min(kept, tree.width - 1)
            path = path_to(parents, node)
            model.commit(tuple(path[1:]))
            text += [tokens[i] for i in path]
        assert model.length == len(text)
        assert inner._tokens == spelt(text)[: inner.length]
        assert inner.length in (len(spelt(text)), 0)


def test_a_spelling_beyond_the_inner_context_leaves_no_room() -> None:
    model = translated(speaking(DRAFT, 3, context_tokens=60))
    model.prefill([7] * 25)
    assert (model.length, model.free_tokens) == (25, 0)
    model.truncate(5)
    model.verify(TokenTree.chain(0))
    model.commit(())
    assert model.length == 6


class TestLogits:
    ROWS = np.array([[5.0, 1.0, 2.0, 7.0, 3.0, 4.0, 0.0, 9.0, -1.0]], np.float32)

    def logits(self) -> TranslatedLogits:
        return TranslatedLogits(HostLogits(self.ROWS), [0], TRANSLATION, TARGET.size)

    def test_only_shared_tokens_have_logits(self) -> None:
        tokens, values = self.logits().top(0, 0)
        assert tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
        assert values.tolist() == [4.0, 3.0, 7.0, 2.0, 1.0, 5.0, 0.0, -1.0]
        assert self.logits().at(0, np.array([2, 7])).tolist() == [7.0, -np.inf]

    def test_margins_are_from_the_largest_shared_logit(self) -> None:
        tokens, values = self.logits().above(0, 3.0)
        assert (tokens.tolist(), values.tolist()) == ([0, 2, 5], [4.0, 7.0, 5.0])

    def test_limit_vocab(self) -> None:
        limited = self.logits().limit_vocab(2)
        assert limited.vocab_size == 2
        assert limited.top(0, 1)[0].tolist() == [0, 1]
        assert limited.above(0, 0.5)[0].tolist() == [0]

    @settings(max_examples=60)
    @given(
        st.integers(0, 2**32),
        st.integers(1, 60),
        st.sampled_from([0.0, 0.7, 1.2]),
        st.sampled_from([(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)]),
    )
    def test_rows_behave_like_rows_of_the_target(
        self, seed: int, count: int, temperature: float, filters: tuple[int, float, float]
    ) -> None:
        random = np.random.default_rng(seed)
        words = [f"w{i}" for i in range(300)]
        order = random.permutation(300)
        kept = order[: random.integers(1, 300)]
        target = Pieces([*words, "<end>"])
        draft = Pieces([*(words[i] for i in kept), *(f"x{i}" for i in range(200)), "<end>"])
        translation = TokenTranslation(target, draft)
        row = random.normal(size=(1, draft.size)).astype(np.float32) * 3
        own = np.full((1, target.size), -np.inf, np.float32)
        own[0, translation.target_ids] = row[0, translation.draft_ids]
        top_k, top_p, min_p = filters
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        got, expected = (
            Sampler(params, seed, [1, 2]).ranked(logits, 0, min(count, len(kept)))
            for logits in (TranslatedLogits(HostLogits(row), [0], translation, 301), HostLogits(own))
        )
        known = {token for token in expected if np.isfinite(own[0, token])}
        assert got == [token for token in expected if token in known]


class TestInARuntime:
    @pytest.mark.long
    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
    @pytest.mark.parametrize("branches", [(), (2, 2)])
    def test_replies_are_identical(self, temperature: float, branches: tuple[int, ...]) -> None:
        target = speaking(TARGET, 1)
        target._table[:, 7] -= 2.0  # the draft lacks this token
        draft = translated(conditioned(target, DRAFT, spell=SPELT))
        options: dict[str, Any] = {"max_tokens": 80, "seed": 4, "temperature": temperature}
        with runtime(target, draft, branches=branches) as pair:
            passes = 0
            for prompt in ("abcdef", "cdecde", "f"):
                plain = pair.generate(prompt, method="none", **options)
                got = pair.generate(prompt, method="model", **options)
                assert got.tokens == plain.tokens
                passes += got.stats.target_passes
            assert passes < 3 * 80 / 2

    def test_rejection_mode_keeps_the_targets_distribution(self) -> None:
        target = speaking(TARGET, 1)
        with runtime(target, translated(conditioned(target, DRAFT, spell=SPELT))) as pair:
            report = verify(
                pair,
                PROMPTS[:2],
                methods=("model",),
                temperatures=(1.0,),
                draft_lengths=(3,),
                max_tokens=12,
                seed=3,
                acceptance="rejection",
            )
        assert report.faults == 0
        assert (report.methods["model"].smallest_corrected_p_value or 0.0) > 0.001

    def test_over_a_window(self) -> None:
        target = speaking(TARGET, 1)
        inner = conditioned(target, DRAFT, spell=SPELT)
        small = TabularModel(inner._table, context_tokens=64)
        small.vocabulary = DRAFT
        draft = translated(WindowedModel(small, AttentionWindow(2, 16), 1 << 30))
        with runtime(target, draft) as pair:
            options: dict[str, Any] = {"max_tokens": 150, "seed": 4, "temperature": 0.8}
            plain = pair.generate("abcdef" * 10, method="none", **options)
            got = pair.generate("abcdef" * 10, method="model", **options)
            assert got.tokens == plain.tokens
            assert (got.stats.acceptance_rate or 0.0) > 0.35

    @pytest.mark.long
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_on_llama_cpp(self, tmp_path: Path, temperature: float) -> None:
        """Use two files. One has its tokens in another order, and some other tokens."""
        words = ("▁folder", *WORDS[::-1], "▁size")
        target = llamacpp.load(
            str(write_llama(tmp_path / "target.gguf")), "target", LoadOptions(context_tokens=256)
        )
        inner = llamacpp.load(
            str(write_llama(tmp_path / "draft.gguf", words=words)), "draft", LoadOptions(context_tokens=256)
        )
        translation = TokenTranslation(target.vocabulary, inner.vocabulary)
        # Bytes that are also words have two ids, and the tokenizer uses only one of them.
        twice = [3 + ord(" "), 3 + ord("s")]
        assert translation.target_ids.tolist() == [
            i for i in range(target.facts.vocab_size) if i not in twice
        ]
        with runtime(target, TranslatedModel(inner, target.vocabulary, translation)) as pair:
            options: dict[str, Any] = {"max_tokens": 60, "seed": 4, "temperature": temperature}
            plain = pair.generate("the file list", method="none", **options)
            got = pair.generate("the file list", method="model", **options)
            assert got.tokens == plain.tokens
            assert got.stats.drafted_tokens > 20


class TestErrors:
    def test_invalid_snapshot(self) -> None:
        model = translated(speaking(DRAFT, 3))
        for snapshot in (Snapshot(1, b"nothing"), Snapshot(2, b"[1]")):
            with raises(BackendError, code="state_not_restored"):
                model.restore(snapshot)

    def test_calls_that_the_inner_model_does_not_support(self) -> None:
        inner = speaking(DRAFT, 3)
        chains = TabularModel(inner._table, tree=False)
        chains.vocabulary = DRAFT
        model = translated(chains)
        assert not model.facts.capabilities.tree
        with pytest.raises(CapabilityError):
            model.verify(TokenTree((0, 1, 2), (-1, 0, 0), (None,) * 3))
        assert model.length == 0

    def test_calls_after_close(self) -> None:
        model = translated(speaking(DRAFT, 3))
        model.close()
        with pytest.raises(ClosedError):
            model.prefill([1])
        with pytest.raises(ClosedError):
            model.verify(TokenTree.chain(1))
