"""What the shared Hugging Face cache holds, whoever put it there: read without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgespec.backends.mlx_files import missing_files
from edgespec.catalog.hub_files import HubFile, snapshots
from edgespec.catalog.stored_models import StoredModel, files_below, group_gguf_files
from edgespec.errors import ModelFileError

__all__ = ["hub_cache", "hub_models"]

_DEPTH = 3
_PREFIX = "models--"


def hub_cache() -> Path:
    """The folder of the shared cache."""
    # Costs a tenth of a second, so only those who look into the cache pay for it.
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def hub_models() -> Iterator[StoredModel]:
    """Every GGUF model and every MLX model that the cache holds; a download that goes on is none."""
    try:
        folders = sorted(path for path in hub_cache().iterdir() if path.name.startswith(_PREFIX))
    except OSError:
        return
    for folder in folders:
        repository = folder.name.removeprefix(_PREFIX).replace("--", "/")
        seen: set[str] = set()
        try:
            for snapshot in snapshots(folder):
                yield from _of_snapshot(snapshot, repository, seen)
        except (OSError, ValueError):
            continue


def _of_snapshot(snapshot: Path, repository: str, seen: set[str]) -> Iterator[StoredModel]:
    """The models of one snapshot that no newer one has."""
    paths = [path for path in files_below(snapshot, _DEPTH) if path.suffix.lower() == ".gguf"]
    models = [
        m
        for m in group_gguf_files([HubFile(path.relative_to(snapshot).as_posix()) for path in paths])
        if m.whole
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
            return  # not all of it was wanted, or it is not here yet
    except ModelFileError:
        return
    yield StoredModel("hub", (repository, f"hf:{repository}"), snapshot, "mlx")
