"""The decoding loop: propose, verify, accept, commit, yield. One round is one target pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits, TokenLogprob, token_logprobs
from edgespec.engine.sampling import Sampler
from edgespec.engine.stats import Round, RoundTimer, Stats
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError

__all__ = ["FinishReason", "Proposer", "Step", "Verifier", "decode"]

FinishReason = Literal["stop", "length", "cancelled"]


class Verifier(Protocol):
    """The target, as seen by the decoding loop. Its KV cache contains every token except the last."""

    @property
    def free_tokens(self) -> int:
        """Number of additional tokens that fit in the target's context."""

    def verify(self, tree: TokenTree) -> Logits:
        """Run a draft tree after the cached tokens. Row i of the result holds the logits after node i."""

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep only the root and the nodes in `path` of the last draft tree in the KV cache."""


class Proposer(Protocol):
    """The drafter, as seen by the decoding loop."""

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        """Return a draft tree of up to `draft_length` levels, whose root is the last token."""

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        """Observe the target's logits for the verified draft tree. They are valid only during this call."""

    def commit(self, tokens: tuple[int, ...]) -> None:
        """Append the emitted tokens to the drafter's sequence."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one draft-and-verify round.

    Attributes:
        tokens: The emitted tokens.
        accepted: Number of leading `tokens` that are accepted draft tokens.
        finish_reason: Why the reply ends after these tokens, or None if it continues.
        logprobs: The log-probability of each token, if it was requested.
        prompt_logprobs: The log-probability of each prompt token after the first, if requested. Set only in
            the first step of a reply.
    """

    tokens: tuple[int, ...]
    accepted: int
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def decode(
    target: Verifier,
    drafter: Proposer | None,
    acceptance: Acceptance,
    sampler: Sampler,
    last_token: int,
    first_logits: Logits | None = None,
    *,
    vocab_size: int,
    max_width: int = 1 << 20,
    max_branches: int = 1 << 20,
    draft_length: int,
    max_tokens: int,
    is_stop: Callable[[int], bool],
    is_cancelled: Callable[[], bool],
    stats: Stats,
    logprobs: int | None = None,
) -> Iterator[Step]:
    """Generate tokens until a stop token, a limit or a cancellation.

    However the iterator ends, the target's KV cache contains all emitted tokens except the last. A
    CancelledError from the backend ends the reply; other exceptions propagate.

    Args:
        target: The target, whose KV cache contains the tokens before `last_token`.
        drafter: The drafter, or None for plain decoding.
        acceptance: The acceptance rule.
        sampler: The sampler, whose history ends with `last_token`.
        last_token: The last token of the prompt.
        first_logits: The logits after `last_token`, if the prompt's last pass computed them. The reply's
            first token then needs no pass of its own.
        vocab_size: Size of the target's vocabulary. Drafted tokens with larger ids are dropped.
        max_width: Maximum number of tokens in a verify pass.
        max_branches: Maximum number of leaves of a draft tree.
        draft_length: Maximum depth of a draft tree, not counting leading tokens that a constraint determines.
        max_tokens: Maximum number of tokens to emit.
        is_stop: Called once for every emitted token, in order. No token is emitted after it returns True.
        is_cancelled: Called before each draft-and-verify round. Returning True ends the reply.
        stats: Statistics of the reply, updated after each round.
        logprobs: Number of most likely tokens to report log-probabilities for, in addition to each emitted
            token. If None, no log-probabilities are reported.

    Yields:
        The result of each draft-and-verify round. The last one has a finish reason.
    """
    timer = RoundTimer()
    emitted_total = 0
    while not is_cancelled():
        free = target.free_tokens
        if emitted_total == max_tokens or free == 0:
            yield Step((), 0, "length")
            return
        timer.start()
        room = min(max_tokens - emitted_total, free) - 1
        depth = min(draft_length, room)
        width = min(max_width, free)
        try:
            asked = drafter if depth > 0 and not first_logits else None
            tree = asked.propose(sampler, acceptance, depth) if asked else None
            # Discard a draft whose root is not the last token.
            if tree is None or tree.tokens[0] != last_token:
                tree = TokenTree.chain(last_token)
            tree = tree.pruned(vocab_size, room, width, max_branches)
            timer.lap("draft")
            logits = first_logits or target.verify(tree)
            timer.lap("verify")
        except CancelledError:
            break
        result = acceptance.accept(tree, logits, sampler)
        timer.lap("sampling")
        if drafter:
            drafter.observe(tree, logits, sampler)
        timer.lap("draft")
        tokens, stopped = _until_stop((*(tree.tokens[node] for node in result.path), result.token), is_stop)
        computed = () if logprobs is None else token_logprobs(logits, (0, *result.path), tokens, logprobs)
        timer.lap("overhead")
        target.commit(result.path[: len(tokens) - 1])
        if drafter:
            drafter.commit(tokens)
        timer.lap("rollback")
        for last_token in tokens:
            sampler.push(last_token)
        emitted_total += len(tokens)
        accepted = min(len(result.path), len(tokens))
        is_shared = logits.other_tokens > 0
        stats.rounds.append(
            Round(tree.tokens, tree.parents, result.path, len(tokens), is_shared, first_logits is not None)
        )
        if first_logits:
            stats.count_prompt_pass()
            first_logits = None
        else:
            stats.count_round(tree.depths, accepted, len(tokens), is_shared=is_shared)
        timer.lap("overhead")
        timer.finish(stats, logits.overlapped_seconds, logits.waited_seconds)
        yield Step(tokens, accepted, "stop" if stopped else None, computed)
        if stopped:
            return
    yield Step((), 0, "cancelled")


def _until_stop(tokens: tuple[int, ...], is_stop: Callable[[int], bool]) -> tuple[tuple[int, ...], bool]:
    for i, token in enumerate(tokens):
        if is_stop(token):
            return tokens[: i + 1], True
    return tokens, False
