"""The sampling settings that a model's makers recommend, which are the defaults of its replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edgespec.store.catalogue import ModelEntry, load_catalogue
from edgespec.store.installed import model_info_or_none
from edgespec.store.reference import Resolved

__all__ = ["RecommendedSetting", "recommended_sampling"]


class RecommendedSetting(NamedTuple):
    """The recommended value of one sampling setting.

    Attributes:
        value: The value.
        source: Who states it: `Ollama`, `the model's files` or `the catalogue`.
    """

    value: float
    source: str


def recommended_sampling(model: Resolved | None, entry: ModelEntry | None) -> dict[str, RecommendedSetting]:
    """Return the recommended sampling settings of a model, by name.

    What a user sets has precedence over these settings. If several sources state a setting, the first counts:
    the program that stores the model, the model's files, the catalogue. The catalogue's settings also apply
    to copies of its models in other programs' folders, which are recognised by their headers.

    Args:
        model: The model, or None if it is not on this machine.
        entry: The model's entry in the catalogue, if it has one.
    """
    info = model_info_or_none(model) if model else None
    if model and not entry:
        entry = load_catalogue().of_header(model.path)
    sources: dict[str, Mapping[str, float]] = {
        "Ollama": model.sampling if model else {},
        "the model's files": info.sampling if info else {},
        "the catalogue": entry.sampling if entry else {},
    }
    found: dict[str, RecommendedSetting] = {}
    for source, settings in sources.items():
        for name, value in settings.items():
            found.setdefault(name, RecommendedSetting(value, source))
    return found
