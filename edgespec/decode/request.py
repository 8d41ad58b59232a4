"""A request for a reply, with validated options."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from edgespec.constraints import Constraint, constraint_from
from edgespec.decode.drafter_set import ReplyKind
from edgespec.engine.processors import LogitsProcessor
from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import ContextFullError, OptionError
from edgespec.methods.constants import FIXED_DRAFT_LENGTH, MAX_DRAFT_LENGTH
from edgespec.model.base import Progress
from edgespec.model.image_tokens import PreparedImage, contains_image, text_tokens
from edgespec.model.model_facts import ModelFacts
from edgespec.options.reply_options import CONSTRAINT_NAMES
from edgespec.options.settings import REPLY_OPTIONS, ReplyArguments, check_names

__all__ = [
    "ReplySettings",
    "Request",
    "StreamArguments",
    "check_vocabulary",
    "checked_prompt",
    "default_max_tokens",
]

# Default maximum reply length in tokens, so that a reply stuck in a loop does not fill the whole context.
_DEFAULT_MAX_TOKENS = 8192


class StreamArguments(ReplyArguments, total=False):
    """The options of a reply, and arguments available only in Python.

    Attributes:
        progress: Called while the prompt is prepared and during prefill. Returning False cancels the reply.
        processors: Custom logits processors, applied before all others. Create new ones for every reply.
        prompt_logprobs: Report the log-probability of each token of the prompt, and of that many of the most
            likely tokens at its position, in `Reply.prompt_logprobs`. `max_tokens` can then be 0.
    """

    progress: Progress | None
    processors: Sequence[LogitsProcessor]
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """The validated options of one reply. `edgespec.ReplyArguments` describes most fields.

    Attributes:
        constraint: The constraint that the answer must satisfy, or None.
        prompt_logprobs: See `StreamArguments`.
    """

    params: SamplingParams
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    thinking: str
    method: str
    draft_length: int | None
    acceptance: str
    adapter_scales: tuple[float, ...]
    min_tokens: int
    max_loss: float | None
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: Constraint | None

    @classmethod
    def defaults(cls, facts: ModelFacts, options: Mapping[str, Any] | None = None) -> ReplySettings:
        """Return the settings of replies to a target whose requests set no options.

        Args:
            facts: The target.
            options: Options with another default than the declared one, such as `temperature`.

        Raises:
            OptionError: An option is unknown or its value is invalid.
        """
        declared = {
            name: option.default
            for name, option in REPLY_OPTIONS.items()
            if name not in SamplingParams.names() and name not in CONSTRAINT_NAMES
        }
        scales = tuple(adapter.scale for adapter in facts.adapters)
        declared |= {"adapter_scales": scales, "prompt_logprobs": None, "constraint": None}
        settings = cls(SamplingParams(), **declared)
        return settings.with_options(options or {}, facts, _DEFAULT_MAX_TOKENS)

    def with_options(
        self,
        options: Mapping[str, Any],
        facts: ModelFacts,
        context_tokens: int,
        prompt_logprobs: int | None = None,
    ) -> ReplySettings:
        """Return the settings of a request that sets these options, after checking them.

        Args:
            options: The options, as in `edgespec.ReplyArguments`.
            facts: The target.
            context_tokens: Size of the context, which limits the reply's length.
            prompt_logprobs: See `StreamArguments`. Unless it is None, `max_tokens` can be 0.

        Raises:
            OptionError: An option is unknown or its value is invalid.
        """
        check_names(options, REPLY_OPTIONS)
        changes: dict[str, Any] = {
            "max_tokens": default_max_tokens(context_tokens),
            "seed": secrets.randbits(32),
        }
        sampling = {name: options[name] for name in SamplingParams.names() if name in options}
        if sampling:
            changes["params"] = replace(self.params, **sampling)
            check_vocabulary("logit_bias", changes["params"].logit_bias, facts)
        for name, value in options.items():
            if prompt_logprobs is not None and name == "max_tokens" and value == 0:
                changes[name] = 0
            elif name not in sampling and (checked := REPLY_OPTIONS[name].check(name, value)) is not None:
                changes[name] = checked
        if constraint := constraint_from({name: changes.pop(name, None) for name in CONSTRAINT_NAMES}):
            changes["constraint"] = constraint
        if prompt_logprobs is not None:
            changes["prompt_logprobs"] = REPLY_OPTIONS["logprobs"].check("prompt_logprobs", prompt_logprobs)
        if "adapter_scales" in changes:
            changes["adapter_scales"] = _adapter_scales(changes["adapter_scales"], facts)
        return replace(self, **changes)

    def max_draft_length(self, adapts: bool) -> int:
        """Return the maximum draft length in tokens. The default is larger for an adaptive drafter."""
        return self.draft_length or (MAX_DRAFT_LENGTH if adapts else FIXED_DRAFT_LENGTH)


@dataclass(frozen=True, slots=True)
class Request:
    """A session's input for one reply.

    Attributes:
        tokens: The prompt.
        settings: The reply's options.
        processors: The logits processors of the constraint and of the caller.
        images: The images in the prompt.
    """

    tokens: tuple[int, ...]
    settings: ReplySettings
    processors: tuple[LogitsProcessor, ...] = ()
    images: tuple[PreparedImage, ...] = ()

    @property
    def kind(self) -> ReplyKind:
        settings = self.settings
        return ReplyKind(
            settings.constraint is not None, settings.max_loss is not None, has_images=bool(self.images)
        )


def checked_prompt(
    tokens: Sequence[int],
    facts: ModelFacts,
    context_tokens: int,
    images: Sequence[PreparedImage] = (),
) -> tuple[int, ...]:
    """Return the tokens of a prompt.

    Args:
        tokens: The prompt.
        facts: The target model, whose vocabulary must contain all tokens.
        context_tokens: Size of the context, which must be large enough for the prompt.
        images: The images in the prompt.

    Raises:
        ContextFullError: The prompt is longer than the context.
        OptionError: The prompt is empty, or is not a list of tokens of the model.
    """
    try:
        tokens = tuple(tokens)
    except TypeError:
        raise OptionError(
            f"the prompt must be a list of token IDs, not {tokens!r}", "use `Runtime.stream` for text"
        ) from None
    if not tokens:
        raise OptionError("the prompt is empty", "enter at least one word", code="prompt_empty")
    if len(tokens) > context_tokens:
        raise ContextFullError(
            f"the prompt has {len(tokens):,} tokens, but the context holds only {context_tokens:,}",
            f"shorten it or use --context {len(tokens) // 256 * 256 + 512}",
            prompt_tokens=len(tokens),
            context_tokens=context_tokens,
        )
    if images and contains_image(tokens[-1:]):
        raise OptionError(
            "there is no text after the images",
            "add a question about them to the end of the prompt",
            code="prompt_empty",
        )
    check_vocabulary("prompt", text_tokens(tokens) if images else tokens, facts)
    return tokens


def _adapter_scales(given: Mapping[str, float], facts: ModelFacts) -> tuple[float, ...]:
    """Return the scale of each of the target's adapters for a reply. Raises OptionError."""
    names = [adapter.name for adapter in facts.adapters]
    for name in given:
        if name not in names:
            raise OptionError(
                f"{facts.name} was loaded without an adapter named {name!r}",
                f"use one of {', '.join(names)}" if names else "load the adapter with --adapter",
            )
    return tuple(given.get(name, 0.0) for name in names)


def default_max_tokens(context_tokens: int) -> int:
    """Return the default maximum reply length in tokens for a context of this size."""
    return min(context_tokens, _DEFAULT_MAX_TOKENS)


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
            f"token ID {unknown[0]!r} in the {source} is not in the vocabulary of {facts.name}",
            f"use token IDs from 0 to {facts.vocab_size - 1}",
            code="token_unknown",
        )
