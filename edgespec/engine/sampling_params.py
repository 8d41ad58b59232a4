"""The sampling settings of one reply and their allowed ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from edgespec.errors import OptionError

__all__ = ["SamplingParams"]


def _setting(
    default: float, lowest: float, highest: float, hint: str, *, filter_off: float | None = None
) -> Any:
    """Return a dataclass field for a number between two limits.

    Args:
        default: The default value. An `int` lower limit makes the setting a whole number.
        lowest: Smallest allowed value.
        highest: Largest allowed value.
        hint: Short advice for the error message.
        filter_off: For filters, the value that disables the filter.
    """
    metadata = {"range": (lowest, highest, hint), "filter_off": filter_off}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one reply. `processors.build_processors` turns them into a processor chain.

    Attributes:
        temperature: Divides the logits. 0 picks the largest logit, the lowest token id on ties.
        top_k: Keep this many of the most likely tokens. 0 disables the filter.
        top_p: Keep the most likely tokens that hold this probability mass. 1 disables the filter.
        min_p: Discard tokens less likely than this share of the most likely one. 0 disables the filter.
        typical_p: Keep the tokens of most typical information content that hold this probability mass. 1
            disables the filter.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the penalty window.
        presence_penalty: Subtracted from the logit of every token in the penalty window.
        frequency_penalty: Subtracted from the logit once for each occurrence in the penalty window.
        penalty_window: Number of last tokens, prompt included, that the penalties look at. -1 means all.
        logit_bias: Added to the logits of these token ids. -inf forbids a token.

    Raises:
        OptionError: A value is outside its range.
    """

    temperature: float = _setting(0.8, 0.0, 100.0, "0 is greedy, 0.8 is lively")
    top_k: int = _setting(40, 0, 1_000_000, "0 switches it off", filter_off=0)
    top_p: float = _setting(0.95, 0.0, 1.0, "1 switches it off", filter_off=1.0)
    min_p: float = _setting(0.05, 0.0, 1.0, "0 switches it off", filter_off=0.0)
    typical_p: float = _setting(1.0, 0.0, 1.0, "1 switches it off", filter_off=1.0)
    repetition_penalty: float = _setting(1.0, 0.01, 100.0, "1 switches it off")
    presence_penalty: float = _setting(0.0, -100.0, 100.0, "0 switches it off")
    frequency_penalty: float = _setting(0.0, -100.0, 100.0, "0 switches it off")
    penalty_window: int = _setting(64, -1, 1_000_000, "-1 is the whole context")
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self):
            if "range" in each.metadata:
                _check_range(each.name, getattr(self, each.name), *each.metadata["range"])
        biases: Any = self.logit_bias
        if not isinstance(biases, Mapping):
            raise OptionError(f"logit_bias is {biases!r}", "give a dict of token ids and numbers")
        for token, bias in biases.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise OptionError(
                    f"logit_bias contains the token id {token!r}", "give whole numbers from 0 up"
                )
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not bias < math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias!r}", "give a finite number or -inf")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings."""
        return tuple(each.name for each in fields(cls))

    @classmethod
    def disabled_filters(cls) -> dict[str, float]:
        """Return the settings that disable every filter (top-k, top-p, min-p, typical)."""
        off = {each.name: each.metadata.get("filter_off") for each in fields(cls)}
        return {name: value for name, value in off.items() if value is not None}

    @property
    def has_penalties(self) -> bool:
        """True if a penalty is enabled."""
        return self.penalty_window != 0 and (
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )


def _check_range(name: str, value: object, lowest: float, highest: float, hint: str) -> None:
    whole = isinstance(lowest, int)
    allowed = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not lowest <= value <= highest:
        span = f"{lowest} to {highest}" if whole else f"{lowest:g} to {highest:g}"
        kind = "a whole number" if whole else "a number"
        raise OptionError(f"{name} is {value!r}", f"give {kind} from {span} ({hint})")
