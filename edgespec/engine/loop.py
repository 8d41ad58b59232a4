"""The loop: propose -> verify -> accept -> commit -> yield. One round is one target pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.stats import RoundTimer, Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

__all__ = ["FinishReason", "Proposer", "Step", "Verifier", "decode"]

FinishReason = Literal["stop", "length", "cancelled"]


class Verifier(Protocol):
    """What the loop needs of a target: its cache holds every token but the last."""

    @property
    def free_tokens(self) -> int:
        """How many more tokens the context takes."""

    def verify(self, tree: TokenTree) -> Logits:
        """Run the tree after the cached tokens: logits of row i follow node i."""

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the root and these nodes of the last tree in the cache; drop the others."""


class Proposer(Protocol):
    """What the loop needs of a drafter."""

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        """Guess up to `draft_length` levels of tokens after the last token."""

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        """See what the target said of the tree it verified, while that is there."""

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Take note of the tokens that were emitted."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one round gave: tokens, of which the first `accepted` were guessed by the drafter."""

    tokens: tuple[int, ...]
    accepted: int
    finish_reason: FinishReason | None


def decode(
    target: Verifier,
    drafter: Proposer | None,
    acceptance: Acceptance,
    sampler: Sampler,
    last_token: int,
    *,
    vocab_size: int,
    max_width: int = 1 << 20,
    max_branches: int = 1 << 20,
    draft_length: int,
    max_tokens: int,
    is_stop: Callable[[int], bool],
    is_cancelled: Callable[[], bool],
    stats: Stats,
) -> Iterator[Step]:
    """Emit tokens round by round until a stop, a limit, or a cancel.

    The target's cache holds everything before `last_token`; the sampler's history ends with it. When
    the iterator is left, for whatever reason, the cache holds all emitted tokens but the last.
    `max_width` and `max_branches` bound a pass; what a drafter proposes beyond them is cut off.
    `is_stop` sees every emitted token once, in order; tokens after a stop are never emitted.
    Raises what the backend raises; a cancelled pass ends with finish reason "cancelled".
    """
    clock = RoundTimer()
    emitted_total = 0
    while not is_cancelled():
        if emitted_total == max_tokens or target.free_tokens == 0:
            yield Step((), 0, "length")
            return
        clock.start()
        depth = min(draft_length, max_tokens - emitted_total - 1, target.free_tokens - 1)
        width = min(max_width, target.free_tokens)
        try:
            tree = _proposed(drafter, sampler, acceptance, depth, last_token)
            tree = tree.pruned(vocab_size, depth, width, max_branches)
            clock.lap("draft")
            logits = target.verify(tree)
            clock.lap("verify")
        except CancelledError:
            break
        verdict = acceptance.accept(tree, logits, sampler)
        clock.lap("sampling")
        if drafter:
            drafter.observe(tree, logits, sampler)
        clock.lap("draft")
        tokens, stopped = _until_stop((*(tree.tokens[node] for node in verdict.path), verdict.token), is_stop)
        clock.lap("overhead")
        target.commit(verdict.path[: len(tokens) - 1])
        if drafter:
            drafter.commit(tokens)
        clock.lap("rollback")
        for last_token in tokens:
            sampler.push(last_token)
        emitted_total += len(tokens)
        accepted = min(len(verdict.path), len(tokens))
        stats.count_round(_drafted_at_depth(tree), accepted, len(tokens))
        clock.lap("overhead")
        clock.book(stats, logits.overlapped_seconds, logits.waited_seconds)
        yield Step(tokens, accepted, "stop" if stopped else None)
        if stopped:
            return
    yield Step((), 0, "cancelled")


def _proposed(
    drafter: Proposer | None, sampler: Sampler, acceptance: Acceptance, depth: int, last_token: int
) -> TokenTree:
    """What the drafter guesses after the last token; the root alone where it guesses nothing."""
    if drafter and depth > 0:
        tree = drafter.propose(sampler, acceptance, depth)
        if tree.tokens[0] == last_token:  # else it is out of step: its guesses are about another text
            return tree
    return TokenTree.chain(last_token)


def _until_stop(tokens: tuple[int, ...], is_stop: Callable[[int], bool]) -> tuple[tuple[int, ...], bool]:
    """The tokens up to the first stop, and whether there was one; later tokens are not asked about."""
    for i, token in enumerate(tokens):
        if is_stop(token):
            return tokens[: i + 1], True
    return tokens, False


def _drafted_at_depth(tree: TokenTree) -> list[int]:
    if tree.drafted == 0:
        return []
    counts = Counter(tree.depths)
    return [counts[depth] for depth in range(1, len(counts))]
