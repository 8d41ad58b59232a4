"""Remove models from the Hugging Face cache. Models that belong to other programs are never deleted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ModelFileError, OptionError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.store.hub_cache import hub_cache_folder
from edgespec.store.reference import Resolved
from edgespec.system.files import delete_files, error_reason, write_advice

__all__ = ["RemovalPlan", "plan_removal"]

# Why edgespec does not remove a model, with a hint, keyed by where the model was found.
_REFUSALS = {
    "embedded": ("it is part of edgespec", ""),
    "ollama": ("it belongs to Ollama", "use `ollama rm`"),
    "lmstudio": ("it belongs to LM Studio", "delete it in LM Studio"),
    "path": ("it is your own file", "delete the file yourself"),
}


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """The files to delete when a model is removed.

    Attributes:
        links: Links in the cache's snapshots.
        blobs: Data files that no other model uses.
    """

    links: tuple[Path, ...]
    blobs: tuple[Path, ...]

    @property
    def size_bytes(self) -> int:
        """Number of bytes that the removal frees."""
        return sum(path.stat().st_size for path in self.blobs)

    def execute(self) -> int:
        """Delete the model's files and return the number of bytes freed. Raises ModelFileError on failure."""
        try:
            freed_bytes = delete_files(self.blobs)
            for link in self.links:
                link.unlink(missing_ok=True)
                with suppress(OSError):
                    link.parent.rmdir()
        except OSError as error:
            raise ModelFileError(
                f"{self.links[0]} cannot be deleted: {error_reason(error)}",
                write_advice(error, self.links[0].parent),
                code="file_not_written",
            ) from error
        return freed_bytes


def plan_removal(resolved: Resolved) -> RemovalPlan:
    """Find the files that belong only to this cached model.

    Raises:
        OptionError: The model is not in the Hugging Face cache.
    """
    if resolved.source != "hub":
        reason, hint = _REFUSALS[resolved.source]
        raise OptionError(f"edgespec does not remove {resolved.name}, because {reason}", hint)
    cache = hub_cache_folder().resolve()
    if resolved.path.is_dir():
        links = sorted(path for path in resolved.path.iterdir() if path.is_file())
    else:
        links = gguf_files(resolved.path)
    repository = next((p for p in resolved.path.absolute().parents if p.name.startswith("models--")), None)
    if repository is None or not repository.resolve().is_relative_to(cache):
        raise OptionError(
            f"{resolved.path} is not in the Hugging Face cache {cache}", "delete the model yourself"
        )
    own = {link.absolute() for link in links}
    others = {
        path.resolve()
        for path in (repository / "snapshots").rglob("*")
        if path.is_file() and path.absolute() not in own
    }
    blobs = {link.resolve() for link in links} - others
    if not all(blob.is_relative_to(cache) for blob in blobs):
        raise OptionError(
            f"{resolved.path} links to files outside the Hugging Face cache {cache}",
            "delete the model yourself",
        )
    return RemovalPlan(tuple(links), tuple(sorted(blobs)))
