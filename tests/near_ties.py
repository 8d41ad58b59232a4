"""Score gaps between tokens, for comparing replies whose logits differ by a small error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.logits import HostLogits
from edgespec.engine.noise import Stream, gumbel
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams

__all__ = ["score_gap"]


def score_gap(
    row: NDArray[np.float32], params: SamplingParams, seed: int, history: Sequence[int], a: int, b: int
) -> float:
    """Return the difference between two tokens' scores, which are logits with penalties and random noise."""
    temperature = params.temperature or 1.0
    unfiltered = replace(params, temperature=temperature, **SamplingParams.disabled_filters())
    sampler = Sampler(unfiltered, seed, history)
    tokens, scores = sampler.scores(HostLogits(row[None]), 0)
    if params.temperature == 0:
        scores = scores - gumbel(seed, Stream.TOKEN, sampler.position, tokens)
    places = np.searchsorted(tokens, [a, b])
    return float(abs(scores[places[0]] - scores[places[1]])) * temperature
