"""Resolve references to heads, downloading missing heads."""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import partial
from pathlib import Path

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.model.formats.mlx_files import missing_from_head
from edgespec.model.heads.residual_layout import residual_head_method
from edgespec.model.registry import format_at
from edgespec.store.catalogue import HeadEntry, load_catalogue
from edgespec.store.download import HEAD, Progress, fetch
from edgespec.store.hub_cache import cached_model
from edgespec.store.hub_files import hub_name
from edgespec.store.reference import Downloader, Resolved, follow_aliases, resolve_path
from edgespec.store.reference_parsing import HubReference, NameReference, PathReference, StoreReference

__all__ = ["cached_head", "refused_model", "resolve_head", "resolve_head_with"]


def resolve_head(
    reference: str, *, allow_download: bool = True, progress: Progress | None = None
) -> Resolved:
    """Return the head that a reference names: a path, `user/repo[:file]`, or a name from the catalogue.

    Args:
        reference: The reference that the user typed.
        allow_download: Whether to download the head if it is not on this machine.
        progress: Called during a download. Returning False cancels it.

    Raises:
        ModelNotFoundError: No head matches the reference.
        ModelFileError: The file or folder cannot be read, or the reference names a model.
        DownloadError: The download failed.
        CancelledError: `progress` returned False.
    """
    download = partial(fetch, allow_download=allow_download, progress=progress, content=HEAD)
    return resolve_head_with(reference, download)


def resolve_head_with(reference: str, download: Downloader) -> Resolved:
    """Resolve a reference to a head, calling `download` if the head is not on this machine."""
    typed, catalogue = reference.strip(), load_catalogue()
    match parsed := follow_aliases(typed):
        case PathReference(path):
            return _resolve_head_path(path)
        case StoreReference():
            raise refused_model(typed)
        case HubReference(repository, quantisation):
            is_file = (quantisation or "").lower().endswith(".gguf")
            if catalogue.of_repository(repository) and not is_file:
                raise refused_model(typed)
            return _resolve_hub(typed, repository, quantisation, download)
        case NameReference():
            name = parsed.full_name
            if head := catalogue.find_head(name):
                if head.embedded_path is not None:
                    note = f"{typed} -> built in: {head.embedded_path}"
                    found = _resolve_head_path(head.embedded_path)
                    return replace(found, name=head.name, source="embedded", note=note)
                return _resolve_hub(typed, head.repository, head.gguf_file or None, download)
            if Path(name).exists():
                return _resolve_head_path(Path(name))
            if catalogue.find(name):
                raise refused_model(typed)
            nearest = difflib.get_close_matches(name.lower(), [head.name for head in catalogue.heads], n=3)
            raise ModelNotFoundError(
                f"there is no head named {name}",
                (f"did you mean {' or '.join(nearest)}? " if nearest else "")
                + "`edgespec models show TARGET` lists the heads for a model; a path or user/repo also works",
                code="head_not_found",
            )


def _resolve_head_path(path: Path) -> Resolved:
    """Return the head at a path, which can be the weight file for Medusa and Hydra heads."""
    is_weights = path.is_file() and residual_head_method(path) is not None
    return resolve_path(path.parent if is_weights else path, missing_from_head)


def _resolve_hub(typed: str, repository: str, quantisation: str | None, download: Downloader) -> Resolved:
    path = cached_model(repository, quantisation, missing_from_head) or download(repository, quantisation)
    note = f"{typed} -> hf:{hub_name(repository, quantisation)}: {path}"
    return Resolved(typed, path, "hub", None, note, format_at(path).name)


def refused_model(name: str) -> ModelFileError:
    """Return the error to raise if the user passed a model as a head."""
    return ModelFileError(
        f"{name} is a model, not a head",
        f"pass draft models with --draft, for example --draft {name}",
        code="wrong_file",
    )


def cached_head(head: HeadEntry) -> Path | None:
    """Return the local path of a head from the catalogue, or None if it must be downloaded."""
    return head.embedded_path or cached_model(head.repository, head.gguf_file or None, missing_from_head)
