"""Find out from its files which method drafts with a head."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends.base import Head
from edgespec.backends.registry import format_at
from edgespec.errors import ModelFileError
from edgespec.heads.residual_layout import residual_head_method

__all__ = ["head_at"]

# The methods by the first word of the names in `ModelInfo.heads`.
_METHODS = {"MTP": "mtp", "EAGLE": "eagle", "DFlash": "dflash", "Medusa": "medusa", "Hydra": "hydra"}


def head_at(path: Path) -> Head:
    """Return the head at a path. Raises ModelFileError if it contains no head, or is damaged."""
    if method := residual_head_method(path):
        return Head(method, path)
    info = format_at(path).read_info(path)
    for name in info.heads:
        if method := _METHODS.get(name.replace("-", " ").replace(",", " ").split()[0]):
            return Head(method, path)
    raise ModelFileError(
        f"{path} contains no head, but a model with the architecture {info.architecture!r}",
        "pass a head with --head, and draft models with --draft",
    )
