"""Histories of a target, after which its head must draft like a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel
from edgespec.backends.optional_features import HeadModel
from edgespec.drafters.head_cache import HeadCache
from edgespec.engine.tree import TokenTree

Round: TypeAlias = tuple[str, int, bool]
# What happens to the target, a number that says how much of it, and whether the head drafts before.
ROUNDS = st.tuples(
    st.sampled_from(["say", "say", "say", "cut", "resize", "read"]), st.integers(0, 40), st.booleans()
)
# Tokens of the tiny models that are not control tokens begin here.
_FIRST_TOKEN = 3
# Tokens of a draft after the first.
_DRAFT = (60, 70, 80, 90)


def first_logits(head: HeadModel, cache: HeadCache, tokens: list[int], depth: int = 1) -> NDArray[np.float64]:
    """The head's logits for the first token of a draft, or for one token at each depth.

    Then commits the tokens before the draft, or discards the draft.
    """
    cache.begin(tokens)
    cache.prefill()
    assert cache.can_draft(8)
    lag = tokens[head.length :]
    draft = [*lag, *_DRAFT[: depth - 1]]
    vocab, rows, first = np.arange(head.facts.vocab_size), [], 0
    for width in range(len(lag), len(draft) + 1):
        logits = head.verify(TokenTree.chain(draft[0], draft[1:width]), first)
        rows.append(np.array(logits.at(width - first - 1, vocab)))
        first = width
    if len(tokens) % 2:
        head.commit(tuple(range(1, len(lag))))
    else:
        head.truncate(head.length)
    return np.concatenate(rows)


def check_history(
    load: Callable[[], LanguageModel],
    head_of: Callable[[LanguageModel], HeadModel],
    rounds: list[Round],
    seed: int,
    depth: int = 1,
) -> None:
    """After these rounds, a head drafts like one that is given all tokens at once."""
    random = np.random.default_rng(seed)
    target = load()
    vocab = target.facts.vocab_size

    def some(count: int) -> list[int]:
        return [int(token) for token in random.integers(_FIRST_TOKEN, vocab, count)]

    tokens = some(12)
    head = head_of(target)
    cache = HeadCache(head)
    target.prefill(tokens[:-1])
    cache.begin(tokens)
    for what, number, drafts in rounds:
        if drafts:
            first_logits(head, cache, tokens, depth)
        if what == "read":
            more = some(number)
            target.prefill(tokens[target.length :] + more[:-1] if more else [])
            tokens += more
        elif what == "say":
            # llama.cpp can undo eight tokens of some recurrent targets. If more are rejected, they replay the
            # accepted ones.
            draft = some(10)
            first = 4 if number % 2 else 0
            if first:
                target.verify(TokenTree.chain(tokens[-1], draft[: first - 1]))
            target.verify(TokenTree.chain(tokens[-1], draft), first)
            kept = number % 11
            target.commit(tuple(range(1, kept + 1)))
            tokens += [*draft[:kept], *some(1)]
        elif what == "cut" and target.length > 4:
            target.truncate(2 + number % (target.length - 2))
            tokens = [*tokens[: target.length], *some(1)]
            if not target.length:  # A recurrent target may have no earlier state.
                tokens += some(2)
                target.prefill(tokens[:-1])
        elif what == "resize" and target.length < 256:
            target.resize(256 + 256 * (number % 2))
    drafted = first_logits(head, cache, tokens, depth)
    fresh_target = load()
    fresh = head_of(fresh_target)
    fresh_target.prefill(tokens[:-1])
    expected = first_logits(fresh, HeadCache(fresh), tokens, depth)
    for each in (head, fresh, target, fresh_target):
        each.close()
    known = np.isfinite(expected)
    assert (known == np.isfinite(drafted)).all()
    assert np.abs(drafted[known] - expected[known]).max() < 5e-3
