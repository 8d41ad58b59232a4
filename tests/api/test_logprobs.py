"""Log-probabilities are those of plain decoding with every method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

import edgespec
from edgespec import Reply, Runtime
from edgespec.engine.tree import TokenTree
from tests.api.questions import HOWTO, REPEATS
from tests.backends.contract import ROUNDING
from tests.cases import covering
from tests.raising import raises

METHODS = ("model", "suffix", "model+suffix", "grammar")
# Kernels can give slightly different logits for different numbers of tokens.
ERRORS = {"demo": ROUNDING["demo"], "demo-mlx": 1e-3}


@pytest.fixture(scope="module", params=["demo", "demo-mlx-draft"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with edgespec.load(
        request.param, "demo-draft", method="model", methods=METHODS, draft_branches=(2, 2), context=1024
    ) as runtime:
        yield runtime


def flat(reply: Reply) -> tuple[list[int], list[float]]:
    """Return all tokens of the reply's log-probabilities and their values."""
    each = [part for logprob in reply.logprobs for part in (logprob, *logprob.top)]
    return [part.token for part in each], [part.logprob for part in each]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "temperature"), covering([{}, {"regex": "(one|two) [a-z]{4,9} [0-9]{2}"}], [0.8, 0.0])
)
def test_every_method_reports_those_of_plain_decoding(
    runtime: Runtime, temperature: float, options: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {
        **options,
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 20,
        "logprobs": 4,
    }
    error = ERRORS["demo-mlx" if "mlx" in runtime.target.name else "demo"]
    plain = runtime.generate(REPEATS, method="none", **settings)
    for method in METHODS:
        reply = runtime.generate(REPEATS, method=method, **settings)
        assert reply.tokens == plain.tokens
        assert tuple(each.token for each in reply.logprobs) == reply.tokens
        tokens, values = flat(reply)
        plain_tokens, plain_values = flat(plain)
        assert tokens == plain_tokens
        np.testing.assert_allclose(values, plain_values, rtol=0, atol=error)


def test_they_are_those_of_the_model_itself(runtime: Runtime) -> None:
    """Constraints, the temperature and filters do not change them."""
    prompt = runtime.vocabulary.tokenize("Once upon a time", special=False, start=True)
    stream = runtime.stream_tokens(
        prompt, regex="[a-z ]{20}", temperature=2.0, top_k=2, seed=1, logprobs=2, max_tokens=6, method="model"
    )
    reply = stream.wait()
    with runtime.borrowed_target() as target:
        target.prefill(prompt[:-1])
        last = prompt[-1]
        for each in reply.logprobs:
            row = target.verify(TokenTree.chain(last)).at(0, np.arange(target.facts.vocab_size))
            target.commit(())
            expected, last = log_softmax(row), each.token
            assert each.logprob == pytest.approx(expected[each.token], abs=2e-3)
            assert each.top[0].logprob == pytest.approx(expected.max(), abs=2e-3)


def test_chunks_have_those_of_their_tokens(runtime: Runtime) -> None:
    stream = runtime.stream(HOWTO, method="model", seed=1, max_tokens=20, logprobs=0)
    chunks = list(stream)
    assert all(len(chunk.logprobs) == chunk.token_count for chunk in chunks)
    assert tuple(each for chunk in chunks for each in chunk.logprobs) == stream.reply.logprobs
    assert all(each.top == () for each in stream.reply.logprobs)
    text = "".join(each.text for each in stream.reply.logprobs[:-1])
    assert stream.reply.text.startswith(text)


def test_they_are_computed_only_on_request(runtime: Runtime) -> None:
    reply = runtime.generate(HOWTO, max_tokens=3, seed=1)
    assert reply.logprobs == ()
    assert "logprobs" not in reply.to_json()
    with raises(edgespec.EdgespecError, "integer", code="option_invalid"):
        runtime.generate(HOWTO, logprobs=21)
