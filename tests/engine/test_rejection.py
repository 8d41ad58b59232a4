"""In rejection mode with random draws on tables, replies follow the target distribution.

Every sampler, drafter and rule is tested with a G-test, corrected for the number of tests. The tests must
also
detect wrong rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from edgespec.engine.acceptance import Acceptance, Invariant, RandomDraws, Rejection
from edgespec.engine.logits import HostLogits
from edgespec.engine.loop import decode
from edgespec.engine.sampling import Distribution, Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.methods.auto.combined_drafter import CombinedDrafter
from edgespec.methods.base import Drafter
from edgespec.methods.model.drafter import ModelDrafter
from tests.tables import Saying, table
from tests.tabular import TabularModel

VOCAB = 5
PROMPT = [0, 1, 2, 0, 1]
REPLIES, MANY_REPLIES = 1000, 30_000
LENGTH = 3
SIGNIFICANT = 1e-3

SAMPLERS: dict[str, dict[str, Any]] = {
    "open": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "filters": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    "typical": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 0.8},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.3,
        "penalty_window": 3,
        "logit_bias": {1: 0.5},
    },
}
RULES: dict[str, Callable[[int], Acceptance]] = {
    "invariant": lambda seed: Invariant(),
    "rejection": lambda seed: Rejection(RandomDraws(seed)),
    "token-wise": lambda seed: Rejection(RandomDraws(seed), block_verification=False),
}


def target() -> TabularModel:
    return table(1, vocab=VOCAB, end=0.0)


def draft() -> TabularModel:
    return table(2, vocab=VOCAB, end=0.0)


def model_drafter(**options: Any) -> ModelDrafter:
    return ModelDrafter(draft(), VOCAB, **options)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "chain": model_drafter,
    "stopping": lambda: model_drafter(min_confidence=0.3),
    "tree": lambda: model_drafter(branches=(3, 2)),
    "certain": lambda: Saying(lambda tokens, length: [1, 2, 3][:length]),
    "both": lambda: CombinedDrafter([model_drafter(), Saying(lambda tokens, length: [1, 2, 3][:length])]),
}


def replies(
    rule: Callable[[int], Acceptance], drafter: Drafter, sampling: dict[str, Any], count: int = REPLIES
) -> Iterator[tuple[int, ...]]:
    """Generate many replies of LENGTH tokens, each with its own seed."""
    model = target()
    params = SamplingParams(**{"temperature": 1.0} | sampling)
    for seed in range(count):
        model.truncate(0)
        model.prefill(PROMPT[:-1])
        drafter.begin(PROMPT)
        steps = decode(
            model,
            drafter,
            rule(seed),
            Sampler(params, seed, PROMPT),
            PROMPT[-1],
            vocab_size=VOCAB,
            draft_length=3,
            max_tokens=LENGTH,
            is_stop=lambda token: False,
            is_cancelled=lambda: False,
            stats=Stats(),
        )
        yield tuple(token for step in steps for token in step.tokens)


def exact_law(sampling: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of the first LENGTH tokens in plain decoding."""
    model = target()
    params = SamplingParams(**{"temperature": 1.0} | sampling)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for path, chance in law.items():
            model.truncate(0)
            model.prefill([*PROMPT, *path][:-1])
            logits = model.verify(TokenTree.chain([*PROMPT, *path][-1]))
            after = Sampler(params, 0, [*PROMPT, *path]).distribution(logits, 0)
            for token, prob in zip(after.tokens.tolist(), after.probs.tolist(), strict=True):
                longer[(*path, token)] = chance * prob
        law = longer
    return law


def g_test(drawn: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of the counts, or 0 if an impossible reply occurred. Rare replies share a bin."""
    if any(law.get(reply, 0.0) == 0.0 for reply in drawn):
        return 0.0
    total = drawn.total()
    common = [reply for reply, chance in law.items() if chance * total >= 5]
    observed = [drawn[reply] for reply in common]
    expected = [law[reply] * total for reply in common]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    if expected[-1] < 1e-6:
        observed, expected = observed[:-1], expected[:-1]
    scale = sum(observed) / sum(expected)
    return float(
        stats.power_divergence(
            observed, [value * scale for value in expected], lambda_="log-likelihood"
        ).pvalue
    )


CASES = list(product(SAMPLERS, DRAFTERS, RULES))


# The cases of every run: the samplers that differ most, and rejection with each drafter. The long test covers
# every case.
QUICK = [
    (sampler, drafter, rule)
    for sampler, drafter, rule in CASES
    if sampler == "penalties" and rule == "rejection"
]


@pytest.mark.parametrize(("sampler", "drafter", "rule"), QUICK, ids=[", ".join(case) for case in QUICK])
def test_replies_follow_the_target_distribution(sampler: str, drafter: str, rule: str) -> None:
    drawn = Counter(replies(RULES[rule], DRAFTERS[drafter](), SAMPLERS[sampler]))
    # Bonferroni correction over all cases. The seeds are fixed, so this always gives the same result.
    assert g_test(drawn, exact_law(SAMPLERS[sampler])) > SIGNIFICANT / len(CASES)


@pytest.mark.long
@pytest.mark.parametrize(("sampler", "drafter", "rule"), CASES, ids=[", ".join(case) for case in CASES])
def test_very_many_replies_follow_the_target_distribution(sampler: str, drafter: str, rule: str) -> None:
    drawn = Counter(replies(RULES[rule], DRAFTERS[drafter](), SAMPLERS[sampler], MANY_REPLIES))
    assert g_test(drawn, exact_law(SAMPLERS[sampler])) > SIGNIFICANT / len(CASES)


class _Leaky(Rejection):
    """A wrong rule that samples the correction from the target instead of the residual."""

    def accept(self, tree: TokenTree, logits: Any, sampler: Sampler) -> Any:
        verdict = super().accept(tree, logits, sampler)
        if len(verdict.path) == tree.drafted:
            return verdict
        for node in verdict.path:
            sampler.push(tree.tokens[node])
        law = sampler.distribution(logits, verdict.path[-1] if verdict.path else 0)
        sampler.pop(len(verdict.path))
        return type(verdict)(verdict.path, self._random.sample(law))


class _Blind(Rejection):
    """A wrong rule whose penalties ignore earlier draft tokens."""

    def accept(self, tree: TokenTree, logits: Any, sampler: Sampler) -> Any:
        pushed = sampler.push
        sampler.push = lambda token: pushed(PROMPT[0])  # type: ignore[method-assign]
        verdict = super().accept(tree, logits, sampler)
        sampler.push = pushed  # type: ignore[method-assign]
        return verdict


class _OneStream(RandomDraws):
    """A wrong random source that uses one number for drafting and accepting."""

    def bernoulli(self, probability: float) -> bool:
        self._counters = dict.fromkeys(self._counters, 0)
        return super().bernoulli(probability)

    def sample(self, law: Distribution) -> int:
        self._counters = dict.fromkeys(self._counters, 0)
        return super().sample(law)


WRONG: dict[str, tuple[Callable[[int], Acceptance], str, str]] = {
    "no residual": (lambda seed: _Leaky(RandomDraws(seed), block_verification=False), "chain", "open"),
    "penalties blind to the path": (lambda seed: _Blind(RandomDraws(seed)), "chain", "penalties"),
    "the same luck twice": (
        lambda seed: Rejection(_OneStream(seed), block_verification=False),
        "tree",
        "open",
    ),
}


@pytest.mark.parametrize(("rule", "drafter", "sampler"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_rule_is_detected(rule: Callable[[int], Acceptance], drafter: str, sampler: str) -> None:
    """Each mistake must be detected with as few replies as the previous test uses."""
    drawn = Counter(replies(rule, DRAFTERS[drafter](), SAMPLERS[sampler]))
    assert g_test(drawn, exact_law(SAMPLERS[sampler])) < SIGNIFICANT / len(CASES)


class TestRandomDraws:
    """Random draws are fair and use a new number for every decision."""

    LAW = Distribution(np.arange(4), np.array([0.1, 0.2, 0.3, 0.4]))

    def test_bernoulli(self) -> None:
        draws = RandomDraws(1)
        heads = sum(draws.bernoulli(0.3) for _ in range(20_000))
        assert stats.binomtest(heads, 20_000, 0.3).pvalue > 1e-4
        assert all(draws.bernoulli(1) for _ in range(1000))
        assert not any(draws.bernoulli(0) for _ in range(1000))

    def test_sample(self) -> None:
        draws = RandomDraws(2)
        counts = Counter(draws.sample(self.LAW) for _ in range(20_000))
        assert stats.chisquare([counts[i] for i in range(4)], self.LAW.probs * 20_000).pvalue > 1e-4

    def test_sample_distinct(self) -> None:
        draws = RandomDraws(3)
        counts = Counter(tuple(draws.sample_distinct(self.LAW, 2)) for _ in range(20_000))
        probs = self.LAW.probs
        law = {(i, j): probs[i] * probs[j] / (1 - probs[i]) for i, j in product(range(4), repeat=2) if i != j}
        assert stats.chisquare([counts[p] for p in law], [p * 20_000 for p in law.values()]).pvalue > 1e-4

    def test_drafting_accepting_and_recovery_are_independent(self) -> None:
        grid: NDArray[np.int64] = np.zeros((4, 2, 4), np.int64)
        for seed in range(20_000):
            draws = RandomDraws(seed)
            grid[
                draws.sample_distinct(self.LAW, 1)[0], int(draws.bernoulli(0.5)), draws.sample(self.LAW)
            ] += 1
        for a, b in ((0, 1), (0, 2), (1, 2)):
            other = 3 - a - b
            assert stats.chi2_contingency(grid.sum(axis=other)).pvalue > 1e-4

    def test_impossible_tokens_are_never_drawn(self) -> None:
        tiny = SamplingParams(temperature=0.002, top_k=0, top_p=1.0, min_p=0.0)
        logits = HostLogits(np.array([[1.0, 5.0, 4.9, -3.0]], np.float32))
        for seed in range(200):
            draws = Rejection(RandomDraws(seed)).draw(Sampler(tiny, seed, [0]), logits, 0, 4)
            for token, law in draws:
                assert law is not None
                assert law.prob(token) > 0
        assert self.LAW.sample(np.nextafter(1.0, 0.0)) == 3
        ends = Distribution(np.arange(3), np.array([0.5, 0.5, 0.0]))
        assert ends.sample(np.nextafter(1.0, 0.0)) == 1
