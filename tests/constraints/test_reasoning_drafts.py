"""Drafts that cross the end of the reasoning, after which the constraint applies."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.chat.reasoning import piece_with_markers, split_reasoning
from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint
from edgespec.engine.acceptance import RandomDraws, Rejection
from edgespec.engine.processors import LogitsProcessor
from edgespec.methods.ngram.drafter import NgramDrafter
from tests.backends.test_processors import REPLY_TOKENS, decoded, draft_model, half_right
from tests.constraints.vocabularies import ByteVocabulary
from tests.tabular import TabularModel

VOCABULARY = ByteVocabulary((b"\n\n",), (b"<think>", b"</think>"), "a template with <think>")
OPEN, CLOSE = VOCABULARY.size - 2, VOCABULARY.size - 1
PROMPT = VOCABULARY.tokenize("Why? Why?", special=False, start=False)
LETTERS = slice(ord("a") + 1, ord("z") + 2)


def reasoning_model(seed: int) -> TabularModel:
    """Return a model that writes `<think>`, then about six letters, and then `</think>`."""
    logits = np.random.default_rng(seed).normal(size=(VOCABULARY.size, VOCABULARY.size)).astype(np.float32)
    logits[:, LETTERS] += 6
    logits[PROMPT[-1], OPEN] += 30
    logits[LETTERS, CLOSE] += 9
    return TabularModel(logits)


def answer_of(tokens: list[int]) -> tuple[str, str]:
    """Return the reasoning and the answer of a reply, up to its end."""
    end = tokens.index(0) if 0 in tokens else len(tokens)
    data = b"".join(piece_with_markers(VOCABULARY, token) for token in tokens[:end])
    return split_reasoning(data.decode())


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
def test_the_answer_satisfies_the_constraint(temperature: float) -> None:
    compiler = ConstraintCompiler(VOCABULARY, VOCABULARY.size)
    reasoned = answered = 0
    for seed in range(6):
        model = reasoning_model(seed)

        def processors(prompt: Sequence[int]) -> LogitsProcessor:
            return compiler.processor(Constraint("regex", "[0-9]{3}[xyz]+"), PROMPT)

        plain, _ = decoded(model, PROMPT, temperature, processors=processors)
        reasoning, answer = answer_of(plain)
        reasoned += bool(reasoning)
        answered += bool(answer)
        assert re.fullmatch("[0-9]{3}[xyz]+|[0-9]{0,3}", answer), answer
        for drafter in (
            half_right([*PROMPT, *plain]),
            draft_model(model, ()),
            draft_model(model, (3, 2)),
            NgramDrafter(),
        ):
            got, _ = decoded(model, PROMPT, temperature, drafter, processors=processors)
            assert got == plain
            rule = Rejection(RandomDraws(seed))
            got, _ = decoded(
                model,
                PROMPT,
                temperature,
                drafter,
                processors=processors,
                acceptance=rule,
            )
            assert len(got) >= REPLY_TOKENS
            assert re.fullmatch("[0-9]{3}[xyz]+|[0-9]{0,3}", answer_of(got)[1])
    assert reasoned == 6
    if temperature:
        assert answered, "no draft crossed the end of the reasoning"
