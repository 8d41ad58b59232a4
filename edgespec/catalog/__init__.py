"""Resolve model references, download models and find installed models."""

from edgespec.backends.head_files import head_info, method_of
from edgespec.backends.mlx_files import mlx_installed
from edgespec.backends.model_info import ModelInfo
from edgespec.catalog.catalogue import (
    Catalogue,
    HeadEntry,
    ModelEntry,
    ModelFormat,
    load_catalogue,
)
from edgespec.catalog.download import Progress
from edgespec.catalog.drafts import DraftChoice, DraftOption, choose_draft, draft_options
from edgespec.catalog.heads import HeadOption, head_options, published_heads
from edgespec.catalog.installed import (
    InstalledModel,
    find_installed,
    read_model_info,
    smaller_models,
    smaller_quantisations,
)
from edgespec.catalog.metadata_cache import MetadataCache
from edgespec.catalog.reference import Resolved, resolve
from edgespec.catalog.speedup_estimate import MIN_ESTIMABLE_BYTES

__all__ = [
    "MIN_ESTIMABLE_BYTES",
    "Catalogue",
    "DraftChoice",
    "DraftOption",
    "HeadEntry",
    "HeadOption",
    "InstalledModel",
    "MetadataCache",
    "ModelEntry",
    "ModelFormat",
    "ModelInfo",
    "Progress",
    "Resolved",
    "choose_draft",
    "draft_options",
    "find_installed",
    "head_info",
    "head_options",
    "load_catalogue",
    "method_of",
    "mlx_installed",
    "published_heads",
    "read_model_info",
    "resolve",
    "smaller_models",
    "smaller_quantisations",
]
