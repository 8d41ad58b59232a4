"""List the models in the Hugging Face cache without network access."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgespec.backends.mlx_files import missing_files
from edgespec.catalog.hub_files import HubFile, snapshots
from edgespec.catalog.stored_models import StoredModel, files_below, group_gguf_files
from edgespec.errors import ModelFileError

__all__ = ["hub_cache_folder", "hub_models"]

# Maximum depth of subfolders to search for GGUF files in a snapshot.
_MAX_DEPTH = 3
_PREFIX = "models--"


def hub_cache_folder() -> Path:
    """Return the folder of the Hugging Face cache."""
    # Importing huggingface_hub takes 0.1 s, so import it only when it is needed.
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def hub_models() -> Iterator[StoredModel]:
    """Yield every complete GGUF and MLX model in the Hugging Face cache."""
    try:
        folders = sorted(path for path in hub_cache_folder().iterdir() if path.name.startswith(_PREFIX))
    except OSError:
        return
    for folder in folders:
        repository = folder.name.removeprefix(_PREFIX).replace("--", "/")
        seen: set[str] = set()
        try:
            for snapshot in snapshots(folder):
                yield from _snapshot_models(snapshot, repository, seen)
        except (OSError, ValueError):
            continue


def _snapshot_models(snapshot: Path, repository: str, seen: set[str]) -> Iterator[StoredModel]:
    """Yield the models in a snapshot that are not yet in `seen`, and add them to it."""
    paths = [path for path in files_below(snapshot, _MAX_DEPTH) if path.suffix.lower() == ".gguf"]
    models = [
        m
        for m in group_gguf_files([HubFile(path.relative_to(snapshot).as_posix()) for path in paths])
        if m.is_complete
    ]
    for model in models:
        first = model.files[0]
        if first.stem in seen:
            continue
        seen.add(first.stem)
        names = [f"{repository}:{first.quantisation}"] if first.quantisation else []
        names += [repository] if len(models) == 1 else []
        yield StoredModel(
            "hub",
            (*names, *(f"hf:{name}" for name in names), f"hf:{repository}:{first.name}"),
            snapshot / first.name,
        )
    if models or "" in seen or not (snapshot / "config.json").is_file():
        return
    seen.add("")
    try:
        if missing_files(snapshot):
            return  # The download is incomplete or still running.
    except ModelFileError:
        return
    yield StoredModel("hub", (repository, f"hf:{repository}"), snapshot, "mlx")
