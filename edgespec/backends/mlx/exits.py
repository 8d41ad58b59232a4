"""How often each exit of a model agrees with the whole of it, measured on a short text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.base import LanguageModel
from edgespec.backends.mlx.model import MlxModel
from edgespec.errors import CapabilityError

__all__ = ["exit_facts"]


def exit_facts(
    model: LanguageModel, tokens: Sequence[int], first: int = 0
) -> tuple[dict[int, float], list[int], int]:
    """Try every exit on a text, in one pass through the layers; the cache is left as it is.

    Returns, by exit layer, how often its best token is the whole model's; the bytes of each layer; and the
    bytes of what a pass reads after the last one.
    tokens: 64 to 256 of ordinary text, judged from `first` on; they must fit the context. Raises
    CapabilityError where this model cannot be left early, ContextFullError.
    """
    if not isinstance(model, MlxModel):
        raise CapabilityError(f"{model.facts.name} cannot be left early", "choose another method")
    model.parts.check("layerskip", model.facts)
    said = model.best_by_exit(tokens)
    layers, head = model.parts.layer_bytes()
    agreements = {
        layer: float(np.mean((said[layer - 1] == said[-1])[first:])) for layer in range(1, len(layers))
    }
    return agreements, layers, head
