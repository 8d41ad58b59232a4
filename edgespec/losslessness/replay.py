"""Rerun a reply's target passes in an empty context to tell rounding from faults.

A pass over several tokens can round differently than a pass over one token. A speculative reply may therefore
differ from plain decoding even if the loop, the rollback and the caches are correct. A replay distinguishes
such rounding from faults by running passes of the same shapes over the reply's own tokens, so that they round
the same way. If the replay yields the same tokens, and the rejected tokens do not change a single bit of the
logits, the difference is due to rounding. Otherwise, it is a fault.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.stats import Round
from edgespec.engine.tree import TokenTree
from edgespec.errors import MemoryBudgetError
from edgespec.memory.target_cache import read_prompt
from edgespec.model.base import LanguageModel
from edgespec.model.memory_estimate import round_up_to_block

__all__ = [
    "Alone",
    "Judgement",
    "MadeReply",
    "PromptRead",
    "Reason",
    "Verdict",
    "find_fault",
    "judge",
    "largest_difference",
    "logit_rows",
    "replay",
]

Verdict = Literal["rounding", "fault"]
# Maximum number of tokens whose logits are compared. This bounds memory use, because a row of logits takes 1
# MiB with a vocabulary of 262,144 tokens.
_MAX_ROWS = 64


class Reason(StrEnum):
    """Why a reply is wrong, as far as further replays can determine.

    Attributes:
        REJECTED_TOKENS: Rejected draft tokens change the logits of later passes, so they were not removed
            from the target's cache.
        STALE_CACHE: The reply is wrong because of tokens that earlier replies left in the target's cache.
            With an empty cache, it is correct.
        OTHER_REPLIES: The text of another reply changes the logits, or the reply is wrong only when generated
            together with others.
        NOT_REPEATABLE: The same passes give different logits each time.
        ENDING: The reply ended too early or too late.
        NOT_REPRODUCED: Rerunning the reply's own passes yields different tokens. A drafter may have changed
            the target's cache, or the acceptance rule may be wrong.
    """

    REJECTED_TOKENS = "rejected_tokens"
    STALE_CACHE = "stale_cache"
    OTHER_REPLIES = "other_replies"
    NOT_REPEATABLE = "not_repeatable"
    ENDING = "ending"
    NOT_REPRODUCED = "not_reproduced"


class PromptRead(NamedTuple):
    """A prompt that the target processed, and how many of its leading tokens were already cached."""

    tokens: Sequence[int]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class MadeReply:
    """A finished reply, with a record of how the target computed it.

    Attributes:
        reads: The prompts that the target has processed since the cache was empty, in order. The last one is
            the reply's prompt.
        rounds: The draft-and-verify rounds.
        tokens: The tokens of the reply.
        sampler: Returns a new sampler with the reply's settings, whose history is the prompt.
    """

    reads: Sequence[PromptRead]
    rounds: Sequence[Round]
    tokens: Sequence[int]
    sampler: Callable[[], Sampler]

    @property
    def has_rejected_tokens(self) -> bool:
        """Whether passes contained draft tokens that are not part of the reply."""
        return any(len(each.tokens) > len(_kept_nodes(each)) for each in self.rounds)

    @property
    def has_dropped_tokens(self) -> bool:
        """Whether rejected tokens or tokens of earlier prompts had to be removed from the cache."""
        return self.has_rejected_tokens or len(self.reads) > 1


class Replayed(NamedTuple):
    """The result of rerunning the passes of a reply.

    Attributes:
        position: Index of the first token that differs from the reply, or None if all are equal.
        digests: A digest of the logits at each position, up to the first difference.
        rows: The logits at up to 64 positions before `rows_end`, as float32 [tokens, vocab].
    """

    position: int | None
    digests: tuple[bytes, ...]
    rows: NDArray[np.float32]


class Judgement(NamedTuple):
    """The verdict on a reply that differs from plain decoding.

    Attributes:
        verdict: `rounding` or `fault`.
        reason: Why the reply is wrong. None for `rounding`.
        largest_difference: Largest difference between the logits of the reply's passes and those of
            single-token passes, up to the first differing token. None if it was not measured.
    """

    verdict: Verdict
    reason: Reason | None = None
    largest_difference: float | None = None


def _plain_rounds(made: MadeReply, count: int) -> list[Round]:
    """Return the plain-decoding rounds that compute the first `count` tokens of a reply."""
    starts_in_prompt = made.rounds[0].in_prompt_pass
    return [Round((0,), (-1,), (), 1, in_prompt_pass=starts_in_prompt and i == 0) for i in range(count)]


def replay(
    target: LanguageModel,
    made: MadeReply,
    filler: int | None = None,
    *,
    truncates: bool = False,
    rows_end: int = 0,
) -> Replayed:
    """Rerun the target passes of a reply over the reply's own tokens, in an empty context.

    Overwrites the target's KV cache.

    Args:
        target: The model that generated the reply.
        made: The reply to rerun.
        filler: Selects one of several sequences of filler tokens. They replace the tokens that should not
            affect the reply: rejected tokens, and tokens of earlier prompts that are not reused. If None,
            the passes contain the original tokens.
        truncates: Whether to commit whole chains and then truncate them to the accepted tokens, so that
            `commit` removes nothing. Otherwise, each pass ends with the same `commit` as in the reply.
        rows_end: Index after the last position whose logits are returned.
    """
    logits = _read_prompts(target, made, filler)
    sampler, rows, digests = made.sampler(), _LastRows(rows_end), list[bytes]()
    everything = np.arange(target.facts.vocab_size)
    last = made.reads[-1].tokens[-1]
    for each in made.rounds:
        expected = made.tokens[len(digests) : len(digests) + each.emitted]
        if not expected:
            break
        if logits is None or not each.in_prompt_pass:
            logits = target.verify(_tree(each, last, expected, filler, target, len(digests)))
        for node, token in zip(_kept_nodes(each), expected, strict=False):
            row = logits.at(node, everything).astype(np.float32)
            rows.add(len(digests), row)
            digests.append(hashlib.blake2b(row.tobytes(), digest_size=16).digest())
            if sampler.token(logits, node) != token:
                return Replayed(len(digests) - 1, tuple(digests), rows.stacked())
            sampler.push(token)
        _keep(target, each, truncates=truncates)
        last, logits = expected[-1], None
    is_whole = len(digests) == len(made.tokens)
    return Replayed(None if is_whole else len(digests), tuple(digests), rows.stacked())


class _LastRows:
    """Collects the logits of the last 64 positions before `end`."""

    def __init__(self, end: int) -> None:
        self._end, self._rows = end, list[NDArray[np.float32]]()

    def add(self, position: int, row: NDArray[np.float32]) -> None:
        if self._end - _MAX_ROWS <= position < self._end:
            self._rows.append(row)

    def stacked(self) -> NDArray[np.float32]:
        return np.stack(self._rows) if self._rows else np.zeros((0, 0), np.float32)


def _read_prompts(target: LanguageModel, made: MadeReply, filler: int | None) -> Logits | None:
    """Clear the context, and process the prompt in the same steps as for the reply.

    If `filler` is given, its tokens replace those of earlier prompts that are not reused.
    """
    _renew_context(target)
    target.run_ahead(False)
    target.pipeline_with(None)
    logits: Logits | None = None
    widest = max((len(each.tokens) for each in made.rounds), default=1)
    needed = max(len(each.tokens) for each in made.reads) + len(made.tokens) + widest
    if needed > target.facts.context_tokens:
        # The context may have shrunk since the reply. Even if it cannot grow back, the passes may still fit.
        with suppress(MemoryBudgetError):
            target.resize(needed)
    for read, later in zip(made.reads, (*made.reads[1:], None), strict=True):
        tokens = list(read.tokens)
        if later and filler is not None:
            reused = later.cached_tokens
            tokens[reused:] = _filler_tokens(target, filler, reused, len(tokens) - reused)
        target.truncate(read.cached_tokens)
        logits = read_prompt(target, tokens)
    return logits


def _filler_tokens(target: LanguageModel, filler: int, start: int, count: int) -> list[int]:
    """Return the filler's tokens for `count` positions. Fillers 0 and 1 differ at every position."""
    vocab = target.facts.vocab_size
    offset = 7 + filler * (vocab // 2)
    return [(offset + 31 * (start + i)) % vocab for i in range(count)]


def _renew_context(target: LanguageModel) -> None:
    """Clear the target's cache, and reallocate it if the backend can.

    KV cells left over from an error would otherwise affect the replay as well. llama.cpp reallocates a
    context only if its size changes, so we change the size twice.
    """
    target.truncate(0)
    size = target.facts.context_tokens
    smaller = round_up_to_block(size // 2)
    if smaller < size == round_up_to_block(size):
        # Contexts on workers cannot be resized, only cleared.
        with suppress(MemoryBudgetError):
            target.resize(smaller)
            target.resize(size)


def _kept_nodes(made: Round) -> tuple[int, ...]:
    """Return the nodes after which a token was emitted: the root and accepted nodes."""
    return (0, *made.path)[: made.emitted]


def _tree(
    made: Round, last: int, expected: Sequence[int], filler: int | None, target: LanguageModel, done: int
) -> TokenTree:
    tokens = [last, *made.tokens[1:]]
    if filler is not None:
        tokens[1:] = _filler_tokens(target, filler, done, len(tokens) - 1)
    for node, token in zip(made.path, expected, strict=False):
        tokens[node] = token
    return TokenTree(tuple(tokens), made.parents, (None,) * len(tokens), block_verifiable=False)


def _keep(target: LanguageModel, made: Round, *, truncates: bool) -> None:
    """Keep the emitted tokens of a round in the cache, except the last one."""
    path, width = made.path[: made.emitted - 1], len(made.tokens)
    capabilities = target.facts.capabilities
    is_chain = path == tuple(range(1, len(path) + 1)) and made.parents == tuple(range(-1, width - 1))
    can_truncate = capabilities.partial_truncate and capabilities.prefix_reuse_exact
    if truncates and is_chain and can_truncate and width > 1:
        length = target.length + 1 + len(path)
        target.commit(tuple(range(1, width)))
        target.truncate(length)
    else:
        target.commit(path)


def judge(target: LanguageModel, made: MadeReply, plain: MadeReply, position: int) -> Judgement:
    """Decide whether a reply differs from plain decoding because of rounding or a fault.

    Overwrites the target's KV cache.

    Args:
        target: The model that generated both replies.
        made: The reply to judge.
        plain: The plain-decoding reply, which its own replay has reproduced.
        position: Index of the first token that differs.
    """
    first = replay(target, made, 0, truncates=True, rows_end=position + 1)
    if first.position is not None:
        return Judgement("fault", _why_not_reproduced(target, made, first))
    if made.has_dropped_tokens and (leak := _find_leak(target, made, first)):
        return Judgement("fault", leak[0])
    alone = replace(plain, rounds=_plain_rounds(plain, position + 1), tokens=plain.tokens[: position + 1])
    single = replay(target, alone, rows_end=position + 1)
    if single.position is not None:
        return Judgement("fault", Reason.NOT_REPEATABLE)
    return Judgement("rounding", None, largest_difference(first.rows, single.rows))


def find_fault(
    target: LanguageModel, made: MadeReply, *, finds_leaks: bool = False
) -> tuple[Reason, int] | None:
    """Return why a reply is wrong and the position of the first wrong token, or None if it is correct.

    Overwrites the target's KV cache.

    Args:
        target: The model that generated the reply.
        made: The reply to check.
        finds_leaks: Whether to also check that tokens removed from the cache do not change a single bit of
            the logits.
    """
    first = replay(target, made, 0, truncates=True)
    if first.position is not None:
        return _why_not_reproduced(target, made, first), first.position
    return _find_leak(target, made, first) if finds_leaks else None


def _find_leak(target: LanguageModel, made: MadeReply, first: Replayed) -> tuple[Reason, int] | None:
    """Return why removed tokens change the logits and the first position where they do, or None.

    Args:
        target: The model that generated the reply.
        made: The reply to check.
        first: The result of `replay(target, made, 0, truncates=True)`.
    """
    second = replay(target, made, 1)
    if second.digests == first.digests:
        return None
    pairs = zip(first.digests, second.digests, strict=False)
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), len(second.digests))
    if replay(target, made, 0, truncates=True).digests != first.digests:
        return Reason.NOT_REPEATABLE, position
    return _why_dropped_tokens_matter(made), position


def _why_not_reproduced(target: LanguageModel, made: MadeReply, first: Replayed) -> Reason:
    if replay(target, made, 0, truncates=True).digests != first.digests:
        return Reason.NOT_REPEATABLE
    if made.has_dropped_tokens and replay(target, made).position is None:
        return _why_dropped_tokens_matter(made)
    return Reason.NOT_REPRODUCED


def _why_dropped_tokens_matter(made: MadeReply) -> Reason:
    return Reason.REJECTED_TOKENS if made.has_rejected_tokens else Reason.STALE_CACHE


class Alone:
    """Runs passes over a text while no other reply is in the context.

    Args:
        batch_tokens: Maximum number of prompt tokens per pass.
    """

    def __init__(self, batch_tokens: int = sys.maxsize) -> None:
        self.batch_tokens = batch_tokens

    def before_pass(self, model: LanguageModel) -> int:  # noqa: ARG002
        """Prepare the context for the next pass, and return how many prompt tokens the pass may contain."""
        return self.batch_tokens

    def verify(self, model: LanguageModel, tree: TokenTree) -> Logits:
        """Run a verify pass of `model`."""
        return model.verify(tree)


def logit_rows(
    model: LanguageModel, prompt: Sequence[int], reply: Sequence[int], passes: Alone | None = None
) -> NDArray[np.float32]:
    """Compute the logits along a reply with single-token passes.

    Overwrites the model's KV cache.

    Args:
        model: The model to run.
        prompt: Tokens of the prompt.
        reply: The first tokens of the reply.
        passes: Runs the passes. By default, a single pass prefills the prompt.

    Returns:
        The logits after the prompt's last token and after each token of `reply`, but at most the last 64
        rows, as float32 [tokens, vocab].
    """
    passes = passes or Alone()
    model.truncate(0)
    while model.length < len(prompt) - 1:
        end = min(model.length + passes.before_pass(model), len(prompt) - 1)
        model.prefill(prompt[model.length : end])
    everything = np.arange(model.facts.vocab_size)
    rows: list[NDArray[np.float32]] = []
    for token in (prompt[-1], *reply):
        passes.before_pass(model)
        logits = passes.verify(model, TokenTree.chain(token))
        rows.append(logits.at(0, everything).astype(np.float32))
        del rows[:-_MAX_ROWS]
        model.commit(())
    return np.stack(rows)


def largest_difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the largest absolute difference between two arrays, or infinity if one contains a NaN."""
    with np.errstate(invalid="ignore"):
        distance = np.where(a == b, np.float32(0), np.abs(a - b))
    return float(np.where(np.isnan(distance), np.float32(np.inf), distance).max(initial=0.0))
