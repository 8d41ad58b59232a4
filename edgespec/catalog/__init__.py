"""Model references: from what a person types to a file or a folder on this machine."""

from edgespec.catalog.catalogue import (
    Catalogue,
    ModelEntry,
    ModelFormat,
    load_catalogue,
    recommended_drafts,
)
from edgespec.catalog.download import Progress
from edgespec.catalog.mlx_files import mlx_installed, require_mlx
from edgespec.catalog.reference import Resolved, draft_for, resolve

__all__ = [
    "Catalogue",
    "ModelEntry",
    "ModelFormat",
    "Progress",
    "Resolved",
    "draft_for",
    "load_catalogue",
    "mlx_installed",
    "recommended_drafts",
    "require_mlx",
    "resolve",
]
