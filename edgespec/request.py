"""What a reply is asked for: options from outside, checked once and frozen."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.backends.base import ModelFacts
from edgespec.checks import check_integer
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import ContextFullError, OptionError
from edgespec.methods import parse_method

__all__ = ["ACCEPTANCES", "MAX_DRAFT_LENGTH", "USUAL_REPLY_TOKENS", "Defaults", "Request", "make_request"]

MAX_DRAFT_LENGTH = 64
ACCEPTANCES = ("invariant", "rejection")
_DRAFT_LENGTH = 4
_ADAPTIVE_LENGTH = 16
_NO_LIMIT = (1 << 63) - 1
# A reply that nobody bounded ends here at the latest: one that repeats itself would fill any context.
USUAL_REPLY_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Defaults:
    """How replies are produced when a request does not say. Raises OptionError.

    draft_length: None is 4, and up to 16 for drafters that choose themselves.
    """

    method: str = "auto"
    draft_length: int | None = None
    acceptance: str = "invariant"

    def __post_init__(self) -> None:
        parse_method(self.method)
        if self.draft_length is not None:
            check_integer("draft_length", self.draft_length, 1, MAX_DRAFT_LENGTH, ", or method none")
        if self.acceptance not in ACCEPTANCES:
            raise OptionError(f"acceptance is {self.acceptance!r}", f"choose {' or '.join(ACCEPTANCES)}")

    def levels(self, adapts: bool) -> int:
        """How many levels a drafter is asked for; adapts: it drafts no more of them than pay."""
        return self.draft_length or (_ADAPTIVE_LENGTH if adapts else _DRAFT_LENGTH)

    def but(self, method: str | None, draft_length: int | None, acceptance: str | None) -> Defaults:
        """These defaults with what is not None put in their place."""
        return Defaults(
            self.method if method is None else method,
            self.draft_length if draft_length is None else draft_length,
            self.acceptance if acceptance is None else acceptance,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that decides a reply, and how it is to be produced."""

    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    how: Defaults


def make_request(
    tokens: Sequence[int],
    facts: ModelFacts,
    how: Defaults,
    *,
    context_tokens: int,
    max_tokens: int | None,
    seed: int | None,
    stop: Sequence[str],
    sampling: dict[str, Any],
) -> Request:
    """A request that the model can serve in so large a context. Raises OptionError and ContextFullError.

    max_tokens: None is 8,192, or to the end of the context.
    """
    if not tokens:
        raise OptionError("the prompt is empty", "give at least one word")
    if len(tokens) > context_tokens:
        raise ContextFullError(
            f"the prompt is {len(tokens)} tokens long and the context holds {context_tokens}",
            f"shorten it or use --context {len(tokens) // 256 * 256 + 512}",
        )
    if max_tokens is not None:
        check_integer("max_tokens", max_tokens, 1, _NO_LIMIT)
    if seed is not None:
        check_integer("seed", seed, 0, _NO_LIMIT)
    params = _sampling_params(sampling)
    for what, ids in (("prompt", tokens), ("logit_bias", params.logit_bias)):
        foreign = next((token for token in ids if not 0 <= token < facts.vocab_size), None)
        if foreign is not None:
            raise OptionError(
                f"the {what} names token {foreign} and {facts.name} has {facts.vocab_size} tokens",
                "use token ids of this model's own vocabulary",
            )
    return Request(
        tokens=tuple(tokens),
        params=params,
        seed=secrets.randbits(32) if seed is None else seed,
        max_tokens=max_tokens or min(context_tokens, USUAL_REPLY_TOKENS),
        stop=_stop_strings(stop),
        how=how,
    )


def _sampling_params(sampling: dict[str, Any]) -> SamplingParams:
    for name in sampling:
        if name not in SamplingParams.names():
            near = difflib.get_close_matches(name, SamplingParams.names(), 1)
            raise OptionError(
                f"option {name!r} is unknown",
                f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SamplingParams.names())}",
            )
    return SamplingParams(**sampling)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
        raise OptionError(f"stop is {stop!r}", "give texts of at least one character")
    return tuple(stop)
