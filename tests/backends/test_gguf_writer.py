"""A GGUF model writes many texts at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.backends.llamacpp import load
from edgespec.backends.llamacpp.writer import LlamaWriter, open_writer
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.model.base import LoadOptions
from edgespec.store.catalogue import models_folder

DEMO = models_folder() / "demo-target-q8_0.gguf"
QUESTION = "<|im_start|>user\nHow do I list files by size?<|im_end|>\n<|im_start|>assistant\n"


def always(_description: str, _fraction: float) -> bool:
    return True


@pytest.fixture(scope="module")
def writer() -> Iterator[LlamaWriter]:
    with open_writer(str(DEMO), "demo", None) as opened:
        yield opened


def prompts_of(writer: LlamaWriter, count: int) -> list[list[int]]:
    question = writer.vocabulary.tokenize(QUESTION, special=True, start=True)
    return [question] * count


def test_texts_are_repeatable_and_random(writer: LlamaWriter) -> None:
    # More texts than are written at once.
    prompts, temperatures = prompts_of(writer, 40), [0.0, 0.8, 1.0, 1.0] * 10
    texts = writer.write(prompts, temperatures, 12, 7, always)
    assert texts == writer.write(prompts, temperatures, 12, 7, always)
    assert texts[1::4] != writer.write(prompts, temperatures, 12, 8, always)[1::4]
    for text in texts:
        assert len(text) == 12 or writer.vocabulary.is_end(text[-1])
        assert not any(map(writer.vocabulary.is_end, text[:-1]))
    assert len({tuple(text) for text in texts[::4]}) < 5
    assert len({tuple(text) for text in texts[2::4]}) > 5


def test_greedy_text_is_that_of_the_model(writer: LlamaWriter) -> None:
    (prompt,) = prompts_of(writer, 1)
    (text,) = writer.write([prompt], [0.0], 8, 0, always)
    target = load(str(DEMO), "demo", LoadOptions(context_tokens=256))
    try:
        target.prefill(prompt[:-1])
        expected: list[int] = []
        last = prompt[-1]
        while len(expected) < len(text):
            ((last,), _) = target.verify(TokenTree.chain(last, [])).best(0, 1)
            target.commit(())
            expected.append(last)
    finally:
        target.close()
    assert text == expected


def test_texts_wait_for_free_cells(writer: LlamaWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are longer than a batch are run in several passes."""
    (question,) = prompts_of(writer, 1)
    long = question * (600 // len(question))
    monkeypatch.setattr("edgespec.backends.llamacpp.writer._CELLS", 1_300)
    texts = writer.write([long, question, long, long, question], [0.0] * 5, 6, 0, always)
    # Passes with other texts round differently, so only the lengths are known.
    assert [len(text) for text in texts] == [6] * 5


def test_writing_is_cancelled(writer: LlamaWriter) -> None:
    fractions: list[float] = []

    def progress(_description: str, fraction: float) -> bool:
        fractions.append(fraction)
        return len(fractions) < 3

    prompts = prompts_of(writer, 3)
    with pytest.raises(CancelledError):
        writer.write(prompts, [0.0] * 3, 20, 0, progress)
    # The cancelled texts leave nothing behind.
    assert len(writer.write(prompts, [0.0] * 3, 4, 0, always)) == 3


def test_memory_is_stated(writer: LlamaWriter) -> None:
    assert writer.memory_bytes > 0.9 * Path(DEMO).stat().st_size
    assert writer.context_tokens > 0
