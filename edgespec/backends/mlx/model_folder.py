"""Validation of the folder of a model or an adapter before loading, from headers and configuration."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.checkpoint_names import TOKENIZERS, WEIGHTS, WEIGHTS_INDEX
from edgespec.errors import ModelFileError

__all__ = ["StoredWeights", "check_adapter", "check_tokenizer", "check_weights", "read_config", "read_json"]

# Maximum size of a safetensors header, as in the safetensors library.
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of weight files.

    Attributes:
        file_bytes: Size of the files.
        by_dtype: Bytes of tensors by the name of their data type in safetensors, such as `BF16`.
    """

    file_bytes: int
    by_dtype: Counter[str]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.by_dtype.total()

    def __add__(self, other: StoredWeights) -> StoredWeights:
        return StoredWeights(self.file_bytes + other.file_bytes, self.by_dtype + other.by_dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        ModelFileError: The folder has no config.json of a language model that mlx-lm supports itself.
    """
    if folder.is_file():
        with folder.open("rb") as stream:
            gguf = stream.read(4) == b"GGUF"
        if gguf:
            raise ModelFileError(
                f"{folder} is a GGUF file, and the MLX backend loads folders only",
                "use llama.cpp for GGUF models, or give the folder of an MLX model",
            )
        raise ModelFileError(f"{folder} is a file, not a folder", "give the folder that holds config.json")
    config = read_json(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelFileError(
            f"{folder / 'config.json'} does not state a model_type",
            "choose a folder that holds a language model",
        )
    if config.get("model_file") is not None:
        raise ModelFileError(
            f"{folder} needs to run its own Python file, {str(config['model_file'])!r}; edgespec runs none",
            "choose a model that mlx-lm supports itself",
        )
    return config


def read_json(folder: Path, file: str, hint: str = "download the model again") -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        folder: The folder of the model.
        file: Name of the file.
        hint: What to do if the file is missing, for the error message.

    Raises:
        ModelFileError: The file is missing or holds no JSON object.
    """
    try:
        value = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not folder.exists():
            raise ModelFileError(f"{folder} does not exist", "check the path") from error
        raise ModelFileError(f"{folder} has no {file}", hint) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{folder / file} is not JSON: {error}", "download it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{folder / file} holds no JSON object", "download it again")
    return value


def check_tokenizer(folder: Path) -> None:
    """Raise ModelFileError if the folder has no tokenizer."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise ModelFileError(f"{folder} has no tokenizer.json", "download the tokenizer's files as well")


def check_weights(folder: Path) -> StoredWeights:
    """Return the sizes of a model's weights. Raises ModelFileError if weights are missing or damaged."""
    return _stored(_weight_files(folder))


def check_adapter(folder: Path) -> StoredWeights:
    """Return the sizes of an adapter's weights.

    Raises:
        ModelFileError: The folder holds no adapter of mlx-lm, or it is incomplete or damaged.
    """
    if (folder / "adapter_model.safetensors").exists() and not (folder / "adapters.safetensors").exists():
        raise ModelFileError(
            f"{folder} holds an adapter of PEFT, not of mlx-lm", "train or convert it with mlx-lm"
        )
    hint = "give the folder that `mlx_lm.lora --adapter-path` wrote"
    read_json(folder, "adapter_config.json", hint)
    weights = folder / "adapters.safetensors"
    if not weights.exists():
        raise ModelFileError(f"{folder} has no {weights.name}", hint)
    return _stored([weights])


def _stored(files: list[Path]) -> StoredWeights:
    by_dtype = sum((_tensor_bytes(file) for file in files), Counter[str]())
    if not by_dtype:
        raise ModelFileError(f"{files[0]} holds no tensors", "download the model again")
    return StoredWeights(sum(file.stat().st_size for file in files), by_dtype)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that mlx-lm reads. Raises ModelFileError if one that the index names is missing."""
    files = sorted(folder.glob(WEIGHTS))
    index = folder / WEIGHTS_INDEX
    if index.exists():
        shards = read_json(folder, index.name).get("weight_map")
        named = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else []
        missing = [shard for shard in named if not (folder / shard).exists()]
        if missing:
            raise ModelFileError(
                f"{len(missing)} of {len(named)} weight files of {folder} are missing, such as {missing[0]}",
                "download them again",
            )
    if files:
        return files
    if any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"{folder} has safetensors files, but none is named model*.safetensors",
            "rename the weights or convert the model with `mlx_lm.convert`",
        )
    others = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.npz") for file in folder.glob(kind))
    if others:
        raise ModelFileError(
            f"the weights of {folder} are in {others[0]}, and MLX reads safetensors only",
            "convert the model with `mlx_lm.convert`, or choose one with safetensors",
        )
    raise ModelFileError(f"{folder} has no weights (model*.safetensors)", "download the model again")


def _tensor_bytes(file: Path) -> Counter[str]:
    """Return the bytes of tensors by data type, from the header of a safetensors file.

    The header is its own length in 8 bytes, then JSON with the byte range of every tensor.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(8)
        if begin.startswith(b"version "):
            raise ModelFileError(f"{file} is a Git LFS pointer, not the weights", "run `git lfs pull`")
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelFileError(
                f"{file} is truncated or not a safetensors file ({size:,} bytes)", "download it again"
            )
        header = stream.read(length)
    by_dtype: Counter[str] = Counter()
    needed = 8 + length
    try:
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                by_dtype[str(tensor["dtype"])] += last - first
                needed = max(needed, 8 + length + last)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"the header of {file} is damaged", "download it again") from error
    if needed > size:
        raise ModelFileError(f"{file} is truncated: it has {size:,} of {needed:,} bytes", "download it again")
    return by_dtype
