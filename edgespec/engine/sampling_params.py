"""Sampling settings for a reply, and their allowed ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

from edgespec.errors import OptionError

__all__ = ["SETTING_RANGES", "SamplingParams", "SettingRange", "check_biases"]


class SettingRange(NamedTuple):
    """The allowed values of a numeric setting. If `low` is an int, the setting must be an integer.

    Attributes:
        low: Minimum value.
        high: Maximum value.
        off: Value that disables the filter. None if the setting is not a filter.
        hint: Hint for the error message.
    """

    low: float
    high: float
    off: float | None
    hint: str

    def check(self, name: str, value: Any) -> float:
        """Return `value` as a Python number.

        Args:
            name: The setting's name, for the error message.
            value: The value to check.

        Raises:
            OptionError: `value` is not a number of the right type, or is out of range.
        """
        is_whole = isinstance(self.low, int)
        number = _plain(value, Integral if is_whole else Real)
        if number is None or not self.low <= number <= self.high:
            span = f"{self.low} to {self.high}" if is_whole else f"{self.low:g} to {self.high:g}"
            kind = "an integer" if is_whole else "a number"
            raise OptionError(f"{name} must be {kind} from {span}, not {value!r}", self.hint, option=name)
        checked: float = number
        return checked


SETTING_RANGES = {
    "temperature": SettingRange(
        0.0, 100.0, None, "use 0 to always pick the most likely token, or about 0.8 for varied replies"
    ),
    "top_k": SettingRange(0, 1_000_000, 0, "use 0 to disable it"),
    "top_p": SettingRange(0.0, 1.0, 1.0, "use 1 to disable it"),
    "min_p": SettingRange(0.0, 1.0, 0.0, "use 0 to disable it"),
    "typical_p": SettingRange(0.0, 1.0, 1.0, "use 1 to disable it"),
    "repetition_penalty": SettingRange(0.01, 100.0, None, "use 1 to disable it"),
    "presence_penalty": SettingRange(-100.0, 100.0, None, "use 0 to disable it"),
    "frequency_penalty": SettingRange(-100.0, 100.0, None, "use 0 to disable it"),
    "penalty_window": SettingRange(-1, 1_000_000, None, "use -1 for the whole context"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings for one reply. `processors.build_processors` turns them into a processor chain.

    Attributes:
        temperature: Divides the logits. 0 selects the largest logit, and the lowest token id on ties.
        top_k: Keep this many of the most likely tokens. 0 disables the filter.
        top_p: Keep the most likely tokens whose probabilities add up to this. 1 disables the filter.
        min_p: Discard tokens whose probability is less than this share of the highest one. 0 disables the
            filter.
        typical_p: Keep the tokens with the most typical information content whose probabilities add up to
            this. 1 disables the filter.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the penalty window.
        presence_penalty: Subtracted from the logit of every token in the penalty window.
        frequency_penalty: Subtracted from the logit once for each occurrence in the penalty window.
        penalty_window: Penalties apply to this many of the most recent tokens, including the prompt. -1 means
            all.
        logit_bias: Added to the logits of these token ids. -inf forbids a token.

    Raises:
        OptionError: A value is outside its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, limits in SETTING_RANGES.items():
            object.__setattr__(self, name, limits.check(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", check_biases("logit_bias", self.logit_bias))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all sampling settings."""
        return tuple(each.name for each in fields(cls))

    @classmethod
    def disabled_filters(cls) -> dict[str, Any]:
        """Return sampling settings that disable every filter, such as `top_p=1`."""
        return {name: each.off for name, each in SETTING_RANGES.items() if each.off is not None}

    @property
    def has_penalties(self) -> bool:
        """Whether any repetition, presence or frequency penalty is enabled."""
        return self.penalty_window != 0 and (
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


def check_biases(name: str, biases: Any) -> dict[int, float]:
    """Return a copy of `biases` with Python numbers.

    Args:
        name: The setting's name, for the error message.
        biases: The value to check.

    Raises:
        OptionError: `biases` is not a mapping from token IDs to numbers.
    """
    if not isinstance(biases, Mapping):
        raise OptionError(
            f"{name} must be a dict, not {biases!r}",
            'map token IDs to numbers, such as {"1523": -2.5}',
            option=name,
        )
    plain: dict[int, float] = {}
    for token, bias in biases.items():
        token_id, number = _plain(token, Integral), _plain(bias, Real)
        if token_id is None or token_id < 0:
            raise OptionError(
                f"{name} contains an invalid token ID: {token!r}", "use non-negative integers", option=name
            )
        if number is None or not number < math.inf:
            raise OptionError(
                f"{name} for token {token} must be a finite number or -inf, not {bias!r}", option=name
            )
        plain[token_id] = number
    return plain


def _plain(value: Any, kind: type[Integral] | type[Real]) -> Any:
    """Convert a number, such as a NumPy scalar, to a Python number. Return None for any other value."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return None
    return int(value) if isinstance(value, Integral) else float(value)
