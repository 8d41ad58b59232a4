"""What only a real model can show: a default system message, ends of turns, and many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec import Runtime
from edgespec.api.loading import always_draft
from edgespec.chat.message import Message

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)


@pytest.fixture(scope="module")
def runtime(smollm2: Path) -> Iterator[Runtime]:
    # Skip the bit-exactness trials, which take most of the loading time.
    options = {"context": 512, "exactness": "off", "measure_costs": False, "threads": 1}
    with always_draft(), edgespec.load(str(smollm2), draft="none", **options) as runtime:  # type: ignore[arg-type]
        yield runtime


def test_its_prompt_is_chatml_with_a_default_system_message(runtime: Runtime) -> None:
    assert runtime.template is not None
    text = runtime.template.render([Message("user", "Hello")])
    assert text == f"{SYSTEM}<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    system = runtime.template.render([Message("system", "Be brief."), Message("user", "Hello")])
    assert system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_its_prompt_begins_with_one_control_token(runtime: Runtime) -> None:
    """`bos_token_id` is <|im_start|>, but the file says not to add a start token."""
    tokens = runtime.vocabulary.tokenize(
        f"{SYSTEM}<|im_start|>user\nHello<|im_end|>\n", special=True, start=True
    )
    assert tokens[0] == 1
    assert tokens.count(1) == tokens.count(2) == 2


@pytest.mark.long
@pytest.mark.parametrize("method", ["none", "suffix"])
def test_a_reply_ends_at_the_end_of_its_turn(runtime: Runtime, method: str) -> None:
    # The second answer repeats the first one, so its end is certain, and `suffix` drafts it.
    turn = "<|im_start|>user\nWhat is the opposite of hot?<|im_end|>\n<|im_start|>assistant\n"
    prompt = f"{SYSTEM}{turn}The opposite of hot is cold.<|im_end|>\n" * 2 + turn
    reply = runtime.generate(prompt, raw=True, method=method, temperature=0.0, max_tokens=32)
    assert reply.text == "The opposite of hot is cold."
    assert (reply.finish_reason, reply.tokens[-1]) == ("stop", 2)
    assert runtime.vocabulary.is_end(2)
    if method == "suffix":
        assert reply.stats.accepted_tokens > 0


def test_its_vocabulary_has_49152_tokens(runtime: Runtime) -> None:
    assert runtime.target.vocab_size == 49_152
    text = "naïve café, 12345, 日本語, 🙂\n\tdef f(x): return x"
    tokens = runtime.vocabulary.tokenize(text, special=False, start=False)
    assert b"".join(map(runtime.vocabulary.piece, tokens)).decode() == text
    # Numbers are split into digits.
    assert len(runtime.vocabulary.tokenize("12345", special=False, start=False)) == 5


def test_control_tokens_in_a_message_are_plain_text(runtime: Runtime) -> None:
    tokens = runtime.vocabulary.tokenize("<|im_end|>", special=False, start=False)
    assert len(tokens) > 1


def test_sampling_from_the_whole_vocabulary_gives_the_same_tokens_with_drafts(runtime: Runtime) -> None:
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3, "max_tokens": 24}
    plain, drafted = (
        runtime.generate("Count from one to ten.", method=method, **settings)  # type: ignore[arg-type]
        for method in ("none", "suffix")
    )
    assert plain.tokens == drafted.tokens
