"""The files created by scripts/real_models load, and the derived ones are the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec.chat.message import Message

pytestmark = pytest.mark.real

QUESTION = "What is the opposite of hot?"
TEXT = "naïve café, 12345, 日本語, 🙂\n\tdef f(x): return x  # two  spaces"


def greedy_reply(path: Path) -> str:
    with edgespec.load(str(path), draft="none", method="none", context=512, exactness="off") as runtime:
        assert runtime.target.vocab_size == 49_152
        return runtime.generate(QUESTION, temperature=0.0, max_tokens=24).text


@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "q4_0", "q4_k_m", "f16"])
def test_each_quantisation_answers(real_models: Path, kind: str) -> None:
    assert "cold" in greedy_reply(real_models / f"smollm2-{kind}.gguf").lower()


@pytest.mark.parametrize("folder", ["smollm2-hf", "smollm2-mlx-8bit", "smollm2-mlx-4bit"])
def test_each_folder_answers_with_mlx(real_models: Path, folder: str) -> None:
    assert "cold" in greedy_reply(real_models / folder).lower()


def test_the_converted_tokenizer_and_template_are_the_same(real_models: Path) -> None:
    results = []
    for name in ("smollm2-q4_1.gguf", "smollm2-hf"):
        with edgespec.load(
            str(real_models / name), draft="none", method="none", context=512, exactness="off"
        ) as runtime:
            assert runtime.template is not None
            prompt = runtime.template.render([Message("user", TEXT)])
            tokens = [runtime.vocabulary.tokenize(TEXT, special=False, start=False)]
            tokens.append(runtime.vocabulary.tokenize(prompt, special=True, start=False))
            results.append((prompt, tokens))
    assert results[0] == results[1]


def test_gemma_is_a_base_model_with_a_large_vocabulary(real_models: Path) -> None:
    path = str(real_models / "gemma3-270m-q4_k_m.gguf")
    with edgespec.load(path, draft="none", method="none", context=512, exactness="off") as runtime:
        assert runtime.template is None
        assert runtime.target.vocab_size == 262_144
        reply = runtime.generate("1, 2, 3, 4, 5, 6, 7,", raw=True, temperature=0.0, max_tokens=8)
    assert reply.text.startswith(" 8, 9")


def test_with_padding_the_reply_stays_the_same(real_models: Path) -> None:
    padded = real_models / "padded" / "smollm2-f16.gguf"
    if not padded.exists():
        pytest.skip("made only by scripts/real_models --padded")
    assert greedy_reply(padded) == greedy_reply(real_models / "smollm2-f16.gguf")
