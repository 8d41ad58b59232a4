"""Taking a model out of the Hugging Face cache; what other programs keep is theirs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.backends.gguf_files import gguf_files
from edgespec.catalog.hub_cache import hub_cache
from edgespec.catalog.reference import Resolved
from edgespec.errors import ModelFileError, OptionError
from edgespec.files import delete_files, error_reason

__all__ = ["RemovalPlan", "plan_removal"]

_THEIRS = {
    "embedded": "it comes with edgespec",
    "ollama": "Ollama keeps it: use `ollama rm`",
    "lmstudio": "LM Studio keeps it: delete it there",
    "path": "it is a file of yours: delete it yourself",
}


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """What would be deleted. links: in snapshots. blobs: the bytes, where nothing else uses them."""

    links: tuple[Path, ...]
    blobs: tuple[Path, ...]

    @property
    def size_bytes(self) -> int:
        """What that frees."""
        return sum(path.stat().st_size for path in self.blobs)

    def execute(self) -> int:
        """Delete it. Gives the bytes that were freed. Raises ModelFileError where that is not allowed."""
        try:
            freed_bytes = delete_files(self.blobs)
            for link in self.links:
                link.unlink(missing_ok=True)
                with suppress(OSError):  # other files are in it
                    link.parent.rmdir()
        except OSError as error:
            raise ModelFileError(
                f"{self.links[0]} cannot be deleted: {error_reason(error)}", "make its folder writable"
            ) from error
        return freed_bytes


def plan_removal(found: Resolved) -> RemovalPlan:
    """Find the files that belong to one cached model and to no other.

    Raises OptionError for a model that is not in the cache.
    """
    if found.source != "hub":
        raise OptionError(f"{found.name} is not edgespec's to remove", _THEIRS[found.source])
    cache = hub_cache().resolve()
    links = sorted(path for path in found.path.iterdir() if path.is_file()) if found.path.is_dir() else None
    if links is None:
        links = gguf_files(found.path)
    repository = next((p for p in found.path.absolute().parents if p.name.startswith("models--")), None)
    if repository is None or not repository.resolve().is_relative_to(cache):
        raise OptionError(f"{found.path} is not in the cache {cache}", "delete it yourself")
    ours = {link.absolute() for link in links}
    others = {
        path.resolve()
        for path in (repository / "snapshots").rglob("*")
        if path.is_file() and path.absolute() not in ours
    }
    blobs = {link.resolve() for link in links} - others
    if not all(blob.is_relative_to(cache) for blob in blobs):
        raise OptionError(f"{found.path} leads out of the cache {cache}", "delete it yourself")
    return RemovalPlan(tuple(links), tuple(sorted(blobs)))
