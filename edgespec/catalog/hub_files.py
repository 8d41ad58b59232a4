"""Selects the files of a model in a Hugging Face repository, and finds them in the Hugging Face cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from edgespec.backends.mlx_files import is_weights, missing_among, missing_files
from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.files import read_regular_file

__all__ = [
    "DEFAULT_QUANTISATION",
    "HubFile",
    "cached_folder",
    "cached_model",
    "choose_files",
    "choose_folder_files",
    "holds_gguf",
    "is_model_file",
    "is_quantisation",
    "join_names",
    "repository_folder",
    "snapshots",
]

DEFAULT_QUANTISATION = "Q4_K_M"
# Maximum number of names listed in an error message.
_MAX_LISTED = 20
# Files that an MLX model needs besides its weights: configuration, tokenizer and chat template.
_MLX_SUPPORT_FILES = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_LABEL = re.compile(r"(?:^|[-_.])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4\w*))$", re.IGNORECASE)


@dataclass(frozen=True)
class HubFile:
    """A file in a repository.

    Attributes:
        name: Path within the repository.
        size_bytes: File size. 0 if unknown.
    """

    name: str
    size_bytes: int = 0

    @property
    def stem(self) -> str:
        """The path without `.gguf` and the part number. All parts of a split model share it."""
        return _PART.sub("", self.name[: -len(".gguf")])

    @property
    def quantisation(self) -> str:
        """The upper-case quantisation at the end of the name, such as `Q4_K_M`. Empty if there is none."""
        match = _LABEL.search(self.stem.rsplit("/", 1)[-1])
        return match.group(1).upper() if match else ""

    @property
    def part_count(self) -> int:
        """Number of files that the model is split into."""
        match = _PART.search(self.name[: -len(".gguf")])
        return int(match.group(2)) if match else 1


def is_quantisation(text: str) -> bool:
    """Return whether `text` is a quantisation label, such as `q4_k_m`."""
    match = _LABEL.match(text)
    return match is not None and match.group(1) == text


def join_names(names: Sequence[str]) -> str:
    """Join names for an error message. Show the first 20 and the number of omitted names."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def choose_files(repository: str, files: Iterable[HubFile], quantisation: str | None) -> list[HubFile]:
    """Return the files of a GGUF model in a repository, ordered by part number.

    Args:
        repository: `user/repo`, for error messages.
        files: The files in the repository.
        quantisation: A label (case is ignored), or the name of a `.gguf` file. Defaults to Q4_K_M, or to the
            only model if there is just one.

    Raises:
        ModelNotFoundError: No model matches, several models match, or parts are missing. The message lists
            the alternatives.
    """
    models: dict[str, list[HubFile]] = {}
    for file in sorted(filter(is_model_file, files), key=lambda file: file.name):
        models.setdefault(file.stem, []).append(file)
    if not models:
        raise ModelNotFoundError(
            f"{repository} contains no GGUF model",
            "use a repository of the same model that ends in -GGUF",
        )
    matching = _matching(models, quantisation)
    label = quantisation or DEFAULT_QUANTISATION
    if not matching:
        labels = list(dict.fromkeys(parts[0].quantisation or parts[0].name for parts in models.values()))
        raise ModelNotFoundError(
            f"{repository} has no {label}; it has {join_names(labels)}",
            f"choose one of these, such as {repository}:{labels[0]}",
        )
    if len(matching) > 1:
        names = [parts[0].name for parts in matching]
        raise ModelNotFoundError(
            f"{repository} has {len(matching)} models with quantisation {label}: {join_names(names)}",
            f"name the file, such as hf:{repository}:{names[0]}",
        )
    parts = matching[0]
    if len(parts) != parts[0].part_count:
        raise ModelNotFoundError(
            f"{repository} has only {len(parts)} of the {parts[0].part_count} parts of {parts[0].stem}",
            "choose another quantisation or repository",
        )
    return parts


def holds_gguf(files: Iterable[HubFile]) -> bool:
    """Return whether any file is part of a GGUF language model."""
    return any(map(is_model_file, files))


def is_model_file(file: HubFile) -> bool:
    """Return whether a file name belongs to a GGUF language model."""
    name = file.name.rsplit("/", 1)[-1].lower()
    # Names of projectors and importance matrices also end in .gguf, but they are not language models.
    return name.endswith(".gguf") and not name.startswith("mmproj") and "imatrix" not in name


def _matching(models: dict[str, list[HubFile]], quantisation: str | None) -> list[list[HubFile]]:
    label = (quantisation or DEFAULT_QUANTISATION).lower()
    if label.endswith(".gguf"):
        return [
            parts
            for parts in models.values()
            if any(label in (file.name.lower(), file.name.rsplit("/", 1)[-1].lower()) for file in parts)
        ]
    matching = [parts for parts in models.values() if parts[0].quantisation.lower() == label]
    if not matching and quantisation is None and len(models) == 1:
        return list(models.values())
    return matching


def repository_folder(cache: Path, repository: str) -> Path:
    """Return the folder of a model repository in the Hugging Face cache."""
    return cache / f"models--{repository.replace('/', '--')}"


def cached_model(cache: Path, repository: str, quantisation: str | None) -> Path | None:
    """Return the first file of a GGUF model in the Hugging Face cache, or None if any part is missing."""
    for snapshot in snapshots(repository_folder(cache, repository)):
        # `exists` is False for a link whose blob is missing, so unfinished downloads are skipped.
        present = [path for path in snapshot.rglob("*.gguf") if path.exists()]
        files = [HubFile(path.relative_to(snapshot).as_posix()) for path in present]
        chosen = _choose_or_none(repository, files, quantisation)
        if chosen:
            return snapshot / chosen[0].name
    return None


def _choose_or_none(repository: str, files: Sequence[HubFile], quantisation: str | None) -> list[HubFile]:
    try:
        return choose_files(repository, files, quantisation)
    except ModelNotFoundError:
        return []


def snapshots(folder: Path) -> Iterator[Path]:
    """Yield the snapshots of a cached repository: `main` first, then the others from newest to oldest."""
    try:
        folders = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
        main = _read_ref(folder / "refs" / "main")
        yield from sorted(folders, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    except OSError:
        return


def _read_ref(ref: Path) -> str:
    """Return the commit that a ref file names. Empty if the file is missing or cannot be read."""
    try:
        return read_regular_file(ref).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def choose_folder_files(repository: str, files: Iterable[HubFile]) -> list[HubFile]:
    """Return the files of the MLX model in a repository, weights last.

    Raises:
        ModelNotFoundError: The repository contains no complete MLX model. The message lists the missing
            files.
    """
    model_files = [file for file in files if "/" not in file.name and _is_mlx_file(file.name)]
    missing = missing_among(file.name for file in model_files)
    if missing:
        raise ModelNotFoundError(
            f"{repository} contains no GGUF model, and its MLX model lacks {', '.join(missing)}",
            "look for a repository of the same model that ends in -GGUF, or one of mlx-community",
        )
    return sorted(model_files, key=lambda file: (is_weights(file.name), file.name))


def cached_folder(cache: Path, repository: str) -> Path | None:
    """Return the folder of an MLX model in the Hugging Face cache, or None if any file is missing."""
    for snapshot in snapshots(repository_folder(cache, repository)):
        try:
            if not missing_files(snapshot):
                return snapshot
        except (ModelFileError, OSError):
            continue
    return None


def _is_mlx_file(name: str) -> bool:
    return is_weights(name) or any(fnmatchcase(name, pattern) for pattern in _MLX_SUPPORT_FILES)
