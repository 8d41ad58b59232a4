"""Run a newly loaded head, to check its logits and to find out which hidden states it reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel
from edgespec.backends.optional_features import HeadModel, HiddenStateSource
from edgespec.engine.tree import TokenTree
from edgespec.errors import ModelFileError

__all__ = ["check_finite", "check_finite_logits", "load_most_accurate"]

H = TypeVar("H", bound=HeadModel)
# Text used by `load_most_accurate` to compare heads that read different hidden states.
_TRIAL_TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome. To list the files of a folder by size,"
    " run `ls -lS`. def add(a, b):\n    return a + b\n\nOnce upon a time, there was a"
)
# Heads whose numbers of correct predictions differ by no more than this are considered equally accurate.
# Heads with random weights differ by 1 or 2, while reading the wrong inputs costs most predictions.
_TIE_TOKENS = 2


def check_finite(head: LanguageModel, path: Path) -> None:
    """Run one token, and raise ModelFileError if its logits are not finite."""
    logits = head.verify(TokenTree.chain(0)).at(0, np.arange(head.facts.vocab_size))
    head.truncate(0)
    check_finite_logits(logits, path)


def check_finite_logits(logits: NDArray[np.floating], path: Path) -> None:
    """Raise ModelFileError if a head's logits are not finite. `path` is the head's path."""
    # Allow -inf, which is the logit of tokens outside the head's draft vocabulary.
    if np.isnan(logits).any() or not np.isfinite(logits).any():
        raise ModelFileError(
            f"the head {path} is damaged: its logits are not finite",
            "download it again, or use --head none",
        )


def load_most_accurate(target: HiddenStateSource, choices: Iterable[H], folder: Path) -> H:
    """Return the head that most often predicts the target's most likely token. On a tie, return the first.

    The configuration of a head does not say unambiguously which hidden states it reads and in which order it
    reads its inputs. A wrong choice raises no error, but lowers the acceptance rate. We therefore load a head
    for each possibility, and compare the heads on a short text.

    Args:
        target: The target. Its cache must be empty.
        choices: The head, loaded in each possible way, most likely first. All but the best are closed.
        folder: Folder of the head, for error messages.

    Raises:
        ModelFileError: The head is damaged.
    """
    heads: list[H] = []
    best = None
    try:
        heads.extend(choices)
        check_finite(heads[0], folder)
        best = _most_accurate(target, heads)
        return best
    finally:
        for head in heads:
            if head is not best:
                head.close()


def _most_accurate(target: HiddenStateSource, heads: Sequence[H]) -> H:
    tokens = target.vocabulary.tokenize(_TRIAL_TEXT, special=False, start=True)
    tokens = tokens[: min(heads[0].facts.capabilities.max_width, target.free_tokens)]
    if len(heads) == 1 or target.length or len(tokens) < 2:
        return heads[0]
    try:
        logits = target.verify(TokenTree.chain(tokens[0], tokens[1:]))
        best = [logits.best(row, 1)[0] for row in range(1, len(tokens))]
        target.commit(tuple(range(1, len(tokens))))
        agreements = [_agreement(head, tokens, best) for head in heads]
        tied = [agreed >= max(agreements) - _TIE_TOKENS for agreed in agreements]
        return heads[tied.index(True)]
    finally:
        target.truncate(0)


def _agreement(head: HeadModel, tokens: Sequence[int], best: Sequence[Sequence[int]]) -> int:
    """Return how often the head predicts the target's most likely token after each of `tokens[1:]`."""
    head.start_at(1)
    logits = head.verify(TokenTree.chain(tokens[1], tokens[2:]))
    agreed = sum(logits.best(row, 1)[0] == best[row] for row in range(len(best)))
    head.truncate(0)
    return agreed
