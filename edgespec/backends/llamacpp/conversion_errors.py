"""The error for a head whose settings cannot be written to a GGUF file."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ModelFileError

__all__ = ["invalid_settings"]


def invalid_settings(folder: Path, error: Exception) -> ModelFileError:
    """Return the error for a setting in `config.json` that is missing, invalid or too large for GGUF."""
    return ModelFileError(
        f"the config.json of the head in {folder} has invalid settings: {error}", "download it again"
    )
