"""Several MTP layers draft one token each, and change no reply."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.mtp_files import read_mtp_layers
from edgespec.methods.draft_cache import HeadCache
from tests.backends.head_histories import ROUNDS, Round, check_history, first_logits
from tests.backends.mtp.targets import Files, head_of
from tests.cases import first

CHAINS = {"hy_v3": 3, "step35": 2, "mimo2": 4}


@pytest.fixture(scope="module", params=CHAINS)
def chained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A target with several MTP layers."""
    return Files(tmp_path_factory.mktemp("chained"), request.param, CHAINS[request.param])


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROUNDS, min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_several_layers_draft_after_any_history_like_fresh_ones(
    chained: Files, rounds: list[Round], seed: int
) -> None:
    check_history(chained.load, head_of, rounds, seed, depth=5)


def test_each_layer_drafts_one_token_further(chained: Files) -> None:
    """The first token comes from the first layer alone, and later ones from others."""
    tokens = list(range(10, 40))
    found = []
    for count in (read_mtp_layers(chained.target).count, 1):
        target = chained.load()
        head = head_of(target)
        assert isinstance(head, PairHead)
        head._layers = count
        target.prefill(tokens[:-1])
        found.append(first_logits(head, HeadCache(head), tokens, depth=2).reshape(2, -1))
        head.close()
        target.close()
    assert np.array_equal(found[0][0], found[1][0])
    assert np.abs(found[0][1] - found[1][1]).max() > 0.1


@pytest.mark.parametrize("branches", [(), (2, 2)])
@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_several_layers_change_no_reply(
    chained: Files, branches: tuple[int, ...], temperature: float
) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    options: dict[str, Any] = {"methods": ["none", "mtp"], "draft_branches": branches, "context": 256}
    with always_draft(), edgespec.load(str(chained.target), "none", **options) as runtime:
        reply = runtime.generate("the file", method="mtp", **asked)
        assert reply.tokens == runtime.generate("the file", method="none", **asked).tokens
        assert 0 < reply.stats.accepted_tokens < reply.stats.drafted_tokens
