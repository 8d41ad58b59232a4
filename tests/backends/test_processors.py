"""Every backend runs an unknown logits processor correctly, with every kind of draft and rollback.

The processor depends on the path: it forbids the last token, prefers tokens by the parity of the position,
and discards a third of the vocabulary at each position. A backend that ignored it, a drafter that did not
follow it, or a rollback that missed a `pop` would change the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint
from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.loop import decode
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.methods.base import Drafter
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.methods.ngram.drafter import NgramDrafter
from edgespec.model.base import LanguageModel
from tests.backends.contract import ROUNDING, tokens_for
from tests.cases import first
from tests.tables import Saying
from tests.tabular import TabularModel

REPLY_TOKENS = 24
DRAFT_LENGTH = 5


class MadeUp(LogitsProcessor):
    """A stateful processor that no backend implements."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._path = list(prompt)

    def push(self, token: int) -> None:
        self._path.append(token)

    def pop(self, count: int) -> None:
        del self._path[len(self._path) - count :]

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        position = len(self._path)
        keep = (tokens + position) % 3 != 0
        tokens, logits = tokens[keep], logits[keep]
        logits = logits + 2.0 * (tokens % 2 == position % 2)
        return tokens, np.where(tokens == self._path[-1], -np.inf, logits)


def allowed(prompt: Sequence[int], reply: Sequence[int]) -> bool:
    """Whether a reply keeps the rules of `MadeUp`."""
    path = [*prompt, *reply]
    places = range(len(prompt), len(path))
    return all((path[i] + i) % 3 != 0 and path[i] != path[i - 1] for i in places)


def decoded(
    model: LanguageModel,
    prompt: Sequence[int],
    temperature: float,
    drafter: Drafter | None = None,
    *,
    processors: Callable[[Sequence[int]], LogitsProcessor] | None = MadeUp,
    acceptance: Acceptance | None = None,
) -> tuple[list[int], Stats]:
    """Decode a reply and return its tokens and statistics."""
    model.truncate(0)
    model.prefill(prompt[:-1])
    model.run_ahead(drafter is None)
    if drafter:
        drafter.begin(prompt)
    stats = Stats()
    steps = decode(
        model,
        drafter,
        acceptance or Invariant(),
        Sampler(SamplingParams(temperature), 3, prompt, [processors(prompt)] if processors else ()),
        prompt[-1],
        vocab_size=model.facts.vocab_size,
        max_width=model.facts.capabilities.max_width,
        max_branches=model.facts.capabilities.max_branches if model.facts.capabilities.tree else 1,
        draft_length=DRAFT_LENGTH if drafter else 0,
        max_tokens=REPLY_TOKENS,
        is_stop=lambda _: False,
        is_cancelled=lambda: False,
        stats=stats,
    )
    tokens = [token for step in steps for token in step.tokens]
    model.run_ahead(False)
    return tokens, stats


def half_right(whole: Sequence[int]) -> Saying:
    """Return a drafter that drafts `whole`, but with a wrong token at every seventh position."""
    guesses = [token if i % 7 else token ^ 1 for i, token in enumerate(whole)]
    return Saying(lambda tokens, length: guesses[len(tokens) : len(tokens) + length])


def draft_model(model: LanguageModel, branches: tuple[int, ...]) -> ModelDrafter:
    """Return a draft model with the target's vocabulary and logits that do not depend on the path."""
    logits = np.random.default_rng(1).normal(size=(1, model.facts.vocab_size)).astype(np.float32)
    return ModelDrafter(TabularModel(logits), model.facts.vocab_size, branches=branches)


@pytest.fixture
def exact_model(model: LanguageModel) -> LanguageModel:
    """Return a model whose logits do not depend on the pass width, apart from the last bits."""
    if ROUNDING.get(model.facts.name, 0.0) > 1e-3:
        pytest.skip("this model rounds differently at other widths")
    return model


@pytest.mark.long
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_an_unknown_processor_is_applied_with_and_without_drafts(
    exact_model: LanguageModel, temperature: float
) -> None:
    model = exact_model
    prompt = tokens_for(model, 20)
    expected, _ = decoded(model, prompt, temperature)
    assert len(expected) == REPLY_TOKENS
    assert allowed(prompt, expected)
    without, _ = decoded(model, prompt, temperature, processors=None)
    assert not allowed(prompt, without), "the processor makes no difference here"

    whole = [*prompt, *expected]
    got, stats = decoded(model, prompt, temperature, half_right(whole))
    assert got == expected
    if model.facts.capabilities.rollback:
        assert 0 < stats.accepted_tokens < stats.drafted_tokens, "nothing was rolled back"
    for drafter in (draft_model(model, ()), draft_model(model, (3, 2)), NgramDrafter()):
        assert decoded(model, prompt, temperature, drafter)[0] == expected
        drafter.close()


@pytest.mark.long
def test_an_unknown_processor_holds_in_rejection_mode(exact_model: LanguageModel) -> None:
    prompt = tokens_for(exact_model, 20)
    drafter = draft_model(exact_model, ())
    for seed in range(3):
        rule = Rejection(RandomDraws(seed))
        got, _ = decoded(exact_model, prompt, 0.8, drafter, acceptance=rule)
        assert allowed(prompt, got)


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
