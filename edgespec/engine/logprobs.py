"""Log-probabilities of emitted tokens, from the target's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edgespec.engine.logits import Logits

__all__ = ["TokenLogprob", "token_logprob", "token_logprobs"]


class TokenLogprob(NamedTuple):
    """A token's log-probability, and those of the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: Logits, row: int, token: int, count: int) -> TokenLogprob:
    """Return the log-probability of a token and of the `count` most likely tokens.

    The log-probabilities are the model's own, before constraints, penalties, temperature and filters.

    Args:
        logits: The logits of the target's pass.
        row: The row of the preceding token.
        token: The token.
        count: Number of most likely tokens. Equally likely tokens are sorted by id.
    """
    _, values = logits.top(row, 0)
    peak = values.max()
    total = peak + np.log(np.exp(values - peak).sum())
    best: list[int] = []
    if count:
        tokens, largest = logits.top(row, count)
        best = tokens[np.argsort(-largest, kind="stable")[:count]].tolist()
    return TokenLogprob(
        token, float(values[token] - total), tuple((each, float(values[each] - total)) for each in best)
    )


def token_logprobs(
    logits: Logits, nodes: Sequence[int], tokens: Sequence[int], count: int
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of emitted tokens. See `token_logprob`.

    Args:
        logits: The logits of the target's pass.
        nodes: The root and the accepted nodes of the draft tree. Can be longer than `tokens`.
        tokens: The emitted tokens. Each one follows the node at the same index.
        count: Number of most likely tokens.
    """
    pairs = zip(nodes, tokens, strict=False)
    return tuple(token_logprob(logits, node, token, count) for node, token in pairs)
