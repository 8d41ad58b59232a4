"""The rules of acceptance: which drafted tokens stay, and what follows them.

Each rule emits tokens of exactly the target's distribution. A rule also says how a drafter with
probabilities draws, because the two must fit together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgespec.engine.distribution import Distribution
from edgespec.engine.logits import Logits
from edgespec.engine.noise import Stream, gumbel, uniform
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree

__all__ = ["Acceptance", "Draw", "Invariant", "RandomDraws", "RandomSource", "Rejection", "Verdict"]

Draw = tuple[int, Distribution | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pass decided: the accepted nodes from the root down, and the token after them.

    The token is a correction, or a bonus when the path ends in a leaf.
    """

    path: tuple[int, ...]
    token: int


class Acceptance(Protocol):
    """One rule of acceptance."""

    def draw(self, sampler: Sampler, logits: Logits, row: int, count: int) -> list[Draw]:
        """Up to `count` different tokens for a drafter to propose, in order, each with its law."""

    def accept(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> Verdict:
        """Walk the tree over the target's logits (row i belongs to node i)."""


class Invariant:
    """The target's token is a pure function of seed, position and logits; a draft can only guess it.

    Coupling by shared Gumbel noise (arXiv 2408.07978): acceptance is at least (1 - TV) / (1 + TV),
    and for a seed the text does not depend on the drafter.
    """

    def draw(self, sampler: Sampler, logits: Logits, row: int, count: int) -> list[Draw]:
        return [(token, None) for token in sampler.ranked(logits, row, count)]

    def accept(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            token = sampler.token(logits, node)
            child = tree.child(node, token)
            if child is None:
                break
            path.append(child)
            sampler.push(token)
            node = child
        sampler.pop(len(path))
        return Verdict(tuple(path), token)


class RandomSource(Protocol):
    """Where rejection mode takes its luck from."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""

    def pick(self, law: Distribution) -> int:
        """One token of a distribution."""

    def order(self, law: Distribution, count: int) -> list[int]:
        """Up to `count` tokens drawn one after another without replacement."""


class RandomDraws:
    """Counter-based chance with disjoint streams for drafting, accepting and recovering.

    Every draw moves its counter on: a number that took part in one decision, even about a token that
    was then thrown away, never takes part in another.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._thrown = dict.fromkeys(Stream, 0)

    def _next(self, stream: Stream) -> int:
        self._thrown[stream] += 1
        return self._thrown[stream]

    def coin(self, probability: float) -> bool:
        return uniform(self._seed, Stream.ACCEPT, self._next(Stream.ACCEPT)) < probability

    def pick(self, law: Distribution) -> int:
        return law.pick(uniform(self._seed, Stream.RECOVER, self._next(Stream.RECOVER)))

    def order(self, law: Distribution, count: int) -> list[int]:
        # Gumbel top-k, in order, is sampling without replacement (arXiv 1903.06059).
        noise = gumbel(self._seed, Stream.DRAFT, self._next(Stream.DRAFT), law.tokens)
        with np.errstate(divide="ignore"):
            ranking = np.argsort(-(np.log(law.probs) + noise), kind="stable")
        return [int(t) for t in law.tokens[ranking[:count]]]


class Rejection:
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192) on chains and trees.

    Siblings are tried in order against a shrinking residual: with the law q_k the k-th child was
    drawn from, accept with min(1, r(x_k) / q_k(x_k)), else r = norm(max(r - q_k, 0)). Point masses
    (no law) and children without replacement (SpecInfer, arXiv 2305.09781) are the same rule.
    Chains that were meant as such use block verification (arXiv 2403.10444, algorithm 2) unless `block`
    is False.
    """

    def __init__(self, chance: RandomSource, block: bool = True) -> None:
        self._chance = chance
        self._block = block

    def draw(self, sampler: Sampler, logits: Logits, row: int, count: int) -> list[Draw]:
        if sampler.greedy:
            return [(token, None) for token in sampler.ranked(logits, row, count)]
        law: Distribution | None = sampler.distribution(logits, row)
        draws: list[Draw] = []
        for token in self._chance.order(law, count) if law else ():
            if law is None:
                break
            draws.append((token, law))
            law = law.without([token])
        return draws

    def accept(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> Verdict:
        if self._block and tree.block and tree.drafted > 1:
            return self._accept_block(tree, logits, sampler)
        path: list[int] = []
        node = 0
        while True:
            target = sampler.distribution(logits, node)
            for child in tree.children(node):
                token, law = tree.tokens[child], _law(tree, child)
                if self._chance.coin(min(1, target.prob(token) / law.prob(token))):
                    path.append(child)
                    sampler.push(token)
                    break
                target = _residual(target, law)
            else:
                break
            node = child
        sampler.pop(len(path))
        return Verdict(tuple(path), self._chance.pick(target))

    def _accept_block(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> Verdict:
        """`joint` is the paper's clipped product of ratios, `keep` its acceptance probability h."""
        joint: float = 1
        accepted, after = 0, sampler.distribution(logits, 0)
        recovery = _residual(after, _law(tree, 1))
        for node in range(1, tree.width):
            token = tree.tokens[node]
            joint = min(1, joint * after.prob(token) / _law(tree, node).prob(token))
            sampler.push(token)
            after = sampler.distribution(logits, node)
            if node < tree.drafted:
                left = after.minus(_law(tree, node + 1), joint).sum()
                keep = left / (left + 1 - joint) if left > 0 else 0
            else:
                keep = joint
            if self._chance.coin(keep):
                accepted = node
                recovery = after if node == tree.drafted else _residual(after, _law(tree, node + 1), joint)
        sampler.pop(tree.drafted)
        return Verdict(tuple(range(1, accepted + 1)), self._chance.pick(recovery))


def _law(tree: TokenTree, node: int) -> Distribution:
    """The law a node was drawn from; a point mass where it was proposed for certain."""
    law = tree.draft_probs[node]
    return law if law is not None else Distribution.certain(tree.tokens[node])


def _residual(target: Distribution, law: Distribution, scale: float = 1) -> Distribution:
    """norm(max(scale * target - law, 0)); the target itself where rounding leaves nothing."""
    weights = target.minus(law, scale)
    return Distribution.normalised(target.tokens, weights) if weights.sum() > 0 else target
