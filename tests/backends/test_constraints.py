"""Every backend satisfies a constraint, with the same tokens for every kind of draft."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint
from edgespec.engine.acceptance import RandomDraws, Rejection
from edgespec.engine.processors import LogitsProcessor
from edgespec.methods.ngram.drafter import NgramDrafter
from edgespec.model.base import LanguageModel
from tests.backends.contract import tokens_for
from tests.backends.test_processors import decoded, draft_model, exact_model, half_right
from tests.cases import first

__all__ = ["exact_model"]

# Text that all test vocabularies can write. With the larger ones, it has more than `REPLY_TOKENS` tokens.
REGEX = "((a|b|cd){2}e?f){60}"


def constrained(model: LanguageModel) -> Callable[[Sequence[int]], LogitsProcessor]:
    compiler = ConstraintCompiler(model.vocabulary, model.facts.vocab_size)
    return lambda prompt: compiler.processor(Constraint("regex", REGEX), prompt)


def satisfies(model: LanguageModel, tokens: Sequence[int]) -> bool:
    """Return whether a text is the start of one that matches the regular expression."""
    text = b"".join(map(model.vocabulary.piece, tokens))
    return bool(re.fullmatch(b"((a|b|cd){2}e?f)*((a|b|cd)?(a|b|cd|c)?|(a|b|cd){2}e)", text))


@pytest.mark.long
@pytest.mark.parametrize("temperature", first([0.8, 0.0, 1.2]))
def test_replies_are_those_of_plain_decoding(exact_model: LanguageModel, temperature: float) -> None:
    model = exact_model
    prompt, processors = tokens_for(model, 20), constrained(model)
    expected, _ = decoded(model, prompt, temperature, processors=processors)
    assert satisfies(model, expected)
    unconstrained, _ = decoded(model, prompt, temperature, processors=None)
    assert not satisfies(model, unconstrained), "the constraint makes no difference here"

    whole = [*prompt, *expected]
    got, stats = decoded(model, prompt, temperature, half_right(whole), processors=processors)
    assert got == expected
    if model.facts.capabilities.rollback:
        assert 0 < stats.accepted_tokens < stats.drafted_tokens, "nothing was rolled back"
    for drafter in (draft_model(model, ()), draft_model(model, (3, 2)), NgramDrafter()):
        assert decoded(model, prompt, temperature, drafter, processors=processors)[0] == expected
        drafter.close()


@pytest.mark.parametrize("branches", [pytest.param((), marks=pytest.mark.long), (3, 2)])
def test_rejection_mode_satisfies_the_constraint(
    exact_model: LanguageModel, branches: tuple[int, ...]
) -> None:
    prompt, processors = tokens_for(exact_model, 20), constrained(exact_model)
    drafter = draft_model(exact_model, branches)
    for seed in range(3):
        rule = Rejection(RandomDraws(seed))
        got, _ = decoded(exact_model, prompt, 0.8, drafter, processors=processors, acceptance=rule)
        assert satisfies(exact_model, got)
    # The whole draft violates the constraint, as from a drafter that does not know the constraint.
    wrong = half_right([*prompt, *tokens_for(exact_model, 60, seed=1)])
    rule = Rejection(RandomDraws(0))
    got, _ = decoded(exact_model, prompt, 0.8, wrong, processors=processors, acceptance=rule)
    assert satisfies(exact_model, got)
