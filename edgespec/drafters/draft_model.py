"""What drafters that run a model of their own do alike: what it is given, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.base import LanguageModel
from edgespec.engine.logits import Logits
from edgespec.engine.processors import Candidates

__all__ = ["is_sure", "known", "sureness"]

_LOOKED_AT = 64


def known(model: LanguageModel, tokens: Sequence[int]) -> list[int]:
    """Tokens with a stand-in for ids that the model lacks: its guess may be bad then, not impossible."""
    size = model.facts.vocab_size
    return [token if token < size else 0 for token in tokens]


def sureness(logits: Logits, row: int) -> Candidates:
    """The model's own probabilities of its 64 best tokens, at temperature 1: (ids ascending, float64).

    They add up to 1: the rest counts as nothing.
    """
    tokens, values = logits.top(row, _LOOKED_AT)
    weights = np.exp(values - values.max())
    return tokens, weights / weights.sum()


def is_sure(logits: Logits, row: int, token: int, least: float) -> bool:
    """Whether a token has at least the probability `least`, from 0 to 1, by `sureness`."""
    if least <= 0.0:
        return True
    tokens, probs = sureness(logits, row)
    return bool(probs[tokens == token].sum() >= least)
