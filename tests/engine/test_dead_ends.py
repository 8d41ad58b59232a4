"""A draft does not end a reply with an error where plain decoding goes on or ends normally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.errors import BackendError
from edgespec.methods.base import Drafter
from edgespec.methods.lookahead.drafter import LookaheadDrafter, LookaheadWindow
from edgespec.model.model_facts import Capabilities
from tests.raising import raises
from tests.tables import END, Saying, knowing, table, with_drafter

PROMPT = [3, 1, 2, 3, 0, 1]
RULES = pytest.mark.parametrize("acceptance", ["invariant", "rejection"])


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


def reply(drafter: Drafter, method: str, token: int, end: float = -50.0, **options: Any) -> tuple[Any, ...]:
    """Return a reply in which nothing may follow `token`, and how it ended."""
    target = table(1, end=end)
    target._table[:, 3] = -50.0
    options = {"temperature": 0.0, "max_tokens": 30, "seed": 1} | options
    with with_drafter(target, drafter) as made:
        said = made.stream_tokens(PROMPT, method=method, processors=[DeadEnd(token)], **options).wait()
        return said.tokens, said.finish_reason


GUESSES: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: Saying(lambda tokens, length: [3] * length),
    "lookahead": lambda: LookaheadDrafter(Capabilities(True, True), window=LookaheadWindow(3, 3, 2)),
}


@RULES
@pytest.mark.parametrize("name", GUESSES)
def test_a_guess_that_the_target_never_chooses(name: str, acceptance: str) -> None:
    expected = reply(GUESSES[name](), "none", 3, acceptance=acceptance)
    assert reply(GUESSES[name](), "lookahead", 3, acceptance=acceptance) == expected


@RULES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_guess_that_the_target_could_have_chosen(acceptance: str, temperature: float) -> None:
    """Nothing follows the end token, so that it is the last one of every accepted draft."""
    ending = Saying(lambda tokens, length: [END] * length)
    for seed in range(20):
        options = {"acceptance": acceptance, "temperature": temperature, "seed": seed}
        tokens, reason = reply(ending, "lookahead", END, 1.0, **options)
        assert reason == ("stop" if END in tokens else "length")


@RULES
def test_a_reply_that_ends_with_the_dead_end(acceptance: str) -> None:
    tokens, _ = reply(Saying(lambda *_: []), "none", -1)
    known, last = [*PROMPT, *tokens], tokens[3]
    options: dict[str, Any] = {"stop": chr(ord("a") + last), "acceptance": acceptance}
    expected = reply(knowing(known), "none", last, **options)
    assert expected[1] == "stop"
    assert reply(knowing(known), "lookahead", last, **options) == expected


@RULES
def test_a_reply_that_goes_on_after_the_dead_end_fails_as_in_plain_decoding(acceptance: str) -> None:
    tokens, _ = reply(Saying(lambda *_: []), "none", -1)
    for method in ("none", "lookahead"):
        with raises(BackendError, code="every_token_forbidden"):
            reply(knowing([*PROMPT, *tokens]), method, tokens[3], acceptance=acceptance)
