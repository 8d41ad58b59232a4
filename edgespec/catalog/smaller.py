"""Models on this machine that take less: the same one with fewer bits, or others. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.backends.model_info import ModelInfo
from edgespec.catalog.reference import Resolved, resolve
from edgespec.catalog.installed import Shelf, Shelved, info_of
from edgespec.errors import EdgespecError

__all__ = ["smaller_forms", "smaller_models"]


def smaller_forms(found: Resolved, shelf: Shelf) -> list[Resolved]:
    """Smaller files of the same model with the same tokens, the largest first."""
    info = _info(found, shelf)
    return _resolved(one for one in _smaller(found, info, shelf) if info and _is_same(one.info, info))


def smaller_models(found: Resolved, shelf: Shelf) -> list[Resolved]:
    """Smaller models, the largest first; smaller files of the same one before all others."""
    info = _info(found, shelf)
    smaller = _smaller(found, info, shelf)
    return _resolved(sorted(smaller, key=lambda one: not (info and _is_same(one.info, info))))


def _info(found: Resolved, shelf: Shelf) -> ModelInfo | None:
    try:
        return info_of(found, shelf.known)
    except EdgespecError:
        return None


def _smaller(found: Resolved, info: ModelInfo | None, shelf: Shelf) -> list[Shelved]:
    smaller = [
        one
        for one in shelf.models
        if (one.format == "mlx") == (found.format == "mlx")
        and one.path != found.path
        and (info is None or one.info.size_bytes < info.size_bytes)
    ]
    return sorted(smaller, key=lambda one: (-one.info.size_bytes, one.reference))


def _is_same(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether these are one model, perhaps with other bits."""
    mine, its = ((info.architecture, info.family, info.parameters, info.vocabulary) for info in (one, other))
    return bool(one.vocabulary) and mine == its


def _resolved(models: Iterable[Shelved]) -> list[Resolved]:
    found = []
    for one in models:
        try:
            found.append(resolve(one.reference, allow_download=False))
        except EdgespecError:
            continue
    return found
