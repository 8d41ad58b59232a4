"""Suggest a real target and draft model that fit this machine, for users of the demo model."""

from __future__ import annotations

import math
from typing import NamedTuple

from edgespec.catalog.catalogue import ModelEntry, load_catalogue
from edgespec.catalog.speedup_estimate import estimate_speedup
from edgespec.files import format_bytes

__all__ = ["Suggestion", "needed_bytes", "short_name", "suggest_model"]

# Endings of the aliases of recommended models, such as `8b-q4`, by file format.
_ALIAS_SUFFIX = {"gguf": "-q4", "mlx": "-mlx"}
# Maximum download size. Larger models take hours to download, and are slow on most machines that can hold
# them.
_MAX_DOWNLOAD_BYTES = 10_000_000_000
# Memory for a KV cache of 8,192 tokens of a model with eight billion parameters. That of other models grows
# with the square root of their number of parameters.
_CACHE_BYTES, _CACHE_PARAMETERS = 1 << 30, 8e9
# Memory for compute buffers, the draft model's KV cache and Python.
_OTHER_BYTES = 768 << 20


class Suggestion(NamedTuple):
    """A target and its draft model.

    Attributes:
        target: Model reference of the target.
        draft: Model reference of the draft model.
        download_bytes: Approximate size of both files.
        needed_bytes: Approximate memory that both models need.
        speedup: Expected speed-up over plain decoding on machines that verify several tokens cheaply.
    """

    target: str
    draft: str
    download_bytes: int
    needed_bytes: int
    speedup: float

    def describe(self, command: str, budget_bytes: int) -> str:
        """Return the suggestion as text for the screen, with the command that runs it.

        Args:
            command: The command that starts a chat.
            budget_bytes: Memory that edgespec may use.
        """
        return (
            f"{command} --target {self.target} --draft {self.draft} (downloads"
            f" {format_bytes(self.download_bytes)}; needs about {format_bytes(self.needed_bytes)} of the"
            f" {format_bytes(budget_bytes)} of memory that edgespec can use here; expected speed-up: 1.0x to"
            f" {self.speedup:.1f}x, depending on this machine)"
        )


def needed_bytes(file_bytes: int, parameters: int) -> int:
    """Estimate the memory that a model and its draft model need with a context of 8,192 tokens.

    Args:
        file_bytes: Size of the files of both models.
        parameters: Number of parameters of the model.
    """
    return round(file_bytes + _OTHER_BYTES + _CACHE_BYTES * math.sqrt(parameters / _CACHE_PARAMETERS))


def suggest_model(budget_bytes: int, model_format: str = "gguf") -> Suggestion | None:
    """Return the largest recommended model that fits, with its draft model. Reads only the catalogue.

    Args:
        budget_bytes: Memory that edgespec may use.
        model_format: `gguf` or `mlx`.

    Returns:
        The suggestion, or None if no model fits.
    """
    suggestions = []
    for entry in load_catalogue().entries:
        target = _alias(entry)
        found = load_catalogue().find(entry.drafts[0]) if entry.drafts else None
        if entry.format != model_format or not target or found is None or not (draft := _alias(found[0])):
            continue
        size_bytes = entry.approximate_file_bytes + found[0].approximate_file_bytes
        needed = needed_bytes(size_bytes, entry.parameters)
        if size_bytes <= _MAX_DOWNLOAD_BYTES and needed <= budget_bytes:
            speedup = estimate_speedup(
                found[0].parameters / entry.parameters,
                found[0].approximate_file_bytes / entry.approximate_file_bytes,
            )
            suggestions.append(Suggestion(target, draft, size_bytes, needed, speedup))
    return max(suggestions, key=lambda each: each.download_bytes, default=None)


def _alias(entry: ModelEntry) -> str:
    """Return the entry's recommended short name, or an empty string if it has none."""
    suffix = _ALIAS_SUFFIX.get(entry.format, "")
    return next((name for name in entry.aliases if suffix and name.endswith(suffix) and ":" not in name), "")


def short_name(entry: ModelEntry) -> str:
    """Return the entry's recommended short name, or its name if it has none."""
    return _alias(entry) or entry.name
