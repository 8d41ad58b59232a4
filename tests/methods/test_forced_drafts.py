"""A model's drafts that include tokens determined by a constraint."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.methods.base import ForcedDraft
from edgespec.methods.model.drafter import ModelDrafter
from tests.tables import END, VOCAB, table
from tests.tabular import TabularModel

PROMPT = [1, 2, 3, 1]
FORCED = (4, 2, 5)
# After each of these tokens, a constraint determines the next ones. The prompt's last token is 1.
RUNS = {1: FORCED, 6: (3, 2)}


class Runs(LogitsProcessor):
    """A constraint that determines the tokens after some others."""

    def __init__(self, runs: Mapping[int, tuple[int, ...]]) -> None:
        self._runs, self._tokens = runs, list(PROMPT)

    def push(self, token: int) -> None:
        self._tokens.append(token)

    def pop(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def forced_tokens(self, limit: int) -> list[int]:
        rest: tuple[int, ...] = ()
        for token in self._tokens:
            rest = rest[1:] or self._runs.get(token, ())
        return list(rest[:limit])

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        keep = np.isin(tokens, self.forced_tokens(1) or range(VOCAB))
        return tokens[keep], logits[keep]


def sampler_after(tokens: list[int], runs: Mapping[int, tuple[int, ...]]) -> Sampler:
    constraint = Runs(runs)
    for token in tokens[len(PROMPT) :]:
        constraint.push(token)
    return Sampler(SamplingParams(0.8), 3, tokens, [constraint])


def started(model: TabularModel, sequence: list[int], branches: tuple[int, ...] = ()) -> ModelDrafter:
    drafter = ModelDrafter(model, VOCAB, branches=branches)
    drafter.begin(sequence)
    return drafter


def drafted(
    drafter: ModelDrafter,
    sequence: list[int],
    runs: Mapping[int, tuple[int, ...]] = RUNS,
    acceptance: Acceptance | None = None,
    draft_length: int = 3,
) -> ForcedDraft:
    sampler = sampler_after(sequence, runs)
    draft = drafter.propose_with_forced(sampler, acceptance or Invariant(), draft_length)
    assert sampler.position == len(sequence), "the sampler is left as it was"
    return draft


@pytest.mark.parametrize("branches", [(), (2, 2)], ids=["chain", "tree"])
def test_the_draft_continues_after_the_forced_tokens(branches: tuple[int, ...]) -> None:
    runs = {1: FORCED}
    tree, forced = drafted(started(table(1), PROMPT, branches), PROMPT, runs)
    assert tree.tokens[1:4] == FORCED
    assert forced >= {1, 2, 3}
    sequence = [*PROMPT, *FORCED]
    sampler = sampler_after(sequence, runs)
    expected = started(table(1), sequence, branches).propose(sampler, Invariant(), 3)
    chosen = [node for node in range(4, tree.width) if node not in forced]
    assert len(chosen) >= 2
    assert {(tree.depths[node] - 3, tree.tokens[node]) for node in chosen} <= {
        (expected.depths[node], expected.tokens[node]) for node in range(1, expected.width)
    }


@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_are_those_that_the_model_drafts_one_by_one(seed: int) -> None:
    """A constrained model without this knowledge drafts the same chain in more passes."""
    draft = drafted(started(table(seed), PROMPT), PROMPT, draft_length=6)
    one_by_one = started(table(seed), PROMPT).propose(sampler_after(PROMPT, RUNS), Invariant(), 16)
    assert draft.tree.drafted >= len(FORCED)
    assert draft.tree.tokens == one_by_one.tokens[: draft.tree.width]
    chosen = draft.tree.drafted - len(draft.forced)
    assert chosen <= 6


def test_the_model_runs_forced_tokens_in_one_pass() -> None:
    model = table(2)
    widths: list[int] = []
    verify = model.verify

    def watched(tree: object, first: int = 0) -> object:
        widths.append(tree.width - first)  # type: ignore[attr-defined]
        return verify(tree, first)  # type: ignore[arg-type]

    model.verify = watched  # type: ignore[method-assign, assignment]
    tree, _ = drafted(started(model, PROMPT), PROMPT, {1: FORCED})
    assert widths == [1 + len(FORCED), 1, 1]
    first = tree.tokens[1 + len(FORCED)]
    assert first not in {1, *FORCED, END}
    widths.clear()
    tree, forced = drafted(started(model, PROMPT), PROMPT, {1: FORCED, first: (3, 2)}, draft_length=4)
    assert widths == [1 + len(FORCED), 3]
    assert tree.tokens[1 : 1 + len(FORCED) + 3] == (*FORCED, first, 3, 2)
    assert forced == {1, 2, 3, 5, 6}


@pytest.mark.parametrize("rejection", [False, True], ids=["invariant", "rejection"])
@pytest.mark.parametrize("emitted", [(6,), (4, 6), (4, 2), (4, 2, 5), (4, 2, 5, 0), "the draft"], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_cache_follows_what_was_emitted(
    emitted: tuple[int, ...] | str, rejection: bool, seed: int
) -> None:
    """Whether all, some or none of the forced tokens were emitted, the next draft is correct."""
    drafter = started(table(seed), PROMPT)
    rule = Rejection(RandomDraws(0)) if rejection else Invariant()
    tree = drafted(drafter, PROMPT, acceptance=rule).tree
    tokens = (*tree.tokens[1:], 0) if isinstance(emitted, str) else emitted
    drafter.commit(tokens)
    sequence = [*PROMPT, *tokens]
    assert drafted(drafter, sequence) == drafted(started(table(seed), sequence), sequence)


def test_nothing_is_drafted_after_the_end_of_a_reply() -> None:
    tree, forced = drafted(started(table(1), PROMPT), PROMPT, {1: (4, END)})
    assert tree.tokens == (1, 4, END)
    assert forced == {1, 2}


def test_a_narrow_model_drafts_only_a_part_of_a_long_run() -> None:
    logits = np.zeros((VOCAB, VOCAB), np.float32)
    model = TabularModel(logits, context_tokens=len(PROMPT) + 2)
    assert drafted(started(model, PROMPT), PROMPT).tree.tokens[:3] == (1, 4, 2)
