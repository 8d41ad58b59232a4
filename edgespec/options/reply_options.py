"""The options that apply to a single reply.

Model files and other programs have their own names for some of these options, which `stated_sampling`
accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from edgespec.engine.sampling_params import SETTING_RANGES, SamplingParams
from edgespec.errors import OptionError
from edgespec.options.option import (
    ACCEPTANCE,
    DRAFT_LENGTH,
    MAX_LOSS,
    METHOD,
    AdapterScales,
    Choice,
    Choices,
    Integer,
    JsonSchema,
    Option,
    SamplingNumber,
    Text,
    TextFile,
    TextList,
    TokenBiases,
    declared_options,
)
from edgespec.system.spelling import FOREIGN_NAMES

__all__ = ["CONSTRAINT_NAMES", "REPLY_OPTIONS", "ReplyArguments", "stated_sampling"]

# Options that describe a constraint. A reply can have at most one of them.
CONSTRAINT_NAMES = ("schema", "regex", "grammar", "choice")

_MAX_SEED = (1 << 63) - 1
# Option names that other programs use, plus those that occur only in GGUF metadata.
_STATED_NAMES = FOREIGN_NAMES | {
    "penalty_freq": "frequency_penalty",
    "penalty_last_n": "penalty_window",
    "penalty_present": "presence_penalty",
    "penalty_repeat": "repetition_penalty",
    "typ_p": "typical_p",
}


def _sampling(
    name: str,
    metavar: str,
    description: str,
    in_chat: tuple[str, str],
    convert: Callable[[str], float] = float,
) -> Option:
    """Return the option for a numeric field of `SamplingParams`."""
    kind = SamplingNumber(SETTING_RANGES[name], metavar, convert)
    return Option(kind, "sampling", description, in_chat=in_chat)


class ReplyArguments(TypedDict, total=False):
    """Keyword arguments of `Runtime.generate`, `Runtime.stream` and `Chat.stream`.

    If `method`, `draft_length`, `acceptance` or `max_loss` is None, the value passed to `load` applies. At
    most one of `schema`, `regex`, `grammar` and `choice` can be used.
    """

    # fmt: off
    max_tokens: Annotated[int | None, Option(Integer(1, _MAX_SEED), "reply",
        "Maximum number of tokens in a reply.",
        default_text="8192, or until the context is full", flags=("-n",), common=True,
        in_chat=("Maximum length", "maximum tokens in a reply"))]
    min_tokens: Annotated[int, Option(Integer(0, _MAX_SEED), "reply",
        "Minimum number of tokens in a reply: the model cannot end it earlier, but stop strings can. This is"
        " useful for comparing speeds with replies of the same length.",
        default=0, per_run=True)]
    seed: Annotated[int | None, Option(Integer(0, _MAX_SEED), "reply",
        "Random seed. The same seed gives the same reply with every method (but see --acceptance).",
        default_text="random", common=True, in_chat=("Seed", "the same seed gives the same reply"))]
    stop: Annotated[str | Sequence[str], Option(TextList(), "reply",
        "End the reply when this text appears in it. The text itself is not included. Can be repeated.",
        default=(), in_chat=("Stop strings", "strings that end a reply, e.g. a,b"))]
    schema: Annotated[Mapping[str, Any] | str | type | None, Option(JsonSchema(), "reply",
        "Restrict replies to JSON that matches the JSON schema in this file.",
        per_run=True)]
    regex: Annotated[str | None, Option(Text("REGEX"), "reply",
        "Restrict replies to text that fully matches this regular expression.",
        per_run=True)]
    grammar: Annotated[str | None, Option(TextFile(), "reply",
        "Restrict replies to text that matches the grammar in this file (in llguidance's Lark format).",
        per_run=True)]
    choice: Annotated[str | Sequence[str], Option(Choices(), "reply",
        "Restrict replies to this text. Repeat this option to let the model choose one of several texts.",
        default=(), per_run=True)]
    thinking: Annotated[str, Option(Choice(("auto", "on", "off")), "reply",
        "Whether the model reasons before it answers, if the model lets you choose. `auto` uses the model's"
        " default.",
        default="auto", in_chat=("Reasoning", "auto, on or off"))]
    logprobs: Annotated[int | None, Option(Integer(0, 20), "reply",
        "Report the log-probability of each token, and of the N most likely tokens at its position. On the"
        " command line, this needs --json.",
        per_run=True)]
    adapter_scales: Annotated[Mapping[str, float] | None, Option(AdapterScales(), "reply",
        "Scale of each loaded adapter for this reply, keyed by the adapter's file name without .gguf."
        " Adapters that you do not name are turned off. Only for GGUF models.",
        default_text="the scales passed to `load`", api_only=True)]
    method: Annotated[str | None, METHOD]
    draft_length: Annotated[int | None, DRAFT_LENGTH]
    acceptance: Annotated[str | None, ACCEPTANCE]
    max_loss: Annotated[float | None, MAX_LOSS]
    temperature: Annotated[float, Option(SamplingNumber(SETTING_RANGES["temperature"], "T"), "sampling",
        "Sampling temperature. Higher values make replies more varied; 0 always picks the most likely token."
        " Many models have their own default, such as 0.2 for smollm2.",
        common=True, in_chat=("Temperature", "randomness of replies; 0 = none"))]
    top_k: Annotated[int, _sampling("top_k", "N",
        "Sample only from the N most likely tokens; 0 disables this filter.",
        ("Top k", "the k most likely tokens; 0 = all"), int)]
    top_p: Annotated[float, _sampling("top_p", "P",
        "Sample only from the most likely tokens whose probabilities add up to P; 1 disables this filter.",
        ("Top p", "drop unlikely tokens; 1 = off"))]
    min_p: Annotated[float, _sampling("min_p", "P",
        "Drop tokens that are less than P times as likely as the most likely one; 0 disables this filter.",
        ("Min p", "drop unlikely tokens; 0 = off"))]
    typical_p: Annotated[float, _sampling("typical_p", "P",
        "Typical sampling: sample only from the most typical tokens whose probabilities add up to P; 1"
        " disables this filter.", ("Typical p", "drop atypical tokens; 1 = off"))]
    repetition_penalty: Annotated[float, _sampling("repetition_penalty", "X",
        "Make repeated tokens less likely by this factor; 1 turns this off.",
        ("Repetition penalty", "above 1: less repetition; 1 = off"))]
    presence_penalty: Annotated[float, _sampling("presence_penalty", "X",
        "Make tokens that have already been used less likely, by subtracting X from their logits; 0 turns"
        " this off.",
        ("Presence penalty", "avoid tokens already used; 0 = off"))]
    frequency_penalty: Annotated[float, _sampling("frequency_penalty", "X",
        "Make tokens less likely each time they are used, by subtracting X from their logits per use; 0"
        " turns this off.",
        ("Frequency penalty", "avoid frequent tokens; 0 = off"))]
    penalty_window: Annotated[int, _sampling("penalty_window", "N",
        "Number of recent tokens that the penalties apply to; -1 means all.",
        ("Penalty window", "recent tokens to check; -1 = all"), int)]
    logit_bias: Annotated[Mapping[int, float], Option(TokenBiases(), "sampling",
        "Add VALUE to the logit of the token with this ID, such as 1523=-2.5; -inf bans the token. Can be"
        " repeated.")]
    # fmt: on


def _with_default(name: str, option: Option) -> Option:
    """Return a sampling option with its default from `SamplingParams`, and other options unchanged."""
    return replace(option, default=getattr(SamplingParams(), name)) if option.group == "sampling" else option


REPLY_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {name: _with_default(name, option) for name, option in declared_options(ReplyArguments).items()}
)
"""The options for a reply."""


def stated_sampling(stated: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric sampling settings in `stated`, keyed by edgespec's names.

    Other settings and invalid values are skipped, because a model is usable without them.
    """
    found: dict[str, float] = {}
    for key, value in stated.items():
        name = _STATED_NAMES.get(key, key)
        if name in SETTING_RANGES:
            with suppress(OptionError):
                found[name] = REPLY_OPTIONS[name].check(name, _meant(name, value))
    return found


def _meant(name: str, value: Any) -> Any:
    """Interpret a value as other programs do: 20.0 counts as an integer, and a top-k of -1 means no limit."""
    if isinstance(value, float) and value.is_integer() and isinstance(SETTING_RANGES[name].low, int):
        value = int(value)
    return 0 if name == "top_k" and value == -1 else value
