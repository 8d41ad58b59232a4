"""The options that apply to a single reply."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Annotated, TypedDict

from edgespec.engine.sampling_params import SamplingParams
from edgespec.option import ACCEPTANCE, DRAFT_LENGTH, METHOD, Option, declared_options
from edgespec.option_kinds import Integer, SamplingNumber, TextList, TokenBiases

__all__ = ["REPLY_OPTIONS", "ReplyArguments"]

_MAX_SEED = (1 << 63) - 1


class ReplyArguments(TypedDict, total=False):
    """Keyword arguments of `Runtime.generate`, `Runtime.stream` and `Chat.stream`.

    If `method`, `draft_length` or `acceptance` is None, the value passed to `load` applies.
    """

    max_tokens: Annotated[
        int | None,
        Option(
            kind=Integer(1, _MAX_SEED),
            group="reply",
            default_text="8192, or the end of the context",
            flags=("-n",),
            help="Maximum reply length in tokens.",
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            kind=Integer(0, _MAX_SEED),
            group="reply",
            default_text="a new one each time",
            help="Random seed. The same seed gives the same reply with every method (but see --acceptance).",
        ),
    ]
    stop: Annotated[
        str | Sequence[str],
        Option(
            kind=TextList(),
            group="reply",
            default=(),
            help="End the reply before this string. May be repeated.",
        ),
    ]
    method: Annotated[str | None, METHOD]
    draft_length: Annotated[int | None, DRAFT_LENGTH]
    acceptance: Annotated[str | None, ACCEPTANCE]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: Mapping[int, float]


# Only help texts are given here. SamplingParams defines the settings' defaults, limits and types.
_SAMPLING_HELP = {
    "temperature": ("T", "Randomness of the reply; 0 always chooses the most likely token."),
    "top_k": ("N", "Consider only the N most likely tokens; 0 turns this off."),
    "top_p": ("P", "Consider only the most likely tokens whose probabilities add up to P; 1 turns this off."),
    "min_p": ("P", "Drop tokens less likely than P times the most likely token; 0 turns this off."),
    "typical_p": (
        "P",
        "Typical sampling: keep the most typical tokens whose probabilities add up to P; 1 turns this off.",
    ),
    "repetition_penalty": ("X", "Make repeated tokens less likely by this factor; 1 turns this off."),
    "presence_penalty": ("X", "Subtract this from the score of every repeated token; 0 turns this off."),
    "frequency_penalty": ("X", "Subtract this from a token's score for each repetition; 0 turns this off."),
    "penalty_window": ("N", "Apply the penalties to the last N tokens; -1 means all."),
    "logit_bias": (
        "ID=VALUE",
        "Add VALUE to the score of token ID, such as 1523=-2.5; -inf forbids the token. May be repeated.",
    ),
}


def _sampling_options() -> dict[str, Option]:
    options = {}
    for each in fields(SamplingParams):
        metavar, help_text = _SAMPLING_HELP[each.name]
        default = {} if each.default is MISSING else each.default
        kind = SamplingNumber(metavar, isinstance(default, int))
        options[each.name] = Option(
            kind=TokenBiases() if each.default is MISSING else kind,
            group="sampling",
            default=default,
            help=help_text,
        )
    return options


REPLY_OPTIONS: Mapping[str, Option] = MappingProxyType(declared_options(ReplyArguments) | _sampling_options())
"""The options for a reply."""
