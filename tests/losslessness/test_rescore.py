"""Near-ties are differences that the measured rounding error explains."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.engine.logits import HostLogits
from edgespec.engine.sampling_params import SamplingParams
from edgespec.losslessness.rescore import MAX_ROUNDING_ERROR, Rescored, is_near_tie, rescore, score_gap


class TestNearTies:
    """Two logits a gap apart, an error that does or does not decide between them."""

    GREEDY = SamplingParams(temperature=0.0)

    def rescored(self, row: list[float], error: float) -> Rescored:
        return Rescored(np.array(row, np.float32), [], error)

    @pytest.mark.parametrize(("error", "expected"), [(0.04, False), (0.06, True), (0.2, True), (1.5, False)])
    def test_greedy(self, error: float, expected: bool) -> None:
        rescored = self.rescored([1.0, 0.9, -5.0], error)
        assert is_near_tie(rescored, self.GREEDY, 0, [0], 0, 1) is expected
        assert score_gap(rescored.plain, self.GREEDY, 0, [0], 0, 1) == pytest.approx(0.1)

    def test_a_third_token_is_no_near_tie(self) -> None:
        assert not is_near_tie(self.rescored([1.0, 0.99, 1.5], 0.05), self.GREEDY, 0, [0], 0, 1)

    def test_a_token_at_the_bound_of_a_filter(self) -> None:
        """The second token is out by a hair of min-p, and in by a hair more; the noise prefers it."""
        row = [1.0, 1.0 + math.log(0.5) - 0.01, -5.0]
        params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.5)
        opened = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.4)
        from edgespec.engine.sampling import Sampler

        logits = HostLogits(np.array([row], np.float32))
        seed = next(s for s in range(100) if Sampler(opened, s, [0]).token(logits, 0) == 1)
        assert is_near_tie(self.rescored(row, 0.01), params, seed, [0], 0, 1)
        assert not is_near_tie(self.rescored(row, 0.001), params, seed, [0], 0, 1)

    def test_nan_is_no_near_tie(self) -> None:
        assert not is_near_tie(self.rescored([1.0, 0.9, 0.0], math.inf), self.GREEDY, 0, [0], 0, 1)
        assert not is_near_tie(self.rescored([1.0, 0.9, 0.0], math.nan), self.GREEDY, 0, [0], 0, 1)


@pytest.mark.parametrize(("kv_type", "rounds"), [("auto", False), ("f16", True)])
def test_rescore_with_other_batch_sizes(demo_target: Path, kv_type: str, rounds: bool) -> None:
    """A cache with one kernel for all widths agrees to the bit, however a text came to be read."""
    tokens = np.random.default_rng(0).integers(512, 4096, 400).tolist()
    with edgespec.load(str(demo_target), "none", kv_type=kv_type, method="none") as plain:
        stream = plain.stream_tokens(tokens, max_tokens=1)
        list(stream)
        with plain.borrowed_target() as target:
            rescored = rescore(target, tokens[:380], tokens[380:], [4], batch_sizes=[48, 300])
    assert (rescored.error > 0) is rounds
    assert rescored.error < MAX_ROUNDING_ERROR
