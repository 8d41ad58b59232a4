"""Vocabulary comparison: shared tokens, the mapping that is used, and its explanation."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends import llamacpp
from edgespec.errors import VocabularyMismatchError
from edgespec.methods.model.translation import compare_vocabularies
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.tiny_models import WORDS, write_llama
from tests.methods.vocabularies.pieces import Pieces
from tests.raising import raises


def load(path: Path) -> LanguageModel:
    return llamacpp.load(str(path), path.stem, LoadOptions(context_tokens=64))


class TestModelFiles:
    def test_equal_except_padding(self, tmp_path: Path) -> None:
        mine = load(write_llama(tmp_path / "mine.gguf"))
        other = load(write_llama(tmp_path / "other.gguf", words=(*WORDS, "<pad0>", "<pad1>")))
        for target, draft in ((mine, other), (other, mine)):
            found = compare_vocabularies(target.vocabulary, draft.vocabulary, "mine", "other")
            assert (found.mapping, found.explanation, found.translation) == ("same", "", None)

    def test_one_different_token(self, tmp_path: Path) -> None:
        mine = load(write_llama(tmp_path / "mine.gguf"))
        words = tuple("▁folder" if word == "▁file" else word for word in WORDS)
        other = load(write_llama(tmp_path / "other.gguf", words=words))
        found = compare_vocabularies(mine.vocabulary, other.vocabulary, "mine", "other")
        assert found.mapping == "translated"
        assert found.shared_fraction == pytest.approx(266 / 267)
        assert found.explanation.endswith(
            "has 266 of the 267 tokens in mine's vocabulary, under different IDs, and can draft only those"
        )
        assert found.translation is not None
        said = [other.vocabulary.raw_piece(i) for i in found.translation.translate(261, first=False)]
        assert b"".join(said) == b" file"

    def test_several_ids_with_the_same_bytes(self, tmp_path: Path) -> None:
        """The id that the tokenizer produces is translated."""
        mine = load(write_llama(tmp_path / "mine.gguf"))
        other = load(write_llama(tmp_path / "other.gguf", words=("a", *WORDS)))
        found = compare_vocabularies(mine.vocabulary, other.vocabulary, "mine", "other").translation
        assert found is not None
        target = mine.vocabulary.tokenize("a", special=False, start=False)[-1]
        used = other.vocabulary.tokenize("a", special=False, start=False)[-1]
        assert other.vocabulary.raw_piece(used) == b"a"
        assert found.draft_id_of[target] == used

    def test_unrelated_vocabularies(self, tmp_path: Path, demo_target: Path) -> None:
        target = load(demo_target)
        draft = load(write_llama(tmp_path / "stranger.gguf"))
        found = compare_vocabularies(target.vocabulary, draft.vocabulary, "demo", "stranger")
        assert found.mapping == "retokenised"
        assert 0.0 < found.shared_fraction < 0.1
        assert "fewer of its tokens will be accepted" in found.explanation
        assert found.translation is not None
        ends = [token for token in range(target.facts.vocab_size) if target.vocabulary.is_end(token)]
        for end in ends:
            (its,) = found.translation.translate(end, first=False)
            assert draft.vocabulary.is_end(its)


class TestPieces:
    def test_fewer_than_half_are_shared(self) -> None:
        found = compare_vocabularies(Pieces([*"abcdef", "!"]), Pieces([*"bcxyzw", "!"]), "one", "two")
        assert found.mapping == "retokenised"
        assert found.shared_fraction == pytest.approx(3 / 7)

    def test_more_than_half_are_shared(self) -> None:
        found = compare_vocabularies(Pieces([*"abcdef", "!"]), Pieces([*"bcdezw", "!"]), "one", "two")
        assert found.mapping == "translated"
        assert found.explanation == (
            "two has 5 of the 7 tokens in one's vocabulary, under different IDs, and can draft only those."
            " Fewer of its tokens will be accepted than with a draft model from the same family"
        )

    def test_no_common_token_is_an_error(self) -> None:
        class Endless(Pieces):
            def is_end(self, token: int) -> bool:
                return False

        with raises(VocabularyMismatchError, "token 0"):
            compare_vocabularies(Endless("abcd"), Endless("xyzw"), "one", "two")
