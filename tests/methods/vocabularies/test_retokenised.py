"""Drafting with retokenised text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec import Message
from edgespec.backends import llamacpp
from edgespec.engine.acceptance import Invariant
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import common_prefix_length
from edgespec.errors import CancelledError, CapabilityError
from edgespec.losslessness.cases import Prompt
from edgespec.losslessness.verify import verify
from edgespec.methods.model import retokenised
from edgespec.methods.model.retokenised import IncrementalRetokeniser, RetokenisedDrafter
from edgespec.methods.model.translation import TokenTranslation
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.tiny_models import WORDS, write_llama
from tests.methods.vocabularies.pieces import Pieces, speaking
from tests.raising import raises
from tests.tables import runtime, with_drafter
from tests.tabular import TabularModel

SMILE = "🙂".encode()
# The target has the single bytes of a character as tokens, and the draft model has the whole character. Words
# are split differently.
TARGET = Pieces(["a", "b", "c", "d", " ", "ab", " c", "abc", *(SMILE[i : i + 1] for i in range(4)), "<end>"])
DRAFT = Pieces(["d", "c", "b", "a", " ", "bc", " d", " ca", "🙂", "<user>", "<stop>"], control=2)
TRANSLATION = TokenTranslation(TARGET, DRAFT)


def text_of(tokens: list[int]) -> bytes:
    return b"".join(TARGET.piece(token) for token in tokens)


def drafter_of(model: LanguageModel, **options: Any) -> RetokenisedDrafter:
    return RetokenisedDrafter(model, TARGET, TRANSLATION, **options)


def propose(drafter: RetokenisedDrafter, tokens: list[int], draft_length: int) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=0.0), 0, tokens)
    tree = drafter.propose(sampler, Invariant(), draft_length)
    assert tree.is_chain
    assert tree.tokens[0] == tokens[-1]
    assert set(tree.draft_probs) == {None}
    return list(tree.tokens[1:])


class Talking(TabularModel):
    """A draft model that always continues with the given bytes."""

    def __init__(self, says: list[int]) -> None:
        size = DRAFT.size
        table = np.zeros((size, size), np.float32)
        super().__init__(table)
        self.vocabulary = DRAFT
        self._says = says
        self._begun_at = 0

    def verify(self, tree: Any, first: int = 0) -> Any:
        logits = super().verify(tree, first)
        rows = logits.rows.copy()
        for i in range(len(rows)):
            rows[i, self._says[(first + i) % len(self._says)]] = 9.0
        logits.rows = rows
        return logits


def _spells(parts: list[list[int]]) -> bool:
    """Return whether the text contains only characters that the draft model can write."""
    said = b"".join(TARGET.raw_piece(token) for part in parts for token in part)
    return all(character.isascii() or character == "🙂" for character in said.decode(errors="ignore"))


class TestInput:
    TEXTS = st.lists(st.lists(st.integers(0, TARGET.size - 1), max_size=40), max_size=12).filter(_spells)

    @pytest.mark.long
    @settings(max_examples=200)
    @given(TEXTS)
    def test_tokens_have_the_bytes_of_the_text(self, parts: list[list[int]]) -> None:
        """The draft model's tokens have the bytes of the text, without an incomplete last character."""
        reading = IncrementalRetokeniser(TARGET, TRANSLATION)
        tokens: list[int] = []
        for part in parts:
            reading.add(part)
            tokens += part
            said = b"".join(TARGET.raw_piece(token) for token in tokens)
            read = b"".join(DRAFT.raw_piece(token) for token in reading.tokens)
            whole, unread = said[: len(said) - len(reading.incomplete_bytes)], reading.incomplete_bytes
            assert said.endswith(unread)
            assert not unread or (len(unread) < 4 and unread[0] >= 0xC0)
            # Every token of the draft holds complete characters.
            if all(_is_text(part) for part in whole.split(b"<end>")):
                assert read == whole.replace(b"<end>", b"<stop>")

    @settings(max_examples=100)
    @given(st.lists(st.integers(0, 7), min_size=1, max_size=700), st.integers(1, 40))
    def test_incremental_tokens_equal_those_of_the_whole_text(self, tokens: list[int], step: int) -> None:
        reading = IncrementalRetokeniser(TARGET, TRANSLATION)
        for start in range(0, len(tokens), step):
            reading.add(tokens[start : start + step])
        whole = DRAFT.tokenize(text_of(tokens).decode(), special=False, start=False)
        assert reading.tokens == whole

    @pytest.mark.long
    @settings(max_examples=200)
    @given(TEXTS, st.integers(1, 3))
    def test_final_tokens_do_not_change(self, parts: list[list[int]], every: int) -> None:
        reading = IncrementalRetokeniser(TARGET, TRANSLATION)
        final: list[int] = []
        for number, part in enumerate(parts):
            reading.add(part)
            assert reading.tokens[: len(final)] == final
            if number % every == 0:
                final = reading.tokens[: reading.final_tokens]
                # Only the end of the text is open.
                assert len(reading.tokens) - len(final) <= 256

    def test_incomplete_characters_are_tokenized_when_complete(self) -> None:
        reading = IncrementalRetokeniser(TARGET, TRANSLATION)
        reading.add([0, 8, 9])
        assert (reading.tokens, reading.incomplete_bytes) == ([3], SMILE[:2])
        reading.add([10, 11])
        assert (reading.tokens, reading.incomplete_bytes) == ([3, 8], b"")


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


class TestDrafts:
    def test_drafts_use_the_targets_tokens(self) -> None:
        """The target has one token for "abc", but has already emitted "a"."""
        drafter = drafter_of(Talking([5, 4, 1]))
        drafter.begin([3, 4, 0])
        assert propose(drafter, [3, 4, 0], 3) == [1, 2, 6]

    def test_an_end_token_is_translated(self) -> None:
        drafter = drafter_of(Talking([3, 2, 10, 3]))
        drafter.begin([3, 4])
        assert propose(drafter, [3, 4], 6) == [5, 12]

    def test_other_control_tokens_are_not_drafted(self) -> None:
        drafter = drafter_of(Talking([3, 2, 9, 3]))
        drafter.begin([3, 4])
        assert propose(drafter, [3, 4], 6) == [5]

    def test_drafts_complete_an_incomplete_character(self) -> None:
        drafter = drafter_of(Talking([8, 3]))
        drafter.begin([0, 8, 9])
        assert propose(drafter, [0, 8, 9], 2) == [10, 11]
        wrong = drafter_of(Talking([3]))
        wrong.begin([0, 8, 9])
        assert propose(wrong, [0, 8, 9], 2) == []

    def test_a_token_below_min_confidence_is_the_last(self) -> None:
        drafter = drafter_of(Talking([4, 3, 4, 3]), min_confidence=0.9999)
        drafter.begin([3])
        assert propose(drafter, [3], 4) == [4]

    def test_no_draft_for_a_sequence_beyond_its_context(self) -> None:
        drafter = drafter_of(speaking(DRAFT, 3, context_tokens=10))
        tokens = [3, 3] * 20
        drafter.begin(tokens)
        assert propose(drafter, tokens, 4) == []
        drafter.begin([3, 3])
        assert propose(drafter, [3, 3], 4)

    def test_a_model_without_rollback_is_an_error(self) -> None:
        model = TabularModel(np.zeros((DRAFT.size, DRAFT.size), np.float32), rollback=False)
        model.vocabulary = DRAFT
        with raises(CapabilityError, code="rollback_not_supported"):
            drafter_of(model)


@pytest.mark.long
@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.booleans()), max_size=8),
)
def test_the_cache_follows_the_sequence_whatever_is_accepted(
    prompt: list[int], rounds: list[tuple[int, int, bool]]
) -> None:
    model, tokens = speaking(DRAFT, 3), list(prompt)
    drafter = drafter_of(model)
    drafter.begin(tokens)
    for draft_length, accepted, asked in rounds:
        emitted: list[int] = []
        if asked and draft_length:
            guesses = propose(drafter, tokens, draft_length)
            fresh = drafter_of(speaking(DRAFT, 3))
            fresh.begin(tokens)
            assert guesses == propose(fresh, tokens, draft_length)
            assert len(guesses) <= draft_length
            emitted = guesses[:accepted]
        emitted.append((sum(tokens) + accepted) % 8)
        drafter.commit(tuple(emitted))
        tokens += emitted
        assert model._tokens == drafter._cached


@pytest.mark.parametrize("length", [100, 3000])
def test_rounds_compare_only_recent_tokens(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [token % 8 for token in range(length)]
    drafter = drafter_of(speaking(DRAFT, 3, context_tokens=1 << 14))
    drafter.begin(tokens)
    compared: list[int] = []

    def counted(a: list[int], b: list[int]) -> int:
        compared.append(len(a))
        return common_prefix_length(a, b)

    monkeypatch.setattr(retokenised, "common_prefix_length", counted)
    for token in range(8):
        propose(drafter, tokens, 4)
        drafter.commit((token,))
        tokens.append(token)
    assert len(compared) == 16
    assert max(compared) <= 256 + 4


def test_prefill_stays_within_the_budget() -> None:
    model = speaking(DRAFT, 3, context_tokens=1 << 12)
    drafter = drafter_of(model)
    tokens = [0, 1, 2, 3, 4] * 60
    drafter.begin(tokens)
    assert model.length == 0
    assert drafter.pending_tokens == drafter.full_pending_tokens > 100
    drafter.prefill(40)
    assert 20 < model.length <= 40
    assert (drafter.pending_tokens, drafter.full_pending_tokens) == (0, len(tokens))
    said = propose(drafter, tokens, 3)
    drafter.commit((5, 6))
    tokens += [5, 6]
    assert drafter.pending_tokens == 0
    assert propose(drafter, tokens, 3)
    drafter.prefill(len(tokens))
    whole = drafter_of(speaking(DRAFT, 3, context_tokens=1 << 12))
    whole.begin(tokens)
    assert propose(drafter, tokens, 3) == propose(whole, tokens, 3)
    assert drafter.full_pending_tokens == whole.full_pending_tokens == 0
    whole.begin(tokens[:-2])
    assert propose(whole, tokens[:-2], 3) == said


def test_a_failed_prefill_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = speaking(DRAFT, 3), [0, 1, 2, 3] * 5
    drafter = drafter_of(model)
    drafter.begin(tokens)
    prefill = model.prefill

    def broken(some: Any, progress: Any = None) -> None:
        prefill(some[: len(some) // 2])
        raise CancelledError("cancelled")

    for more in ([4, 5, 6, 7] * 4, [7, 1, 12, 3] * 4):
        drafter.commit(tuple(more))
        tokens += more
        monkeypatch.setattr(model, "prefill", broken)
        with pytest.raises(CancelledError):
            propose(drafter, tokens, 3)
    monkeypatch.setattr(model, "prefill", prefill)
    fresh = drafter_of(speaking(DRAFT, 3))
    fresh.begin(tokens)
    assert propose(drafter, tokens, 3) == propose(fresh, tokens, 3)


class TestInARuntime:
    @pytest.mark.long
    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
    def test_replies_are_identical(self, temperature: float) -> None:
        drafter = drafter_of(speaking(DRAFT, 2))
        with with_drafter(speaking(TARGET, 1), drafter) as pair:
            options: dict[str, Any] = {"max_tokens": 80, "seed": 4, "temperature": temperature}
            for prompt in ("abcd", "ab ca dab", "d"):
                plain = pair.generate(prompt, method="none", **options)
                got = pair.generate(prompt, method="model", **options)
                assert got.tokens == plain.tokens
                assert got.stats.drafted_tokens > 0

    def test_rejection_mode_keeps_the_targets_distribution(self) -> None:
        with with_drafter(speaking(TARGET, 1), drafter_of(speaking(DRAFT, 2))) as pair:
            report = verify(
                pair,
                [Prompt(f"p{i}", (Message("user", text),)) for i, text in enumerate(("abcd", "d a"))],
                methods=("model",),
                temperatures=(1.0,),
                draft_lengths=(3,),
                max_tokens=12,
                seed=3,
                acceptance="rejection",
            )
        assert report.faults == 0
        assert (report.methods["model"].smallest_corrected_p_value or 0.0) > 0.001

    @pytest.mark.long
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_with_a_tokenizer_that_begins_with_a_space(self, tmp_path: Path, temperature: float) -> None:
        """A byte-level target with an unrelated SentencePiece draft."""
        from edgespec.store.catalogue import models_folder

        demo = models_folder() / "demo-target-q8_0.gguf"
        target = llamacpp.load(str(demo), "demo", LoadOptions(context_tokens=256))
        draft = llamacpp.load(
            str(write_llama(tmp_path / "draft.gguf", words=(*WORDS, "▁and", "▁in"))),
            "draft",
            LoadOptions(context_tokens=512),
        )
        translation = TokenTranslation(target.vocabulary, draft.vocabulary)
        drafter = RetokenisedDrafter(draft, target.vocabulary, translation)
        with with_drafter(target, drafter) as pair:
            options: dict[str, Any] = {"max_tokens": 40, "seed": 4, "temperature": temperature}
            plain = pair.generate("List the files é🙂 by size.", method="none", **options)
            got = pair.generate("List the files é🙂 by size.", method="model", **options)
            assert got.tokens == plain.tokens
            assert got.stats.drafted_tokens > 10
            read = b"".join(draft.vocabulary.raw_piece(token) for token in drafter._input.tokens)
            said = b"".join(target.vocabulary.piece(token) for token in drafter._tokens)
            assert read.endswith(said[-60:])

    @pytest.mark.long
    def test_a_draft_on_mlx(self, tmp_path: Path) -> None:
        """Use two byte-level vocabularies. With 270 tokens, most text is spelled out in bytes."""
        pytest.importorskip("mlx.core")
        from edgespec.backends import mlx
        from tests.backends.mlx.tiny_checkpoints import write_checkpoint

        path = write_llama(tmp_path / "target.gguf")
        target = llamacpp.load(str(path), "target", LoadOptions(context_tokens=256))
        checkpoint = write_checkpoint(tmp_path / "draft", "llama")
        draft = mlx.load(str(checkpoint), "draft", LoadOptions(context_tokens=512, is_draft=True))
        translation = TokenTranslation(target.vocabulary, draft.vocabulary)
        with with_drafter(target, RetokenisedDrafter(draft, target.vocabulary, translation)) as pair:
            options: dict[str, Any] = {"max_tokens": 40, "seed": 4, "temperature": 0.8}
            plain = pair.generate("the file list", method="none", **options)
            got = pair.generate("the file list", method="model", **options)
            assert got.tokens == plain.tokens
            assert got.stats.drafted_tokens > 0

    def test_a_draft_with_the_same_text_is_accepted(self) -> None:
        """The draft model is the same table with another vocabulary, so nearly every token is accepted."""
        target = speaking(TARGET, 1)
        twin = TabularModel(target._table)
        twin.vocabulary = TARGET
        drafter = RetokenisedDrafter(twin, TARGET, TokenTranslation(TARGET, TARGET))
        with with_drafter(target, drafter) as pair:
            options: dict[str, Any] = {"max_tokens": 80, "seed": 4, "temperature": 0.0}
            plain = pair.generate("abcd", method="none", **options)
            got = pair.generate("abcd", method="model", **options)
        assert got.tokens == plain.tokens
        assert (got.stats.acceptance_rate or 0.0) > 0.5


def test_it_replaces_the_draft_model_drafter() -> None:
    """A runtime uses it in place of the draft model's drafter."""
    from edgespec.api.runtime import Runtime
    from edgespec.decode.drafter_set import DrafterSet

    target, draft = speaking(TARGET, 1), speaking(DRAFT, 2)
    drafters = DrafterSet(target, {"model": drafter_of(draft)})
    with Runtime(target, draft, drafters) as pair:
        got = pair.generate("abcd", method="model", seed=1, max_tokens=20)
        assert got.method.effective == "model"
        assert got.stats.drafted_tokens > 0
    with runtime(speaking(TARGET, 1)) as plain:
        assert plain.generate("abcd", seed=1, max_tokens=20).tokens == got.tokens


def test_reset_clears_the_cache() -> None:
    says = DRAFT.tokenize("bc d", special=False, start=False)
    model = Talking(says)
    drafter = drafter_of(model)
    prompt = TARGET.tokenize("abc d", special=False, start=False)
    drafter.begin(prompt)
    said = propose(drafter, prompt, 3)
    drafter.reset()
    assert model.length == 0
    drafter.begin(prompt)
    assert propose(drafter, prompt, 3) == said
