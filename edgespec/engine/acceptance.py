"""Acceptance rules, which decide which drafted tokens to accept and which token comes next.

There are two rules, `Invariant` and `Rejection`. With either, emitted tokens follow the target distribution
exactly. A rule also samples draft tokens for the drafters.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from edgespec.engine.logits import Logits
from edgespec.engine.noise import Stream, gumbel, uniform
from edgespec.engine.sampling import Distribution, Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError

__all__ = ["Acceptance", "AcceptedPath", "Draw", "Invariant", "RandomDraws", "Rejection", "best_after"]

# A drafted token, and the distribution it was drawn from (None if it was not drawn at random).
Draw = tuple[int, Distribution | None]


class AcceptedPath(NamedTuple):
    """The outcome of verifying a draft: the accepted path through its tree, and the next token.

    If no token can be chosen after an accepted node, because the processors rule out every token or the
    logits are not finite, the path ends before that node, and `token` is the token of that node. As in plain
    decoding, this is an error only if the reply continues.

    Attributes:
        path: The accepted nodes in order, without the root.
        token: The token that the target chose after the path.
    """

    path: tuple[int, ...]
    token: int


class Acceptance(Protocol):
    """An acceptance rule: draws tokens for drafters, and decides which drafted tokens to accept."""

    def draw(self, sampler: Sampler, logits: Logits, row: int, count: int) -> list[Draw]:
        """Draw up to `count` distinct draft tokens from a row of the draft model's logits.

        The list is empty if a constraint allows none of the draft model's tokens.
        """

    def accept(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> AcceptedPath:
        """Decide which nodes of a verified draft tree are accepted, and choose the token after them.

        Args:
            tree: The draft tree that the target verified.
            logits: The target's logits. Row i contains the logits after node i.
            sampler: The reply's sampler. Its state is restored before returning.
        """


class Invariant:
    """Invariant mode: the target's token depends only on seed, position and target logits.

    Target and draft model share Gumbel noise (arXiv 2408.07978), so they often choose the same token. For a
    given seed, the text does not depend on the drafter.
    """

    def draw(self, sampler: Sampler, logits: Logits, row: int, count: int) -> list[Draw]:
        return [(token, None) for token in sampler.ranked(logits, row, count)]

    def accept(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> AcceptedPath:
        path: list[int] = []
        pushed, token = 0, sampler.token(logits, 0)
        child = tree.child(0, token)
        while child is not None:
            sampler.push(token)
            pushed += 1
            best = best_after(sampler, logits, child)
            if best is None:
                break
            path.append(child)
            token = best
            child = tree.child(child, token)
        sampler.pop(pushed)
        return AcceptedPath(tuple(path), token)


class RandomDraws:
    """Draws random numbers for speculative sampling, using each one only once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._counters = dict.fromkeys(Stream, 0)

    def _next(self, stream: Stream) -> int:
        self._counters[stream] += 1
        return self._counters[stream]

    def bernoulli(self, probability: float) -> bool:
        return uniform(self._seed, Stream.ACCEPT, self._next(Stream.ACCEPT)) < probability

    def sample(self, distribution: Distribution) -> int:
        return distribution.sample(uniform(self._seed, Stream.RECOVER, self._next(Stream.RECOVER)))

    def sample_distinct(self, distribution: Distribution, count: int) -> list[int]:
        noise = gumbel(self._seed, Stream.DRAFT, self._next(Stream.DRAFT), distribution.tokens)
        with np.errstate(divide="ignore"):
            ranking = np.argsort(-(np.log(distribution.probs) + noise), kind="stable")
        return [int(token) for token in distribution.tokens[ranking[:count]]]


class Rejection:
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192) on chains and trees.

    A drafted token x is accepted with probability min(1, p(x) / q(x)), where p is the target distribution and
    q the distribution that x was drawn from. If x is rejected, p is replaced by norm(max(p - q, 0)) before
    the next sibling is tried (SpecInfer, arXiv 2305.09781). For drafts without probabilities, q is a point
    mass.

    Args:
        random: The source of random numbers.
        block_verification: Whether to use block verification (arXiv 2403.10444, algorithm 2) on trees that
            are `block_verifiable`.
    """

    def __init__(self, random: RandomDraws, block_verification: bool = True) -> None:
        self._random = random
        self._block_verification = block_verification

    def draw(self, sampler: Sampler, logits: Logits, row: int, count: int) -> list[Draw]:
        if sampler.greedy:
            return [(token, None) for token in sampler.ranked(logits, row, count)]
        left = sampler.draft_distribution(logits, row)
        draws: list[Draw] = []
        for token in self._random.sample_distinct(left, count) if left else ():
            if left is None:
                break
            draws.append((token, left))
            left = left.without(token)
        return draws

    def accept(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> AcceptedPath:
        if self._block_verification and tree.block_verifiable and tree.drafted > 1:
            return self._accept_block(tree, logits, sampler)
        path: list[int] = []
        node, pushed, target = 0, 0, sampler.distribution(logits, 0)
        while True:
            for child in tree.children(node):
                token, draft = tree.tokens[child], _draft_distribution(tree, child)
                if self._random.bernoulli(min(1, target.prob(token) / draft.prob(token))):
                    break
                target = _residual(target, draft)
            else:
                token = self._random.sample(target)
                break
            sampler.push(token)
            pushed += 1
            after = _distribution_after(sampler, logits, child)
            if after is None:
                break
            path.append(child)
            node, target = child, after
        sampler.pop(pushed)
        return AcceptedPath(tuple(path), token)

    def _accept_block(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> AcceptedPath:
        joint: float = 1
        accepted, pushed, target = 0, 0, sampler.distribution(logits, 0)
        recovery: Distribution | None = _residual(target, _draft_distribution(tree, 1))
        for node in range(1, tree.width):
            token = tree.tokens[node]
            joint = min(1, joint * target.prob(token) / _draft_distribution(tree, node).prob(token))
            if joint == 0:
                # The target never chooses this token, and the processors may rule out every token after it.
                # Draw a number anyway, so that a seed's later draws do not depend on this shortcut.
                self._random.bernoulli(0)
                continue
            sampler.push(token)
            pushed += 1
            after = _distribution_after(sampler, logits, node)
            if after is None or node == tree.drafted:
                # If no token may follow, this is the draft's last token, even if more were drafted.
                if self._random.bernoulli(joint):
                    accepted, recovery = node, after
                break
            target, draft = after, _draft_distribution(tree, node + 1)
            left = target.residual(draft, joint).sum()
            if self._random.bernoulli(left / (left + 1 - joint) if left > 0 else 0):
                accepted, recovery = node, _residual(target, draft, joint)
        sampler.pop(pushed)
        if recovery is None:
            return AcceptedPath(tuple(range(1, accepted)), tree.tokens[accepted])
        return AcceptedPath(tuple(range(1, accepted + 1)), self._random.sample(recovery))


def best_after(sampler: Sampler, logits: Logits, node: int) -> int | None:
    """Return the target's token after a drafted node, or None if no token can be chosen."""
    try:
        best = sampler.ranked(logits, node, 1)
    except BackendError:
        # Plain decoding computes these logits only if the reply continues. In that case, the next pass raises
        # the error.
        return None
    return best[0] if best else None


def _distribution_after(sampler: Sampler, logits: Logits, node: int) -> Distribution | None:
    """Return the target distribution after a drafted node, or None if no token can be chosen."""
    if sampler.greedy:
        best = best_after(sampler, logits, node)
        return None if best is None else Distribution.point_mass(best)
    try:
        return sampler.draft_distribution(logits, node)
    except BackendError:
        return None  # See `best_after`.


def _draft_distribution(tree: TokenTree, node: int) -> Distribution:
    probs = tree.draft_probs[node]
    return probs if probs is not None else Distribution.point_mass(tree.tokens[node])


def _residual(target: Distribution, draft: Distribution, scale: float = 1) -> Distribution:
    """Return the normalised max(scale * target - draft, 0), or the target if rounding makes it zero."""
    weights = target.residual(draft, scale)
    return Distribution.normalised(target.tokens, weights) if weights.sum() > 0 else target
