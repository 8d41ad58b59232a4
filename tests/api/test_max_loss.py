"""A loss limit for a single reply (`max_loss`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import edgespec
from edgespec import RequestQueue, Runtime
from edgespec.errors import OptionError
from tests.api.questions import HOWTO
from tests.cases import first
from tests.raising import raises


@pytest.fixture(scope="module", params=[(), (3, 2)], ids=["chains", "trees"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    methods = ("auto", "model", "none")
    with edgespec.load("demo", context=512, methods=methods, draft_branches=request.param) as runtime:
        yield runtime


@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
@pytest.mark.parametrize("method", ["auto", "model"])
def test_a_limit_applies_to_one_reply_and_does_not_change_it(
    runtime: Runtime, method: str, temperature: float
) -> None:
    options: Any = {"max_tokens": 32, "temperature": temperature, "seed": 7}
    plain = runtime.generate(HOWTO, method="none", **options)
    usual = (0.02, 2.0) if method == "auto" else None
    for max_loss, limits in ((0.3, (0.3, 2.0)), (None, usual), (0.0, (0.0, 2.0))):
        reply = runtime.generate(HOWTO, method=method, max_loss=max_loss, **options)
        assert reply.tokens == plain.tokens
        assert reply.method.loss_limits == limits
        worst = None if limits is None else limits[0] + limits[1] / len(reply.tokens)
        assert reply.stats.worst_case_loss == (worst and pytest.approx(worst))


def test_mlx() -> None:
    options: Any = {"max_tokens": 24, "temperature": 0.8, "seed": 7}
    with edgespec.load(
        "demo-mlx-draft", "demo-draft", context=256, methods=("auto", "model", "none")
    ) as runtime:
        plain = runtime.generate(HOWTO, method="none", **options)
        reply = runtime.generate(HOWTO, method="model", max_loss=0.3, **options)
        assert (reply.tokens, reply.method.loss_limits) == (plain.tokens, (0.3, 2.0))


def test_meaningless_limits_are_refused(runtime: Runtime) -> None:
    with raises(OptionError, code="option_without_effect", option="max_loss"):
        runtime.generate(HOWTO, method="none", max_loss=0.1)
    with raises(OptionError, option="max_loss"):
        runtime.generate(HOWTO, max_loss=2.0)
    with RequestQueue(runtime) as queue, raises(OptionError, code="option_without_effect", option="max_loss"):
        queue.stream(HOWTO, method="none", max_loss=0.1)


def test_limits_need_measured_costs() -> None:
    with (
        edgespec.load("demo", method="model", context=256) as runtime,
        raises(OptionError, code="option_not_supported", option="max_loss"),
    ):
        runtime.generate(HOWTO, max_loss=0.1)
    with edgespec.load("demo", method="model", max_loss=0.1, context=256) as runtime:
        reply = runtime.generate(HOWTO, max_loss=0.2, max_tokens=8)
        assert reply.method.loss_limits == (0.2, 2.0)
        assert runtime.generate(HOWTO, max_tokens=8).method.loss_limits == (0.1, 2.0)
