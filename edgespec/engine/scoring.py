"""The log-probability of each token of a given text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.engine.logprobs import TokenLogprob, token_logprobs
from edgespec.engine.loop import Verifier
from edgespec.engine.tree import TokenTree

__all__ = ["score"]


def score(
    target: Verifier, tokens: Sequence[int], count: int, *, max_width: int
) -> Iterator[tuple[TokenLogprob, ...]]:
    """Compute the log-probability of each token of a text after the first, given the preceding tokens.

    Afterwards, the target's KV cache contains all tokens except the last.

    Args:
        target: The target. Its KV cache must be empty.
        tokens: The text.
        count: How many of the most likely tokens' log-probabilities to return at each position.
        max_width: Maximum number of tokens in a pass.

    Yields:
        The log-probabilities computed by one pass.
    """
    end = len(tokens) - 1
    for start in range(0, end, max_width):
        chain = tokens[start : min(start + max_width, end)]
        nodes = range(len(chain))
        logits = target.verify(TokenTree.chain(chain[0], chain[1:]))
        computed = token_logprobs(logits, nodes, tokens[start + 1 :], count)
        target.commit(tuple(nodes[1:]))
        yield computed
