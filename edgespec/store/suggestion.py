"""Suggest a larger target and draft model that fit this machine, for users of the default model."""

from __future__ import annotations

import math
from typing import NamedTuple

from edgespec.store.catalogue import ModelEntry, load_catalogue

__all__ = ["Suggestion", "needed_bytes", "short_name", "suggest_models"]

# Suffixes of short names, such as `8b-q4`, by file format.
_ALIAS_SUFFIX = {"gguf": "-q4", "mlx": "-mlx"}
# Maximum download size. Larger models take hours to download, and are slow on most machines that can hold
# them.
_MAX_DOWNLOAD_BYTES = 10_000_000_000
# Memory for a KV cache of 8,192 tokens of a model with eight billion parameters. For other models, this
# amount is scaled by the square root of their number of parameters.
_CACHE_BYTES, _CACHE_PARAMETERS = 1 << 30, 8e9
# Memory for compute buffers, the draft model's KV cache and Python.
_OTHER_BYTES = 768 << 20


class Suggestion(NamedTuple):
    """A target and its draft model, if it has one.

    Attributes:
        target: Model reference of the target.
        draft: Model reference of the draft model. Empty if there is none.
        download_bytes: Approximate size of both files.
    """

    target: str
    draft: str
    download_bytes: int


def needed_bytes(file_bytes: int, parameters: int) -> int:
    """Estimate the memory that a model and its draft model need with a context of 8,192 tokens.

    Args:
        file_bytes: Size of the files of both models.
        parameters: Number of parameters of the model.
    """
    return round(file_bytes + _OTHER_BYTES + _CACHE_BYTES * math.sqrt(parameters / _CACHE_PARAMETERS))


def suggest_models(budget_bytes: int, model_format: str = "gguf") -> list[Suggestion]:
    """Return the three largest suggested models that fit, with their draft models, smallest first.

    Only the catalogue is read.

    Args:
        budget_bytes: Memory that edgespec may use.
        model_format: `gguf` or `mlx`.

    Returns:
        The suggestions. Fewer than three, or none, if memory is tight.
    """
    suggestions = []
    for entry in load_catalogue().entries:
        if entry.format != model_format or not entry.suggested:
            continue
        # A model with layers for multi-token prediction drafts for itself.
        found = load_catalogue().find(entry.drafts[0]) if entry.drafts and not entry.heads else None
        size_bytes = entry.approximate_file_bytes + (found[0].approximate_file_bytes if found else 0)
        if size_bytes <= _MAX_DOWNLOAD_BYTES and needed_bytes(size_bytes, entry.parameters) <= budget_bytes:
            suggestions.append(Suggestion(entry.name, found[0].name if found else "", size_bytes))
    return sorted(suggestions, key=lambda each: each.download_bytes)[-3:]


def short_name(entry: ModelEntry) -> str:
    """Return the entry's recommended short name, such as `8b-q4`, or its name if it has none."""
    suffix = _ALIAS_SUFFIX.get(entry.format, "")
    names = (name for name in entry.aliases if suffix and name.endswith(suffix) and ":" not in name)
    return next(names, entry.name)
