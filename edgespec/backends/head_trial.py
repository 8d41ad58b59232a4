"""Run a newly loaded head once, to check its logits and to find out which hidden states it reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.tree import TokenTree
from edgespec.errors import ModelFileError
from edgespec.model.base import LanguageModel
from edgespec.model.optional_features import HeadModel, HiddenStateSource

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
# Maximum number of tokens of the text to use, and number of tokens between comparisons. Both are small,
# because the output matrices of several heads take most of the time on a CPU.
_TRIAL_TOKENS, _STEP_TOKENS = 64, 8


def check_finite(head: LanguageModel, path: Path) -> None:
    """Run one token, and raise ModelFileError if the logits are not finite."""
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
    """Return the head that most often predicts the target's top token. On a tie, return the first.

    A head's configuration is ambiguous about which hidden states it reads and about the order of its inputs.
    A wrong choice raises no error, but lowers the acceptance rate. We therefore load the head once per
    possibility and compare the variants on a short text. The comparison stops as soon as one is clearly
    better than the others.

    Args:
        target: The target. Its cache must be empty.
        choices: The variants of the head, most likely first. All but the best are closed.
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
    tokens = tokens[: min(_TRIAL_TOKENS, target.free_tokens)]
    if len(heads) == 1 or target.length or len(tokens) < 2:
        return heads[0]
    step = min(_STEP_TOKENS, heads[0].facts.capabilities.max_width)
    for head in heads:
        head.start_at(1)
    remaining = [(head, 0) for head in heads]
    try:
        for begin in range(0, len(tokens), step):
            end = min(begin + step, len(tokens))
            logits = target.verify(TokenTree.chain(tokens[begin], tokens[begin + 1 : end]))
            best = [logits.best(row, 1)[0] for row in range(end - begin)]
            target.commit(tuple(range(1, end - begin)))
            counts = [count + _agreement(head, tokens[:end], best) for head, count in remaining]
            least = max(counts) - _TIE_TOKENS
            remaining = [
                (head, count) for (head, _), count in zip(remaining, counts, strict=True) if count >= least
            ]
            if len(remaining) == 1:
                break
        return remaining[0][0]
    finally:
        for head in heads:
            head.truncate(0)
        target.truncate(0)


def _agreement(head: HeadModel, tokens: Sequence[int], best: Sequence[Sequence[int]]) -> int:
    """Count how many of the target's top tokens the head predicts.

    Args:
        head: The head. It must have processed only the tokens of the preceding calls.
        tokens: The tokens that the target has processed.
        best: The target's top token after each of the last `len(best)` tokens.
    """
    # The head cannot run the first token, because no hidden state precedes it.
    begin = max(1, len(tokens) - len(best))
    if begin == len(tokens):
        return 0
    if head.length < begin:
        head.prefill(tokens[head.length : begin])
    logits = head.verify(TokenTree.chain(tokens[begin], tokens[begin + 1 :]))
    expected = best[begin - len(tokens) :]
    agreed = sum(logits.best(row, 1)[0] == token for row, token in enumerate(expected))
    head.commit(tuple(range(1, len(expected))))
    return agreed
