"""Replies with a minimum length, which benchmarks use to compare replies of the same length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec import Reply, Runtime
from edgespec.engine.processors import MinTokens
from edgespec.errors import OptionError
from tests.api.questions import HOWTO, METHODS, equal
from tests.raising import raises

SHORT = "hi"  # The reply to this is short.


@pytest.mark.long
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_drafts_do_not_change_the_tokens(
    demo: Runtime, plain: Callable[..., Reply], method: str, sampling: dict[str, Any]
) -> None:
    for prompt in (HOWTO, SHORT):
        options = {**sampling, "min_tokens": 90, "max_tokens": 120}
        reply = demo.generate(prompt, method=method, **options)
        equal(reply, plain(prompt, **options))
        assert len(reply.tokens) >= 90


def test_the_reply_can_end_after_the_minimum(demo: Runtime, plain: Callable[..., Reply]) -> None:
    usual = plain(SHORT, temperature=0.0, max_tokens=400)
    assert usual.finish_reason == "stop"
    length = len(usual.tokens)
    for minimum in (1, length - 1):
        assert (
            demo.generate(SHORT, temperature=0.0, max_tokens=400, min_tokens=minimum).tokens == usual.tokens
        )
    longer = demo.generate(SHORT, temperature=0.0, max_tokens=400, min_tokens=length + 20)
    assert longer.tokens[: length - 1] == usual.tokens[:-1]
    assert len(longer.tokens) >= length + 20


def test_a_constraint_can_end_the_reply_earlier(demo: Runtime) -> None:
    reply = demo.generate(HOWTO, choice=("yes", "no"), min_tokens=50)
    assert reply.text in ("yes", "no")


def test_removed_tokens_are_counted_back() -> None:
    processor = MinTokens([3, 1], 2)
    tokens, logits = np.arange(5), np.zeros(5)

    def allowed() -> list[int]:
        return list(map(int, processor.apply((tokens, logits))[0]))

    assert allowed() == [0, 2, 4]
    assert processor.touched_tokens(3).tolist() == [1]
    processor.push(0)
    processor.push(0)
    assert allowed() == [0, 1, 2, 3, 4]
    assert not len(processor.touched_tokens(5))
    processor.pop(1)
    assert allowed() == [0, 2, 4]


def test_the_minimum_is_checked(demo: Runtime) -> None:
    with raises(OptionError, option="min_tokens"):
        demo.generate(HOWTO, min_tokens=-1)
