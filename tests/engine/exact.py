"""Exact tests of acceptance rules: every random outcome is enumerated with its probability as a fraction.

The production code runs on Distributions whose probabilities are fractions, with a RandomDraws that goes
through all outcomes. The result is the exact distribution of the emitted tokens.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from numbers import Rational
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.acceptance import RandomDraws
from edgespec.engine.sampling import Distribution
from edgespec.engine.tree import TokenTree
from edgespec.model.base import LanguageModel
from edgespec.model.model_facts import Capabilities, ModelFacts
from tests.tabular import LetterVocabulary

Outcome = TypeVar("Outcome")
Path = tuple[int, ...]
Law = Sequence[Fraction]
# The law of the next token after a path.
Table = Callable[[Path], Law]


class AllChances(RandomDraws):
    """A RandomDraws that enumerates all outcomes, one per run of an experiment."""

    def __init__(self) -> None:
        self._choices: list[int] = []
        self._widths: list[int] = []
        self._at = 0
        self.weight = Fraction(1)

    def _choose(self, options: Sequence[tuple[Any, Any]]) -> Any:
        # Floats are only exact for the probabilities 0 and 1.
        assert all(isinstance(weight, Rational) or weight in (0, 1) for _, weight in options), (
            "a probability is not exact"
        )
        options = [(value, Fraction(weight)) for value, weight in options if weight > 0]
        assert sum(weight for _, weight in options) == 1, "the probabilities do not sum to 1"
        if self._at == len(self._choices):
            self._choices.append(0)
            self._widths.append(len(options))
        value, weight = options[self._choices[self._at]]
        self._at += 1
        self.weight *= weight
        return value

    def bernoulli(self, probability: float) -> bool:
        exact: Fraction = probability  # type: ignore[assignment]
        return bool(self._choose([(True, exact), (False, 1 - exact)]))

    def sample(self, law: Distribution) -> int:
        return int(self._choose(list(zip(law.tokens.tolist(), law.probs, strict=True))))

    def sample_distinct(self, law: Distribution, count: int) -> list[int]:
        drawn: list[int] = []
        left: Distribution | None = law
        while left is not None and len(drawn) < count:
            drawn.append(self.sample(left))
            left = left.without(drawn[-1])
        return drawn

    def outcomes(self, experiment: Callable[[], Outcome]) -> dict[Outcome, Fraction]:
        """Return the exact distribution of the results of `experiment`, which must use this random source."""
        found: dict[Outcome, Fraction] = defaultdict(Fraction)
        while True:
            self._at, self.weight = 0, Fraction(1)
            outcome = experiment()
            found[outcome] += self.weight
            while self._choices and self._choices[-1] == self._widths[-1] - 1:
                self._choices.pop()
                self._widths.pop()
            if not self._choices:
                assert sum(found.values()) == 1
                return dict(found)
            self._choices[-1] += 1


def exact_distribution(law: Law) -> Distribution:
    """Return a Distribution whose probabilities are fractions."""
    probs: NDArray[Any] = np.array([Fraction(prob) for prob in law], object)
    return Distribution(np.arange(len(law)), probs)


class ExactLogits:
    """Logits whose rows come from the exact distribution after each path."""

    def __init__(self, paths: Sequence[Path], table: Table) -> None:
        self.paths = list(paths)
        self.table = table
        self.vocab_size = len(table(()))
        self.other_tokens = 0
        self.waited_seconds = self.overlapped_seconds = 0.0

    def __len__(self) -> int:
        return len(self.paths)

    def limit_vocab(self, vocab_size: int) -> ExactLogits:
        return self

    def greedy(self, row: int) -> int:
        law = self.table(self.paths[row])
        return max(range(len(law)), key=lambda token: (law[token], -token))

    def top(self, row: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        law = np.array(self.table(self.paths[row]), np.float64)
        return np.arange(len(law)), np.log(np.maximum(law, 1e-30))


class ExactSampler:
    """A sampler without processors. Asserts that its path matches that of the row."""

    def __init__(self, history: Sequence[int] = (), greedy: bool = False) -> None:
        self.history = list(history)
        self.greedy = greedy

    def push(self, token: int) -> None:
        self.history.append(token)

    def pop(self, count: int) -> None:
        del self.history[len(self.history) - count :]

    def distribution(self, logits: ExactLogits, row: int) -> Distribution:
        assert tuple(self.history) == logits.paths[row], "the sampler's path is not that of the row"
        if self.greedy:
            return Distribution.point_mass(logits.greedy(row))
        return exact_distribution(logits.table(logits.paths[row]))

    def draft_distribution(self, logits: ExactLogits, row: int) -> Distribution:
        return self.distribution(logits, row)

    def ranked(self, logits: ExactLogits, row: int, count: int) -> list[int]:
        law = logits.table(logits.paths[row])
        return sorted(range(len(law)), key=lambda token: (-law[token], token))[:count]


class ExactModel:
    """A LanguageModel whose next-token probabilities are fractions."""

    def __init__(self, table: Table, vocab_size: int, ends: bool = False) -> None:
        self.table = table
        # With one more id than the model has, no token ends a reply.
        self.vocabulary = LetterVocabulary(vocab_size + (0 if ends else 1))
        self.facts = ModelFacts(
            name="exact",
            path="",
            architecture="exact",
            description="",
            parameters=0,
            file_bytes=0,
            weight_bytes=0,
            kv_bytes=0,
            quantisation="",
            trained_context_tokens=100,
            context_tokens=100,
            vocab_size=vocab_size,
            chat_template=False,
            capabilities=Capabilities(True, True),
        )
        self._tokens: list[int] = []
        self._round: list[Path] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def free_tokens(self) -> int:
        return 100 - self.length

    def prefill(self, tokens: Sequence[int], progress: object = None) -> None:
        self._tokens += tokens

    def truncate(self, length: int) -> None:
        del self._tokens[length:]

    def verify(self, tree: TokenTree, first: int = 0) -> ExactLogits:
        del self._round[first:]
        for node in range(first, tree.width):
            before = () if node == 0 else self._round[tree.parents[node]]
            self._round.append((*before, tree.tokens[node]))
        base = tuple(self._tokens)
        return ExactLogits([base + path for path in self._round[first:]], self.table)

    def commit(self, path: tuple[int, ...]) -> None:
        self._tokens += self._round[path[-1] if path else 0]
        self._round = []

    def run_ahead(self, enabled: bool) -> None:
        pass

    def pipeline_with(self, draft: LanguageModel | None) -> None:
        pass

    def interrupt(self, enabled: bool) -> None:
        pass

    def close(self) -> None:
        pass


def random_table(seed: int, vocab_size: int, zeros: float = 0.2) -> Table:
    """Return random distributions of small fractions that depend on the whole path. Some are 0."""

    def table(path: Path) -> Law:
        dice = random.Random(f"{seed} {path}")
        weights = [0 if dice.random() < zeros else dice.randint(1, 5) for _ in range(vocab_size)]
        if not any(weights):
            weights[dice.randrange(vocab_size)] = 1
        return [Fraction(weight, sum(weights)) for weight in weights]

    return table


def chance_of(path: Path, table: Table, start: Path) -> Fraction:
    """Return the probability of `path` after `start`."""
    chance = Fraction(1)
    for i, token in enumerate(path):
        chance *= table(start + path[:i])[token]
    return chance


def assert_law(emitted: dict[Path, Fraction], table: Table, start: Path, vocab_size: int) -> None:
    """Assert that the emitted tokens, continued by the table to equal length, follow the table exactly."""
    length = max(map(len, emitted))
    for whole in product(range(vocab_size), repeat=length):
        got = sum(
            (
                weight * chance_of(whole[len(tokens) :], table, start + tokens)
                for tokens, weight in emitted.items()
                if whole[: len(tokens)] == tokens
            ),
            Fraction(0),
        )
        assert got == chance_of(whole, table, start), f"{whole} has {got}"
