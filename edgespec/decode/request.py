"""A request for a reply, with validated options."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from edgespec.constraints import Constraint, constraint_from
from edgespec.engine.processors import LogitsProcessor
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import ContextFullError, OptionError
from edgespec.model.base import Progress
from edgespec.model.model_facts import ModelFacts
from edgespec.options.reply_options import CONSTRAINT_NAMES
from edgespec.options.settings import REPLY_OPTIONS, ReplyArguments, check_names

__all__ = [
    "Request",
    "StreamArguments",
    "build_request",
    "check_options",
    "default_max_tokens",
    "defaults_for",
]

# Default maximum reply length in tokens, so that a reply stuck in a loop does not fill the whole context.
_DEFAULT_MAX_TOKENS = 8192
_FIXED_DRAFT_LENGTH = 4
_MAX_ADAPTIVE_DRAFT_LENGTH = 16


class StreamArguments(ReplyArguments, total=False):
    """The options of a reply, and arguments available only in Python.

    Attributes:
        progress: Called while the prompt is prepared and during prefill. Returning False cancels the reply.
        processors: Custom logits processors, applied before all others. Create new ones for every reply.
        prompt_logprobs: Report the log-probability of each token of the prompt, and of this many of the most
            likely tokens at its position, in `Reply.prompt_logprobs`. `max_tokens` can then be 0.
    """

    progress: Progress | None
    processors: Sequence[LogitsProcessor]
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one reply: its prompt and options. `edgespec.ReplyArguments` describes most fields.

    Attributes:
        constraint: The constraint that the reply must satisfy, or None. A processor implements it.
        processors: The logits processors of the constraint and of the caller.
        prompt_logprobs: See `StreamArguments`.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    method: str
    draft_length: int | None
    acceptance: str
    adapter_scales: tuple[float, ...]
    min_tokens: int = 0
    max_loss: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    processors: tuple[LogitsProcessor, ...] = ()

    def max_draft_length(self, adapts: bool) -> int:
        """Return the maximum draft length in tokens. The default is larger for an adaptive drafter."""
        return self.draft_length or _default_draft_length(adapts)


def _default_draft_length(adapts: bool) -> int:
    return _MAX_ADAPTIVE_DRAFT_LENGTH if adapts else _FIXED_DRAFT_LENGTH


def build_request(
    tokens: Sequence[int],
    facts: ModelFacts,
    context_tokens: int,
    options: Mapping[str, Any],
    processors: Sequence[LogitsProcessor] = (),
    prompt_logprobs: int | None = None,
) -> Request:
    """Check the options of a reply and return them as a `Request`.

    Args:
        tokens: The prompt.
        facts: The target model, whose vocabulary must contain all tokens.
        context_tokens: Size of the context, which must be large enough for the prompt.
        options: The options, as in `ReplyArguments`. Missing options have their declared defaults.
        processors: Custom logits processors.
        prompt_logprobs: See `StreamArguments`.

    Raises:
        ContextFullError: The prompt is longer than the context.
        OptionError: An option is unknown or its value is invalid.
    """
    try:
        tokens = tuple(tokens)
    except TypeError:
        raise OptionError(
            f"the prompt must be a list of token ids, not {tokens!r}", "use `Runtime.stream` for text"
        ) from None
    if not tokens:
        raise OptionError("the prompt is empty", "enter at least one word")
    if len(tokens) > context_tokens:
        raise ContextFullError(
            f"the prompt has {len(tokens):,} tokens, but the context holds only {context_tokens:,}",
            f"shorten it or use --context {len(tokens) // 256 * 256 + 512}",
            prompt_tokens=len(tokens),
            context_tokens=context_tokens,
        )
    params, values = check_options(facts, options, prompt_logprobs)
    check_vocabulary("prompt", tokens, facts)
    if values["seed"] is None:
        values["seed"] = secrets.randbits(32)
    if values["max_tokens"] is None:
        values["max_tokens"] = default_max_tokens(context_tokens)
    # Drop `thinking`, which only affects how the prompt is rendered.
    del values["thinking"]
    values["adapter_scales"] = _adapter_scales(values["adapter_scales"], facts)
    return Request(tokens, params, processors=tuple(processors), **values)


def _adapter_scales(given: Mapping[str, float] | None, facts: ModelFacts) -> tuple[float, ...]:
    """Return the scale of each of the target's adapters for a reply. Raises OptionError."""
    if given is None:
        return tuple(adapter.scale for adapter in facts.adapters)
    names = [adapter.name for adapter in facts.adapters]
    for name in given:
        if name not in names:
            raise OptionError(
                f"{facts.name} was loaded without an adapter called {name!r}",
                f"use one of {', '.join(names)}" if names else "load the adapter with --adapter",
            )
    return tuple(given.get(name, 0.0) for name in names)


def default_max_tokens(context_tokens: int) -> int:
    """Return the default maximum reply length in tokens for a context of this size."""
    return min(context_tokens, _DEFAULT_MAX_TOKENS)


def defaults_for(values: Mapping[str, Any], adapts: bool | None, context_tokens: int) -> ReplyArguments:
    """Return the default values of the reply options whose defaults depend on the loaded models.

    Args:
        values: The runtime's values of `method`, `acceptance`, `draft_length`, and of the sampling settings
            that are recommended for the target.
        adapts: Whether the method's drafter chooses its own draft length. None if the method drafts nothing.
        context_tokens: Size of the context.
    """
    sampling = {name: values[name] for name in SamplingParams.names() if name in values}
    return ReplyArguments(
        **cast(ReplyArguments, sampling),
        method=values["method"],
        acceptance=values["acceptance"],
        max_tokens=default_max_tokens(context_tokens),
        draft_length=0 if adapts is None else values["draft_length"] or _default_draft_length(adapts),
    )


def check_options(
    facts: ModelFacts, options: Mapping[str, Any], prompt_logprobs: int | None = None
) -> tuple[SamplingParams, dict[str, Any]]:
    """Check the options of a reply. Return its sampling settings, and the values of the other options.

    The options that describe a constraint become a single value, `constraint`.

    Args:
        facts: The target model.
        options: The options, as in `ReplyArguments`.
        prompt_logprobs: See `StreamArguments`. Unless it is None, `max_tokens` can be 0.

    Raises:
        OptionError: An option is unknown or its value is invalid.
    """
    check_names(options, REPLY_OPTIONS)
    generates_nothing = prompt_logprobs is not None and options.get("max_tokens") == 0
    if generates_nothing:
        options = {**options, "max_tokens": None}
    sampling = SamplingParams.names()
    params = SamplingParams(**{name: value for name, value in options.items() if name in sampling})
    values = {
        name: option.check(name, options.get(name, option.default))
        for name, option in REPLY_OPTIONS.items()
        if name not in sampling
    }
    values["prompt_logprobs"] = REPLY_OPTIONS["logprobs"].check("prompt_logprobs", prompt_logprobs)
    if generates_nothing:
        values["max_tokens"] = 0
    values["constraint"] = constraint_from(values)
    for name in CONSTRAINT_NAMES:
        del values[name]
    check_vocabulary("logit_bias", params.logit_bias, facts)
    return params, values


def check_vocabulary(source: str, tokens: Iterable[Any], facts: ModelFacts) -> None:
    """Raise OptionError if a token is not in the model's vocabulary.

    Args:
        source: Name of the value that contains the tokens, such as `prompt`, for the error message.
        tokens: The token ids.
        facts: The model.
    """

    def is_token(value: Any) -> bool:
        return isinstance(value, Integral) and 0 <= int(value) < facts.vocab_size

    unknown = [value for value in tokens if not is_token(value)]
    if unknown:
        raise OptionError(
            f"token {unknown[0]!r} in the {source} is not in the vocabulary of {facts.name}",
            f"use token ids from 0 to {facts.vocab_size - 1}",
        )
