"""Sampling settings in model files and other programs' files, where they have various names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from edgespec.engine.sampling_params import SETTING_RANGES
from edgespec.errors import OptionError
from edgespec.options.reply_options import REPLY_OPTIONS
from edgespec.system.spelling import FOREIGN_NAMES

__all__ = ["stated_sampling"]

# The names in GGUF files that are no option names of llama.cpp.
_NAMES = FOREIGN_NAMES | {
    "penalty_freq": "frequency_penalty",
    "penalty_last_n": "penalty_window",
    "penalty_present": "presence_penalty",
    "penalty_repeat": "repetition_penalty",
    "typ_p": "typical_p",
}


def stated_sampling(stated: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric sampling settings in `stated` by edgespec's names.

    Other settings and invalid values are left out, because a model is usable without them.
    """
    found: dict[str, float] = {}
    for key, value in stated.items():
        name = _NAMES.get(key, key)
        if name in SETTING_RANGES:
            with suppress(OptionError):
                found[name] = REPLY_OPTIONS[name].check(name, _meant(name, value))
    return found


def _meant(name: str, value: Any) -> Any:
    """Return a value as other programs read it: 20.0 is an integer where one is needed, and -1 no top-k."""
    if isinstance(value, float) and value.is_integer() and isinstance(SETTING_RANGES[name].low, int):
        value = int(value)
    return 0 if name == "top_k" and value == -1 else value
