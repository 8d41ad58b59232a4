"""Determine which files an MLX model needs and which are missing, without importing MLX."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.backends.model_facts import Adapter
from edgespec.errors import BackendMissingError, ModelFileError, OptionError, shorten
from edgespec.files import read_regular_file, regular_file_bytes
from edgespec.heads.residual_layout import residual_head_method
from edgespec.installation import setup_command

__all__ = [
    "MAX_JSON_BYTES",
    "TOKENIZERS",
    "WEIGHTS",
    "WEIGHTS_INDEX",
    "TensorHeader",
    "check_mlx_adapters",
    "head_weights",
    "is_complete_without_config",
    "is_weights",
    "missing_among",
    "missing_files",
    "missing_from_head",
    "mlx_installed",
    "read_json_object",
    "read_tensors",
    "require_mlx",
]

# Maximum size of a safetensors header in bytes. The safetensors library has the same limit.
_MAX_HEADER_BYTES = 100 * 2**20
# Maximum size of a model's JSON file in bytes. The largest tokenizer files are about 35 MB.
MAX_JSON_BYTES = 1 << 28
# File name pattern of the weights that mlx-lm loads.
WEIGHTS = "model*.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# File name patterns of head weights, in order of preference. The first pattern that matches any file is used.
# All patterns but the first are PyTorch formats.
HEAD_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
# File name patterns of tokenizers. An MLX model needs at least one of these files.
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
)
_PART = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")


def mlx_installed() -> bool:
    """Return whether mlx and mlx-lm are installed, without importing them."""
    return all(importlib.util.find_spec(library) is not None for library in ("mlx", "mlx_lm"))


def require_mlx(model: str) -> None:
    """Raise BackendMissingError if mlx or mlx-lm is not installed. `model` is named in the message."""
    if not mlx_installed():
        raise BackendMissingError(
            f"{model} is an MLX model, but mlx and mlx-lm are not installed",
            f"install them with `{setup_command('mlx')}`, or choose a GGUF model",
        )


def check_mlx_adapters(adapters: Sequence[Adapter], model: Path) -> None:
    """Check that there is one adapter, without a scale, and that its folder exists.

    Raises:
        OptionError: There are several adapters, or the adapter has a scale.
        ModelFileError: The folder does not exist.
    """
    if len(adapters) > 1 or adapters[0].scale != 1:
        raise OptionError(
            f"{model.name} is an MLX model, to which only one adapter can be applied, without a scale",
            "pass a single adapter, or merge the adapters with mlx-lm",
        )
    if not Path(adapters[0].path).is_dir():
        raise ModelFileError(
            f"the adapter folder {adapters[0].path} does not exist",
            "pass the folder that `mlx_lm.lora --adapter-path` wrote",
        )


def missing_files(folder: Path) -> list[str]:
    """Return the names of the files missing from an MLX model folder.

    Raises:
        ModelFileError: The weight index is invalid.
    """
    # `is_file` returns False for a symbolic link to a missing file, so unfinished downloads count as missing.
    names = {path.name for path in folder.iterdir() if path.is_file()}
    listed = _listed_weights(folder / WEIGHTS_INDEX) - names if WEIGHTS_INDEX in names else set()
    return list(dict.fromkeys([*missing_among(names), *sorted(listed)]))


def is_weights(name: str) -> bool:
    """Return whether `name` is the name of a weight file."""
    return fnmatchcase(name, WEIGHTS)


def missing_among(names: Iterable[str]) -> list[str]:
    """Return which files an MLX model lacks, given the names of the files that it has."""
    names = set(names)
    missing = [] if "config.json" in names else ["config.json"]
    if not any(fnmatchcase(name, pattern) for name in names for pattern in TOKENIZERS):
        missing.append("tokenizer.json")
    weights = sorted(name for name in names if is_weights(name))
    if not weights:
        return [*missing, "model.safetensors"]
    for name in weights:
        if part := _PART.search(name):
            count = int(part.group(1))
            every = (f"{name[: part.start()]}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))
            missing += [
                part_name for part_name in every if part_name not in names and part_name not in missing
            ]
    return missing


def missing_from_head(folder: Path) -> list[str]:
    """Return the names of the files that a head in the layout of Hugging Face lacks."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    weights = head_weights(names)
    missing = [] if "config.json" in names or is_complete_without_config(weights) else ["config.json"]
    return missing if weights else [*missing, "model.safetensors"]


def is_complete_without_config(weights: Iterable[str]) -> bool:
    """Return whether these files are Medusa or Hydra weights, whose shapes determine all sizes."""
    return any(residual_head_method(Path(name)) for name in weights)


def head_weights(names: Iterable[str]) -> list[str]:
    """Return the names of the files with the weights of a head, given the names of all its files."""
    names = sorted(names)
    matches = ([name for name in names if fnmatchcase(name, pattern)] for pattern in HEAD_WEIGHTS)
    return next(filter(None, matches), [])


def _listed_weights(index: Path) -> set[str]:
    try:
        return {
            str(name) for name in json.loads(read_regular_file(index, MAX_JSON_BYTES))["weight_map"].values()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{index} is not a valid index of weight files: {type(error).__name__}",
            "download the model again",
        ) from error


class TensorHeader(NamedTuple):
    """The shape, safetensors data type (such as `BF16`) and size of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ModelFileError if the file cannot be read or is invalid."""
    try:
        value = json.loads(read_regular_file(path, MAX_JSON_BYTES).decode("utf-8"))
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read: {error.strerror}", "download the model again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {shorten(error)}", "download it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not contain a JSON object", "download it again")
    return value


def read_tensors(file: Path) -> dict[str, TensorHeader]:
    """Return the tensors in a safetensors file, keyed by name.

    Only the header is read. The file starts with the length of the header (8 bytes), followed by the header
    itself in JSON format, which contains the byte range of every tensor.

    Raises:
        ModelFileError: The file cannot be read, or it is damaged or truncated.
    """
    try:
        size_bytes = regular_file_bytes(file)
        with file.open("rb") as stream:
            begin = stream.read(8)
            if begin.startswith(b"version "):
                raise ModelFileError(f"{file} is a Git LFS pointer, not the weights", "run `git lfs pull`")
            length = int.from_bytes(begin, "little")
            if len(begin) < 8 or length > min(_MAX_HEADER_BYTES, size_bytes - 8):
                raise ModelFileError(
                    f"{file} is truncated or not a safetensors file ({size_bytes:,} bytes)",
                    "download it again",
                )
            header = json.loads(stream.read(length))
        tensors, needed_bytes = {}, 0
        for name, entry in header.items():
            if name != "__metadata__":
                begin_offset, end_offset = entry["data_offsets"]
                needed_bytes = max(needed_bytes, 8 + length + end_offset)
                shape = tuple(int(size) for size in entry["shape"])
                tensors[name] = TensorHeader(shape, str(entry["dtype"]), end_offset - begin_offset)
    except OSError as error:
        raise ModelFileError(f"{file} cannot be read: {error.strerror}", "download it again") from error
    except (ValueError, ArithmeticError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"the header of {file} is damaged: {shorten(error)}", "download it again"
        ) from error
    if needed_bytes > size_bytes:
        raise ModelFileError(
            f"{file} is truncated: it has {size_bytes:,} of {needed_bytes:,} bytes", "download it again"
        )
    return tensors
