"""A validated request for a reply, with its prompt tokens, sampling parameters and drafting method."""

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
from edgespec.method_names import parse_method
from edgespec.options import ACCEPTANCES, MAX_DRAFT_LENGTH

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MethodOptions",
    "Request",
    "build_request",
]

# Default maximum length of a reply, in tokens. Without it, a reply stuck in a loop would fill the whole
# context.
DEFAULT_MAX_TOKENS = 8192
# Default fixed draft length, and default maximum for a length that adapts to the text, in tokens.
_FIXED_DRAFT_LENGTH = 4
_MAX_ADAPTIVE_DRAFT_LENGTH = 16
_MAX_INTEGER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """How drafts are made and accepted.

    Attributes:
        method: `auto`, `none`, or names of drafters joined by `+`.
        draft_length: Draft depth in tokens. Defaults to 4 if None, or to at most 16 for drafters that adapt
            it to the text.
        acceptance: `invariant` or `rejection`, see the acceptance rules in the design document.

    Raises:
        OptionError: A value is invalid.
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

    def max_draft_length(self, adapts: bool) -> int:
        """Return the maximum draft length in tokens. `adapts` says whether the drafter adapts the length."""
        return self.draft_length or (_MAX_ADAPTIVE_DRAFT_LENGTH if adapts else _FIXED_DRAFT_LENGTH)

    def override(self, method: str | None, draft_length: int | None, acceptance: str | None) -> MethodOptions:
        """Return a copy of these options, replaced by those arguments that are not None."""
        return MethodOptions(
            self.method if method is None else method,
            self.draft_length if draft_length is None else draft_length,
            self.acceptance if acceptance is None else acceptance,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that determines one reply.

    Attributes:
        tokens: The prompt.
        params: Temperature, filters and penalties.
        seed: Random seed of the reply.
        max_tokens: Maximum length of the reply.
        stop: Strings that end the reply.
        method_options: How drafts are made and accepted.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    method_options: MethodOptions


def build_request(
    tokens: Sequence[int],
    facts: ModelFacts,
    method_options: MethodOptions,
    *,
    context_tokens: int,
    max_tokens: int | None,
    seed: int | None,
    stop: Sequence[str],
    sampling: dict[str, Any],
) -> Request:
    """Check the options of a reply and return them as a `Request`.

    Args:
        tokens: The prompt.
        facts: The target model. All tokens must be in its vocabulary.
        method_options: How drafts are made and accepted.
        context_tokens: The context size in tokens. The prompt must fit in it.
        max_tokens: Maximum length of the reply. Defaults to 8192 tokens, or to the context size if smaller,
            if None.
        seed: Random seed. Chosen at random if None.
        stop: Strings that end the reply.
        sampling: Fields of `SamplingParams`.

    Raises:
        ContextFullError: The prompt is longer than the context.
        OptionError: An option is unknown or its value is invalid.
    """
    if not tokens:
        raise OptionError("the prompt is empty", "give at least one word")
    if len(tokens) > context_tokens:
        raise ContextFullError(
            f"the prompt is {len(tokens)} tokens long and the context holds {context_tokens}",
            f"shorten it or use --context {len(tokens) // 256 * 256 + 512}",
        )
    if max_tokens is not None:
        check_integer("max_tokens", max_tokens, 1, _MAX_INTEGER)
    if seed is not None:
        check_integer("seed", seed, 0, _MAX_INTEGER)
    params = _sampling_params(sampling)
    for option, ids in (("prompt", tokens), ("logit_bias", params.logit_bias)):
        unknown = next((token for token in ids if not 0 <= token < facts.vocab_size), None)
        if unknown is not None:
            raise OptionError(
                f"token {unknown} of the {option} is outside the vocabulary of {facts.name}",
                f"use token ids from 0 to {facts.vocab_size - 1}",
            )
    return Request(
        tokens=tuple(tokens),
        params=params,
        seed=secrets.randbits(32) if seed is None else seed,
        max_tokens=max_tokens or min(context_tokens, DEFAULT_MAX_TOKENS),
        stop=_stop_strings(stop),
        method_options=method_options,
    )


def _sampling_params(sampling: dict[str, Any]) -> SamplingParams:
    for name in sampling:
        if name not in SamplingParams.names():
            near = difflib.get_close_matches(name, SamplingParams.names(), 1)
            raise OptionError(
                f"option {name!r} is unknown",
                f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(SamplingParams.names())}",
            )
    return SamplingParams(**sampling)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
        raise OptionError(f"stop is {stop!r}", "give one or more strings of at least one character")
    return tuple(stop)
