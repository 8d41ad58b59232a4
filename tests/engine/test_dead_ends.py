"""A draft does not end a reply with an error if plain decoding continues or ends normally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.errors import BackendError
from edgespec.methods.base import Drafter
from edgespec.methods.lookahead.drafter import LookaheadDrafter, LookaheadWindow
from edgespec.model.model_facts import Capabilities
from tests.raising import raises
from tests.tables import END, VOCAB, Saying, knowing, table, with_drafter

PROMPT = [3, 1, 2, 3, 0, 1]
RULES = pytest.mark.parametrize("acceptance", ["invariant", "rejection"])
CAUSES = pytest.mark.parametrize("not_finite", [False, True], ids=["forbidden", "NaN"])


class DeadEnd(LogitsProcessor):
    """Rules out every token after a token."""

    def __init__(self, token: int) -> None:
        self._token, self._path = token, list[int]()

    def push(self, token: int) -> None:
        self._path.append(token)

    def pop(self, count: int) -> None:
        del self._path[len(self._path) - count :]

    def apply(self, candidates: Candidates) -> Candidates:
        tokens, logits = candidates
        return (tokens[:0], logits[:0]) if self._path[-1:] == [self._token] else candidates


def reply(
    drafter: Drafter,
    method: str,
    token: int,
    end: float = -50.0,
    *,
    not_finite: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Return a reply in which nothing may follow `token`, and how it ended.

    If `not_finite` is set, the reason is that the logits after `token` are NaN.
    """
    target = table(1, end=end)
    target._table[:, 3] = -50.0
    if not_finite and token >= 0:
        target._table[token::VOCAB] = np.nan
    processors = [] if not_finite else [DeadEnd(token)]
    options = {"temperature": 0.0, "max_tokens": 30, "seed": 1} | options
    with with_drafter(target, drafter) as made:
        said = made.stream_tokens(PROMPT, method=method, processors=processors, **options).wait()
        return said.tokens, said.finish_reason


GUESSES: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: Saying(lambda tokens, length: [3] * length),
    "lookahead": lambda: LookaheadDrafter(Capabilities(True, True), window=LookaheadWindow(3, 3, 2)),
}


@RULES
@CAUSES
@pytest.mark.parametrize("name", GUESSES)
def test_a_guess_that_the_target_never_chooses(name: str, acceptance: str, not_finite: bool) -> None:
    options: dict[str, Any] = {"acceptance": acceptance, "not_finite": not_finite}
    expected = reply(GUESSES[name](), "none", 3, **options)
    assert reply(GUESSES[name](), "lookahead", 3, **options) == expected


@RULES
@CAUSES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_guess_that_the_target_could_have_chosen(
    acceptance: str, temperature: float, not_finite: bool
) -> None:
    """Nothing follows the end token, so it is the last token of every accepted draft."""
    ending = Saying(lambda tokens, length: [END] * length)
    for seed in range(20):
        options: dict[str, Any] = {"acceptance": acceptance, "temperature": temperature, "seed": seed}
        options |= {"not_finite": not_finite}
        tokens, reason = reply(ending, "lookahead", END, 1.0, **options)
        assert reason == ("stop" if END in tokens else "length")


@RULES
@CAUSES
def test_a_reply_that_ends_with_the_dead_end(acceptance: str, not_finite: bool) -> None:
    tokens, _ = reply(Saying(lambda *_: []), "none", -1)
    known, last = [*PROMPT, *tokens], tokens[3]
    options: dict[str, Any] = {"stop": chr(ord("a") + last), "acceptance": acceptance}
    options |= {"not_finite": not_finite}
    expected = reply(knowing(known), "none", last, **options)
    assert expected[1] == "stop"
    assert reply(knowing(known), "lookahead", last, **options) == expected


@RULES
@CAUSES
def test_a_reply_that_goes_on_after_the_dead_end_fails_as_in_plain_decoding(
    acceptance: str, not_finite: bool
) -> None:
    tokens, _ = reply(Saying(lambda *_: []), "none", -1)
    for method in ("none", "lookahead"):
        with raises(BackendError, code="logits_not_finite" if not_finite else "every_token_forbidden"):
            reply(
                knowing([*PROMPT, *tokens]), method, tokens[3], acceptance=acceptance, not_finite=not_finite
            )
