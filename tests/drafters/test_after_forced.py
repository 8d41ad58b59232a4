"""Drafts of a model that follow tokens which a constraint determines."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafters.model import ModelDrafter
from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.tree import TokenTree
from tests.tables import VOCAB, table
from tests.tabular import TabularModel

PROMPT = [1, 2, 3, 1]
FORCED = (4, 2, 5)


def drafted(
    drafter: ModelDrafter,
    sequence: list[int],
    forced: tuple[int, ...] = (),
    acceptance: Acceptance | None = None,
) -> TokenTree:
    sampler = Sampler(SamplingParams(0.8), 3, sequence)
    rule = acceptance or Invariant()
    tree = drafter.propose_after(forced, sampler, rule, 3) if forced else drafter.propose(sampler, rule, 3)
    assert sampler.position == len(sequence), "the sampler is left as it was"
    return tree


def started(model: TabularModel, sequence: list[int], branches: tuple[int, ...] = ()) -> ModelDrafter:
    drafter = ModelDrafter(model, VOCAB, branches=branches)
    drafter.begin(sequence)
    return drafter


@pytest.mark.parametrize("branches", [(), (2, 2)], ids=["chain", "tree"])
def test_the_draft_is_the_one_after_the_forced_tokens_were_emitted(branches: tuple[int, ...]) -> None:
    after = drafted(started(table(1), PROMPT, branches), PROMPT, FORCED)
    assert after.drafted
    expected = drafted(started(table(1), [*PROMPT, *FORCED], branches), [*PROMPT, *FORCED])
    assert (after.tokens, after.parents) == (expected.tokens, expected.parents)


def test_the_model_runs_the_forced_tokens_in_one_pass() -> None:
    model = table(1)
    widths: list[int] = []
    verify = model.verify

    def watched(tree: TokenTree, first: int = 0) -> object:
        widths.append(tree.width - first)
        return verify(tree, first)

    model.verify = watched  # type: ignore[method-assign, assignment]
    drafted(started(model, PROMPT), PROMPT, FORCED)
    assert widths == [1 + len(FORCED), 1, 1]


@pytest.mark.parametrize("rejection", [False, True], ids=["invariant", "rejection"])
@pytest.mark.parametrize("emitted", [(6,), (4, 6), (4, 2), (4, 2, 5), (4, 2, 5, 6), "the draft"], ids=str)
def test_the_cache_follows_what_was_emitted(emitted: tuple[int, ...] | str, rejection: bool) -> None:
    """Whether all, some or none of the forced tokens were emitted, the next draft is right."""
    drafter = started(table(1), PROMPT)
    rule = Rejection(RandomDraws(0)) if rejection else Invariant()
    tree = drafted(drafter, PROMPT, FORCED, rule)
    tokens = (*FORCED, *tree.tokens[1:], 0) if isinstance(emitted, str) else emitted
    drafter.commit(tokens)
    sequence = [*PROMPT, *tokens]
    got = drafted(drafter, sequence)
    expected = drafted(started(table(1), sequence), sequence)
    assert got.tokens == expected.tokens


def test_nothing_is_drafted_after_the_end_of_a_reply() -> None:
    end = VOCAB - 1
    assert not drafted(started(table(1), PROMPT), PROMPT, (4, end)).drafted


def test_a_narrow_model_drafts_nothing_after_a_long_run() -> None:
    logits = np.zeros((VOCAB, VOCAB), np.float32)
    model = TabularModel(logits, context_tokens=len(PROMPT) + 2)
    assert not drafted(started(model, PROMPT), PROMPT, FORCED).drafted
