"""Which files of a repository make up the model that was asked for, and where the shared cache keeps them."""

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
    "listed",
    "repository_folder",
    "snapshots",
]

DEFAULT_QUANTISATION = "Q4_K_M"
_MOST_LISTED = 20
_OTHERS = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_LABEL = re.compile(r"(?:^|[-_.])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4\w*))$", re.IGNORECASE)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; `size_bytes` is 0 where it is not known."""

    name: str
    size_bytes: int = 0

    @property
    def stem(self) -> str:
        """The path without `.gguf` and without the number of a split part: equal for all parts of a model."""
        return _PART.sub("", self.name[: -len(".gguf")])

    @property
    def quantisation(self) -> str:
        """The quantisation the name ends in, upper case (`Q4_K_M`); empty when it names none."""
        found = _LABEL.search(self.stem.rsplit("/", 1)[-1])
        return found.group(1).upper() if found else ""

    @property
    def part_count(self) -> int:
        """How many files the model is split into."""
        found = _PART.search(self.name[: -len(".gguf")])
        return int(found.group(2)) if found else 1


def is_quantisation(text: str) -> bool:
    """Whether `text` is the label of a quantisation, such as q4_k_m."""
    found = _LABEL.match(text)
    return found is not None and found.group(1) == text


def listed(names: Sequence[str]) -> str:
    """Names for an error; of very many the first."""
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def choose_files(repository: str, files: Iterable[HubFile], quantisation: str | None) -> list[HubFile]:
    """The files of the model that was asked for, all parts in order.

    `quantisation` is a label in any case, a file name ending in `.gguf`, or None for the default: Q4_K_M,
    or the only one there is. Raises ModelNotFoundError, naming what there is, when nothing or too much fits.
    """
    models: dict[str, list[HubFile]] = {}
    for file in sorted(filter(is_model_file, files), key=lambda file: file.name):
        models.setdefault(file.stem, []).append(file)
    if not models:
        raise ModelNotFoundError(
            f"{repository} holds no GGUF model", "look for a repository of the same model that ends in -GGUF"
        )
    fitting = _fitting(models, quantisation)
    wanted = quantisation or DEFAULT_QUANTISATION
    if not fitting:
        labels = list(dict.fromkeys(parts[0].quantisation or parts[0].name for parts in models.values()))
        raise ModelNotFoundError(
            f"{repository} has no {wanted}; it has {listed(labels)}",
            f"ask for one, such as {repository}:{labels[0]}",
        )
    if len(fitting) > 1:
        names = [parts[0].name for parts in fitting]
        raise ModelNotFoundError(
            f"{repository} has {len(fitting)} models at {wanted}: {listed(names)}",
            f"name the file, such as hf:{repository}:{names[0]}",
        )
    parts = fitting[0]
    if len(parts) != parts[0].part_count:
        raise ModelNotFoundError(
            f"{repository} has {len(parts)} of the {parts[0].part_count} parts of {parts[0].stem}",
            "choose another quantisation or repository",
        )
    return parts


def holds_gguf(files: Iterable[HubFile]) -> bool:
    """Whether any of the files is a GGUF model."""
    return any(map(is_model_file, files))


def is_model_file(file: HubFile) -> bool:
    """Whether a file is of a GGUF language model, by its name."""
    name = file.name.rsplit("/", 1)[-1].lower()
    # Projectors and importance matrices share the ending but are no language models.
    return name.endswith(".gguf") and not name.startswith("mmproj") and "imatrix" not in name


def _fitting(models: dict[str, list[HubFile]], quantisation: str | None) -> list[list[HubFile]]:
    wanted = (quantisation or DEFAULT_QUANTISATION).lower()
    if wanted.endswith(".gguf"):
        return [
            parts
            for parts in models.values()
            if any(wanted in (file.name.lower(), file.name.rsplit("/", 1)[-1].lower()) for file in parts)
        ]
    fitting = [parts for parts in models.values() if parts[0].quantisation.lower() == wanted]
    if not fitting and quantisation is None and len(models) == 1:
        return list(models.values())
    return fitting


def repository_folder(cache: Path, repository: str) -> Path:
    """Where the shared Hugging Face cache keeps a model repository."""
    return cache / f"models--{repository.replace('/', '--')}"


def cached_model(cache: Path, repository: str, quantisation: str | None) -> Path | None:
    """The first file of a model that is wholly in the shared cache, found without a network, or None."""
    for snapshot in snapshots(repository_folder(cache, repository)):
        # A link whose blob is gone does not exist, so an interrupted download is never taken for a model.
        present = [path for path in snapshot.rglob("*.gguf") if path.exists()]
        files = [HubFile(path.relative_to(snapshot).as_posix()) for path in present]
        chosen = _chosen(repository, files, quantisation)
        if chosen:
            return snapshot / chosen[0].name
    return None


def _chosen(repository: str, files: Sequence[HubFile], quantisation: str | None) -> list[HubFile]:
    try:
        return choose_files(repository, files, quantisation)
    except ModelNotFoundError:
        return []


def snapshots(folder: Path) -> Iterator[Path]:
    """The snapshots of a cached repository: the one `main` stands for, then the others, newest first."""
    try:
        there = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
        main = _text(folder / "refs" / "main")
        yield from sorted(there, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    except OSError:
        return


def _text(ref: Path) -> str:
    """The commit that a ref is; empty for none, or for one that is being written."""
    try:
        return read_regular_file(ref).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def choose_folder_files(repository: str, files: Iterable[HubFile]) -> list[HubFile]:
    """The files of a repository that make up its MLX model, the weights last.

    Raises ModelNotFoundError, naming what is not there, when they make up none.
    """
    wanted = [file for file in files if "/" not in file.name and _is_wanted(file.name)]
    missing = missing_among(file.name for file in wanted)
    if missing:
        raise ModelNotFoundError(
            f"{repository} holds no GGUF model, and for an MLX one it lacks {', '.join(missing)}",
            "look for a repository of the same model that ends in -GGUF, or one of mlx-community",
        )
    return sorted(wanted, key=lambda file: (is_weights(file.name), file.name))


def cached_folder(cache: Path, repository: str) -> Path | None:
    """The model in MLX's form that is wholly in the shared cache, found without a network, or None."""
    for snapshot in snapshots(repository_folder(cache, repository)):
        try:
            if not missing_files(snapshot):
                return snapshot
        except (ModelFileError, OSError):
            continue
    return None


def _is_wanted(name: str) -> bool:
    return is_weights(name) or any(fnmatchcase(name, pattern) for pattern in _OTHERS)
