"""Model references: from what a person types to a file on this machine."""

from edgespec.catalog.catalogue import Catalogue, ModelEntry, load_catalogue, recommended_drafts
from edgespec.catalog.download import Progress
from edgespec.catalog.reference import Resolved, draft_for, resolve

__all__ = [
    "Catalogue",
    "ModelEntry",
    "Progress",
    "Resolved",
    "draft_for",
    "load_catalogue",
    "recommended_drafts",
    "resolve",
]
