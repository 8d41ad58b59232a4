"""Model references: from what a person types to a file or a folder on this machine."""

from edgespec.backends.mlx_files import mlx_installed, require_mlx
from edgespec.backends.model_info import ModelInfo
from edgespec.catalog.catalogue import (
    Catalogue,
    ModelEntry,
    ModelFormat,
    load_catalogue,
    recommended_drafts,
)
from edgespec.catalog.download import Progress
from edgespec.catalog.drafts import DraftChoice, DraftOption, choose_draft, drafts_for
from edgespec.catalog.metadata_cache import Known
from edgespec.catalog.reference import Resolved, resolve
from edgespec.catalog.installed import Shelved, info_of, look
from edgespec.catalog.smaller import smaller_forms, smaller_models

__all__ = [
    "Catalogue",
    "DraftChoice",
    "DraftOption",
    "Known",
    "ModelEntry",
    "ModelFormat",
    "ModelInfo",
    "Progress",
    "Resolved",
    "Shelved",
    "choose_draft",
    "drafts_for",
    "info_of",
    "load_catalogue",
    "look",
    "mlx_installed",
    "recommended_drafts",
    "require_mlx",
    "resolve",
    "smaller_forms",
    "smaller_models",
]
