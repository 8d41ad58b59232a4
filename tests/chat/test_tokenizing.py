"""Tokenizing texts of any length: waits can be cancelled, and oversized texts are rejected."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import cast

import pytest

from edgespec.backends.llamacpp.loading import load_vocabulary
from edgespec.backends.llamacpp.metadata import LlamaVocabulary
from edgespec.backends.llamacpp.native import library
from edgespec.chat.prompt import build_single_prompt
from edgespec.chat.tokenizing import check_size, tokenize, tokenize_whole
from edgespec.errors import CancelledError, ContextFullError
from edgespec.model.base import Vocabulary
from tests.backends.tiny_models import write_llama
from tests.raising import raises
from tests.tabular import LetterVocabulary


class SlowVocabulary:
    """Takes as long as the test wants."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        assert self.go_on.wait(30)
        return [len(text)]


def test_a_long_text_can_be_cancelled_at_any_time() -> None:
    slow = SlowVocabulary()
    began = time.monotonic()
    with pytest.raises(CancelledError):
        tokenize(
            cast("Vocabulary", slow),
            "a" * 100_000,
            special=True,
            start=True,
            progress=lambda _what, _fraction: time.monotonic() - began < 0.2,
        )
    assert time.monotonic() - began < 15
    slow.go_on.set()


@pytest.mark.parametrize("length", [3, 100_000])
def test_the_tokens_are_those_of_the_vocabulary(length: int) -> None:
    slow = SlowVocabulary()
    slow.go_on.set()
    text = "a" * length
    assert tokenize(cast("Vocabulary", slow), text, special=True, start=True, progress=None) == [length]


def test_errors_of_the_vocabulary_are_raised() -> None:
    class Failing(SlowVocabulary):
        def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
            raise TimeoutError("the tokenizer failed")

    with pytest.raises(TimeoutError, match="the tokenizer failed"):
        tokenize(cast("Vocabulary", Failing()), "a" * 100_000, special=True, start=True, progress=None)


def test_what_cannot_fit_is_refused_by_its_size() -> None:
    vocabulary: Vocabulary = LetterVocabulary(26)
    check_size(vocabulary, ["a" * 60, "b" * 40], 100)
    with raises(ContextFullError, "101 B", "101", "100") as caught:
        check_size(vocabulary, ["a" * 60, "b" * 41], 100)
    assert "shorten it" in caught.value.next_step


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [("the file", 1), ("<s>the file", 1), ("<s><s>the file", 2), ("the <s> file", 2), ("", 1)],
)
def test_a_raw_prompt_gets_no_second_start_token(prompt: str, starts: int, tmp_path: Path) -> None:
    """Many clients render the template themselves, including the BOS token at its start."""
    weights = load_vocabulary(str(write_llama(tmp_path / "model.gguf")))
    vocabulary = LlamaVocabulary(weights)
    try:
        tokens = tokenize_whole(vocabulary, prompt)
        assert tokens.count(1) == starts
        assert tokens[0] == 1
        assert build_single_prompt(vocabulary, None, prompt, None, 512).tokens == tokens
    finally:
        library().llama_model_free(weights)
