"""The options that apply to a single reply."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, TypedDict

from edgespec.engine.sampling_params import SamplingParams
from edgespec.option import ACCEPTANCE, DRAFT_LENGTH, METHOD, Option, declared_options
from edgespec.option_kinds import Integer, SamplingNumber, TextList, TokenBiases

__all__ = ["REPLY_OPTIONS", "ReplyArguments"]

_MAX_SEED = (1 << 63) - 1


def _sampling(metavar: str, description: str, convert: Callable[[str], float] = float) -> Option:
    """Return the option for a numeric field of `SamplingParams`."""
    return Option(SamplingNumber(metavar, convert), "sampling", description)


class ReplyArguments(TypedDict, total=False):
    """Keyword arguments of `Runtime.generate`, `Runtime.stream` and `Chat.stream`.

    If `method`, `draft_length` or `acceptance` is None, the value passed to `load` applies.
    """

    # fmt: off
    max_tokens: Annotated[int | None, Option(Integer(1, _MAX_SEED), "reply",
        "Maximum length of the reply in tokens.",
        default_text="8192, or the end of the context", flags=("-n",), common=True)]
    seed: Annotated[int | None, Option(Integer(0, _MAX_SEED), "reply",
        "Random seed. The same seed gives the same reply with every method (but see --acceptance).",
        default_text="a new one each time", common=True)]
    stop: Annotated[str | Sequence[str], Option(TextList(), "reply",
        "End the reply before this string. May be repeated.",
        default=())]
    method: Annotated[str | None, METHOD]
    draft_length: Annotated[int | None, DRAFT_LENGTH]
    acceptance: Annotated[str | None, ACCEPTANCE]
    temperature: Annotated[float, Option(SamplingNumber("T"), "sampling",
        "How varied the reply is. 0 always chooses the most likely token.",
        common=True)]
    top_k: Annotated[int, _sampling("N",
        "Choose only among the N most likely tokens; 0 turns this off.", int)]
    top_p: Annotated[float, _sampling("P",
        "Choose only among the most likely tokens whose probabilities add up to P; 1 turns this off.")]
    min_p: Annotated[float, _sampling("P",
        "Drop tokens that are less likely than P times the most likely one; 0 turns this off.")]
    typical_p: Annotated[float, _sampling("P",
        "Typical sampling: choose only among the most typical tokens whose probabilities add up to P; 1 turns"
        " this off.")]
    repetition_penalty: Annotated[float, _sampling("X",
        "Make repeated tokens less likely by this factor; 1 turns this off.")]
    presence_penalty: Annotated[float, _sampling("X",
        "Subtract this from the score of every repeated token; 0 turns this off.")]
    frequency_penalty: Annotated[float, _sampling("X",
        "Subtract this from a token's score for each repetition; 0 turns this off.")]
    penalty_window: Annotated[int, _sampling("N",
        "Apply the penalties to the last N tokens; -1 means all.", int)]
    logit_bias: Annotated[Mapping[int, float], Option(TokenBiases("ID=VALUE"), "sampling",
        "Add VALUE to the score of token ID, such as 1523=-2.5; -inf forbids the token. May be repeated.")]
    # fmt: on


def _with_default(name: str, option: Option) -> Option:
    """Return a sampling option with its default from `SamplingParams`, and other options unchanged."""
    return replace(option, default=getattr(SamplingParams(), name)) if option.group == "sampling" else option


REPLY_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {name: _with_default(name, option) for name, option in declared_options(ReplyArguments).items()}
)
"""The options for a reply."""
