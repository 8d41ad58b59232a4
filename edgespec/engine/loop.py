"""The decoding loop: propose, verify, accept, commit, yield. One round is one target pass."""

from __future__ import annotations

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
    """The target model. Its KV cache contains every token except the last."""

    @property
    def free_tokens(self) -> int:
        """Number of tokens that still fit into the context."""

    def verify(self, tree: TokenTree) -> Logits:
        """Run a tree after the cached tokens. Row i of the returned logits follows node i."""

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the root and these nodes of the last tree in the cache and drop the others."""


class Proposer(Protocol):
    """The drafter."""

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        """Return a tree of up to `draft_length` levels after the last token."""

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        """Read the target's logits for the verified tree, which are valid only during this call."""

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append the emitted tokens to the drafter's sequence."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one draft-and-verify round.

    Attributes:
        tokens: The emitted tokens.
        accepted: Number of leading `tokens` that are accepted draft tokens.
        finish_reason: Why the reply ends after these tokens, or None if it continues.
    """

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
    """Emit tokens round by round until a stop token, a limit or a cancellation.

    However the iterator ends, the target's cache contains all emitted tokens except the last. A
    CancelledError from the backend ends the reply; other exceptions propagate.

    Args:
        target: The target, whose cache contains the tokens before `last_token`.
        drafter: The drafter, or None for plain decoding.
        acceptance: The acceptance rule.
        sampler: The sampler, whose history ends with `last_token`.
        last_token: The last token of the prompt.
        vocab_size: Drafted token ids must be smaller than this. Drafts that exceed this or one of the next
            three limits are pruned.
        max_width: Maximum number of rows of a verify pass.
        max_branches: Maximum number of leaves of a draft.
        draft_length: Maximum depth of a draft.
        max_tokens: Maximum number of tokens to emit.
        is_stop: Called once for every emitted token, in order. No token is emitted after it returns True.
        is_cancelled: Called before each round. Returning True ends the reply.
        stats: Counts and times to update.

    Yields:
        One step per round; the last one has a finish reason.
    """
    timer = RoundTimer()
    emitted_total = 0
    while not is_cancelled():
        if emitted_total == max_tokens or target.free_tokens == 0:
            yield Step((), 0, "length")
            return
        timer.start()
        depth = min(draft_length, max_tokens - emitted_total - 1, target.free_tokens - 1)
        width = min(max_width, target.free_tokens)
        try:
            tree = drafter.propose(sampler, acceptance, depth) if drafter and depth > 0 else None
            # Discard a draft with a different root, because it was made for another sequence.
            if tree is None or tree.tokens[0] != last_token:
                tree = TokenTree.chain(last_token)
            tree = tree.pruned(vocab_size, depth, width, max_branches)
            timer.lap("draft")
            logits = target.verify(tree)
            timer.lap("verify")
        except CancelledError:
            break
        result = acceptance.accept(tree, logits, sampler)
        timer.lap("sampling")
        if drafter:
            drafter.observe(tree, logits, sampler)
        timer.lap("draft")
        tokens, stopped = _until_stop((*(tree.tokens[node] for node in result.path), result.token), is_stop)
        timer.lap("overhead")
        target.commit(result.path[: len(tokens) - 1])
        if drafter:
            drafter.commit(tokens)
        timer.lap("rollback")
        for last_token in tokens:
            sampler.push(last_token)
        emitted_total += len(tokens)
        accepted = min(len(result.path), len(tokens))
        stats.count_round(tree.depths, accepted, len(tokens))
        timer.lap("overhead")
        timer.finish(stats, logits.overlapped_seconds, logits.waited_seconds)
        yield Step(tokens, accepted, "stop" if stopped else None)
        if stopped:
            return
    yield Step((), 0, "cancelled")


def _until_stop(tokens: tuple[int, ...], is_stop: Callable[[int], bool]) -> tuple[tuple[int, ...], bool]:
    """Return the tokens up to the first stop token, and whether there was one."""
    for i, token in enumerate(tokens):
        if is_stop(token):
            return tokens[: i + 1], True
    return tokens, False
