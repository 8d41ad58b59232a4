"""Select a model's files in a Hugging Face repository by name, and find models in the Hugging Face cache.

This module never accesses the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePosixPath

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.model.formats.mlx_files import (
    WEIGHTS,
    head_weights,
    is_complete_without_config,
    is_weights,
    missing_among,
    missing_files,
)
from edgespec.model.heads.mtp_files import is_mtp_file
from edgespec.store.stored_models import (
    REPOSITORY_DEPTH,
    EntryBudget,
    StoredModel,
    files_below,
    folders_in,
    is_inside,
)
from edgespec.system.files import read_regular_file

_DEFAULT_QUANTISATION = "Q4_K_M"
_MAX_LISTED = 20
# Files of an MLX model: its weights, configuration, tokenizer and chat template.
_MLX_FILES = (WEIGHTS, "*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")

# Data types of a projector's weights, best first. 16-bit types are as good as F32 and take half the memory.
_PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_LABEL = re.compile(r"(?:^|[-_.])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4\w*))$", re.IGNORECASE)
_PREFIX = "models--"
# Maximum size in bytes of a ref file, which contains only a commit hash.
_MAX_REF_BYTES = 1000


@dataclass(frozen=True)
class HubFile:
    """A file in a repository.

    Attributes:
        name: Path within the repository.
        size_bytes: File size. 0 if unknown.
        etag: Checksum that names the file's content in the Hugging Face cache. Empty if unknown.
    """

    name: str
    size_bytes: int = 0
    etag: str = field(default="", compare=False)

    @property
    def stem(self) -> str:
        """The path without `.gguf` and the part number. All parts of a split model have the same stem."""
        return _PART.sub("", self.name[: -len(".gguf")])

    @property
    def quantisation(self) -> str:
        """The quantisation at the end of the name in upper case, such as `Q4_K_M`, or an empty string."""
        match = _LABEL.search(self.stem.rsplit("/", 1)[-1])
        return match.group(1).upper() if match else ""

    def is_named(self, name: str) -> bool:
        """Return whether `name` is the file's path or its last component, ignoring case."""
        path = self.name.lower()
        return name.lower() in (path, path.rsplit("/", 1)[-1])

    @property
    def part_count(self) -> int:
        """Number of files that the model is split into."""
        match = _PART.search(self.name[: -len(".gguf")])
        return int(match.group(2)) if match else 1


def hub_name(repository: str, quantisation: str | None) -> str:
    """Return `user/repo`, followed by the quantisation if there is one."""
    return f"{repository}:{quantisation}" if quantisation else repository


def is_quantisation(text: str) -> bool:
    """Return whether `text` is a quantisation label, such as `q4_k_m`."""
    match = _LABEL.match(text)
    return match is not None and match.group(1) == text


def join_names(names: Sequence[str]) -> str:
    """Join names for an error message, showing the first 20 and the number of omitted names."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def choose_files(repository: str, files: Iterable[HubFile], quantisation: str | None) -> list[HubFile]:
    """Return the files of a GGUF model in a repository, ordered by part number.

    Args:
        repository: `user/repo`, for error messages.
        files: The files in the repository.
        quantisation: A case-insensitive label, or the name of a `.gguf` file. Defaults to Q4_K_M, or to the
            only model if there is just one.

    Raises:
        ModelNotFoundError: No model or several models match, or parts are missing. The message lists the
            alternatives.
    """
    models = group_gguf_files(files)
    if not models:
        raise ModelNotFoundError(
            f"{repository} contains no GGUF model",
            "use a repository of the same model whose name ends in -GGUF",
            code="repository_unusable",
        )
    label = quantisation or _DEFAULT_QUANTISATION
    if label.lower().endswith(".gguf"):
        matching = [parts for parts in models if any(file.is_named(label) for file in parts)]
    else:
        matching = [parts for parts in models if parts[0].quantisation.lower() == label.lower()]
    if not matching and quantisation is None and len(models) == 1:
        matching = models
    if not matching:
        labels = list(dict.fromkeys(parts[0].quantisation or parts[0].name for parts in models))
        raise ModelNotFoundError(
            f"{label} is not available in {repository}, only {join_names(labels)}",
            f"choose one of them, such as {repository}:{labels[0]}",
            code="quantisation_unavailable",
        )
    if len(matching) > 1:
        names = [parts[0].name for parts in matching]
        raise ModelNotFoundError(
            f"{repository} has {len(matching)} models with quantisation {label}: {join_names(names)}",
            f"specify which one, such as hf:{repository}:{names[0]}",
            code="ambiguous",
        )
    parts = matching[0]
    if not _is_complete(parts):
        raise ModelNotFoundError(
            f"{repository} has only {len(parts)} of the {parts[0].part_count} parts of {parts[0].stem}",
            "choose another quantisation or repository",
            code="repository_unusable",
        )
    return parts


def is_gguf_model(file: HubFile) -> bool:
    """Return whether a file is part of a GGUF language model, judging by its name."""
    name = file.name.rsplit("/", 1)[-1].lower()
    # Projectors and importance matrices are also GGUF files, but not language models.
    return name.endswith(".gguf") and "mmproj" not in name and "imatrix" not in name


def is_projector(name: str) -> bool:
    """Return whether a file is a projector, judging by its name, which contains `mmproj`."""
    bare = name.rsplit("/", 1)[-1].lower()
    return bare.endswith(".gguf") and "mmproj" in bare


def best_projector(names: Iterable[str], model: str) -> str | None:
    """Return the name of the best projector for the file `model`, or None.

    The best one is in the model's folder, or else in the nearest folder above it, or else anywhere. Among
    several in the same place, it is the one that shares the longest prefix with the model's name. Ties are
    broken by data type.

    Args:
        names: Names of files, or their paths within the repository.
        model: The model's file, relative to the same folder.
    """
    folders = list(PurePosixPath(model).parents)

    def rank(name: str) -> tuple[int, int, int, str]:
        folder = PurePosixPath(name).parent
        distance = folders.index(folder) if folder in folders else len(folders)
        bare = name.lower().rsplit("/", 1)[-1].replace("mmproj", "").strip("-_.")
        pairs = zip(bare, model.lower().rsplit("/", 1)[-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kind = HubFile(name).quantisation.replace("FP", "F")
        known = kind in _PROJECTOR_TYPES
        return distance, -shared, _PROJECTOR_TYPES.index(kind) if known else len(_PROJECTOR_TYPES), name

    return min(filter(is_projector, names), key=rank, default=None)


def group_gguf_files(files: Iterable[HubFile]) -> list[list[HubFile]]:
    """Group GGUF files by model, ordered by part number. Other files are skipped."""
    models: dict[str, list[HubFile]] = {}
    for file in sorted(filter(is_gguf_model, files), key=lambda file: file.name):
        models.setdefault(file.stem, []).append(file)
    return list(models.values())


def _is_complete(parts: Sequence[HubFile]) -> bool:
    return len(parts) == parts[0].part_count


def choose_mlx_files(repository: str, files: Iterable[HubFile]) -> list[HubFile]:
    """Return the files of the MLX model in a repository, weights last.

    Raises:
        ModelNotFoundError: The repository contains no complete MLX model. The message lists the missing
            files.
    """
    top_level = [file for file in files if "/" not in file.name]
    model_files = [one for one in top_level if any(fnmatchcase(one.name, pattern) for pattern in _MLX_FILES)]
    model_files += [file for file in files if is_mtp_file(file.name) and file not in model_files]
    missing = missing_among(file.name for file in model_files)
    if missing:
        raise ModelNotFoundError(
            f"{repository} contains no GGUF model, and its MLX model lacks {', '.join(missing)}",
            "look for a repository of the same model whose name ends in -GGUF, or one from mlx-community",
            code="repository_unusable",
        )
    return sorted(model_files, key=lambda file: (is_weights(file.name), file.name))


def choose_head_files(repository: str, files: Sequence[HubFile], quantisation: str | None) -> list[HubFile]:
    """Return a head's files: GGUF files if any, otherwise the weights and the configuration.

    The file without which a head is incomplete comes last, so that an interrupted download is resumed. This
    is the configuration, except for Medusa and Hydra heads, where it is optional.

    Args:
        repository: `user/repo`, for error messages.
        files: The files in the repository.
        quantisation: As for `choose_files`. Must be None if there are no GGUF files.

    Raises:
        ModelNotFoundError: The repository contains no readable head.
    """
    if any(map(is_gguf_model, files)):
        return choose_files(repository, files, quantisation)
    top_level = [file for file in files if "/" not in file.name]
    weights = head_weights(file.name for file in top_level)
    config = [file for file in top_level if file.name == "config.json"]
    if weights and (config or is_complete_without_config(weights)) and quantisation is None:
        weight_files = [file for file in top_level if file.name in weights]
        return [*config, *weight_files] if is_complete_without_config(weights) else [*weight_files, *config]
    if quantisation is not None:
        raise ModelNotFoundError(
            f"{repository} has no GGUF files, so {quantisation} is not available",
            f"omit the quantisation: use {repository}",
            code="quantisation_unavailable",
        )
    raise ModelNotFoundError(
        f"{repository} does not contain a draft head: it has neither a GGUF file nor a config.json with"
        " weights",
        "check the name of the repository",
        code="repository_unusable",
    )


def hub_cache_folder() -> Path:
    """Return the path of the Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    """Return a repository's folder in the Hugging Face cache."""
    return hub_cache_folder() / f"{_PREFIX}{repository.replace('/', '--')}"


def snapshot_folder(path: Path) -> Path | None:
    """Return the snapshot in a Hugging Face cache that contains a file, or None."""
    for folder in path.parents:
        snapshots = folder.parent
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith(_PREFIX):
            return folder
    return None


def cached_model(
    repository: str,
    quantisation: str | None,
    missing_from_folder: Callable[[Path], list[str]] = missing_files,
) -> Path | None:
    """Return a model or a head in the Hugging Face cache, or None if any of its files is missing.

    Args:
        repository: `user/repo`.
        quantisation: The quantisation or file to select. See `choose_files`.
        missing_from_folder: Returns the names of files missing from a folder.

    Returns:
        The first file of a GGUF model, or the folder of an MLX model.
    """
    folder, budget = repository_folder(repository), EntryBudget()
    snapshots = list(_snapshots(folder, budget))
    for snapshot in snapshots:
        files = _gguf_files(folder, snapshot, budget)
        with suppress(ModelNotFoundError):
            return snapshot / choose_files(repository, files, quantisation)[0].name
    if quantisation is not None:
        return None
    return next((folder for folder in snapshots if _is_complete_folder(folder, missing_from_folder)), None)


def hub_models() -> Iterator[StoredModel]:
    """Yield every complete GGUF and MLX model in the Hugging Face cache."""
    budget = EntryBudget()
    for folder in folders_in(hub_cache_folder(), budget):
        if not folder.name.startswith(_PREFIX):
            continue
        repository = folder.name.removeprefix(_PREFIX).replace("--", "/")
        seen: set[str] = set()
        with suppress(OSError, ValueError):
            for snapshot in _snapshots(folder, budget):
                yield from _snapshot_models(folder, snapshot, repository, budget, seen)
    yield from budget.notice("hub")


def _snapshots(folder: Path, budget: EntryBudget) -> Iterator[Path]:
    """Yield the snapshots of a cached repository: `main` first, then the others from newest to oldest."""
    main = ""
    with suppress(OSError):
        ref = read_regular_file(folder / "refs" / "main", _MAX_REF_BYTES)
        main = ref.decode("utf-8", "replace").strip()
    with suppress(OSError):
        # Skip links that point outside the repository, since they could lead to an entire disk.
        snapshots = [path for path in folders_in(folder / "snapshots", budget) if is_inside(path, folder)]
        yield from sorted(snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def _gguf_files(folder: Path, snapshot: Path, budget: EntryBudget) -> list[HubFile]:
    """Return the GGUF files in a snapshot, which may be links to blobs. Unfinished downloads are left out."""
    files = files_below(snapshot, REPOSITORY_DEPTH, budget, inside=folder)
    return [
        HubFile(file.relative_to(snapshot).as_posix()) for file in files if file.suffix.lower() == ".gguf"
    ]


def _snapshot_models(
    folder: Path, snapshot: Path, repository: str, budget: EntryBudget, seen: set[str]
) -> Iterator[StoredModel]:
    """Yield the models in a snapshot that are not in `seen`, and add them to `seen`."""
    files = _gguf_files(folder, snapshot, budget)
    models = list(filter(_is_complete, group_gguf_files(files)))
    for first, *_ in models:
        if first.stem in seen:
            continue
        seen.add(first.stem)
        names = [f"{repository}:{first.quantisation}"] if first.quantisation else []
        names += [repository] if len(models) == 1 else []
        names += [*(f"hf:{name}" for name in names), f"hf:{repository}:{first.name}"]
        yield StoredModel("hub", tuple(names), snapshot / first.name)
    has_config = (snapshot / "config.json").is_file()
    if not models and "" not in seen and has_config and _is_complete_folder(snapshot, missing_files):
        seen.add("")
        yield StoredModel("hub", (repository, f"hf:{repository}"), snapshot, "mlx")


def _is_complete_folder(folder: Path, missing_from_folder: Callable[[Path], list[str]]) -> bool:
    try:
        return not missing_from_folder(folder)
    except (ModelFileError, OSError):
        return False
