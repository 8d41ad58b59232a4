"""Check the configuration files and weight headers of model and adapter folders before loading."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.mlx_files import TOKENIZERS, WEIGHTS, WEIGHTS_INDEX
from edgespec.errors import ModelFileError

__all__ = ["StoredWeights", "check_adapter", "check_tokenizer", "check_weights", "read_config", "read_json"]

# Maximum size of a safetensors header in bytes. Same as in the safetensors library.
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Sizes of a model's weight files and of the tensors in them.

    Attributes:
        file_bytes: Total size of the files in bytes.
        by_dtype: Size of the tensors in bytes, keyed by safetensors data type, such as `BF16`.
    """

    file_bytes: int
    by_dtype: Counter[str]

    @property
    def tensor_bytes(self) -> int:
        """Total size of all tensors in bytes."""
        return self.by_dtype.total()

    def __add__(self, other: StoredWeights) -> StoredWeights:
        return StoredWeights(self.file_bytes + other.file_bytes, self.by_dtype + other.by_dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json in a model folder.

    Raises:
        ModelFileError: The folder has no valid config.json, or the model requires its own Python code.
    """
    if folder.is_file():
        with folder.open("rb") as stream:
            gguf = stream.read(4) == b"GGUF"
        if gguf:
            raise ModelFileError(
                f"{folder} is a GGUF file, but the MLX backend loads only folders",
                "use llama.cpp for GGUF models, or specify the folder of an MLX model",
            )
        raise ModelFileError(f"{folder} is a file, not a folder", "use the folder that contains config.json")
    config = read_json(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelFileError(
            f"{folder / 'config.json'} has no model_type",
            "choose a folder that contains a language model",
        )
    if config.get("model_file") is not None:
        raise ModelFileError(
            f"{folder} requires its own Python file {str(config['model_file'])!r}, which edgespec never runs",
            "choose a model that mlx-lm supports without custom code",
        )
    return config


def read_json(folder: Path, file: str, hint: str = "download the model again") -> dict[str, Any]:
    """Read a file that contains a JSON object.

    Args:
        folder: Path of the model folder.
        file: Name of the file.
        hint: Hint for the error message if the file is missing.

    Raises:
        ModelFileError: The file is missing or does not contain a JSON object.
    """
    try:
        value = json.loads((folder / file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not folder.exists():
            raise ModelFileError(f"{folder} does not exist", "check the path") from error
        raise ModelFileError(f"{folder} has no {file}", hint) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{folder / file} is not valid JSON: {error}", "download it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{folder / file} does not contain a JSON object", "download it again")
    return value


def check_tokenizer(folder: Path) -> None:
    """Raise ModelFileError if the folder contains no tokenizer."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise ModelFileError(f"{folder} has no tokenizer.json", "download the tokenizer files as well")


def check_weights(folder: Path) -> StoredWeights:
    """Return the sizes of a model's weights. Raises ModelFileError if files are missing or damaged."""
    return _stored(_weight_files(folder))


def check_adapter(folder: Path) -> StoredWeights:
    """Return the sizes of an adapter's weights.

    Raises:
        ModelFileError: The folder does not contain an mlx-lm adapter, or it is damaged or incomplete.
    """
    if (folder / "adapter_model.safetensors").exists() and not (folder / "adapters.safetensors").exists():
        raise ModelFileError(
            f"{folder} contains a PEFT adapter, not an mlx-lm adapter", "train or convert it with mlx-lm"
        )
    hint = "use the folder that `mlx_lm.lora --adapter-path` wrote"
    read_json(folder, "adapter_config.json", hint)
    weights = folder / "adapters.safetensors"
    if not weights.exists():
        raise ModelFileError(f"{folder} has no {weights.name}", hint)
    return _stored([weights])


def _stored(files: list[Path]) -> StoredWeights:
    by_dtype = sum((_tensor_bytes(file) for file in files), Counter[str]())
    if not by_dtype:
        raise ModelFileError(f"{files[0]} contains no tensors", "download the model again")
    return StoredWeights(sum(file.stat().st_size for file in files), by_dtype)


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files that mlx-lm will load. Raises ModelFileError if any are missing."""
    files = sorted(folder.glob(WEIGHTS))
    index = folder / WEIGHTS_INDEX
    if index.exists():
        shards = read_json(folder, index.name).get("weight_map")
        named = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else []
        missing = [shard for shard in named if not (folder / shard).exists()]
        if missing:
            raise ModelFileError(
                f"{len(missing)} of {len(named)} weight files in {folder} are missing, such as {missing[0]}",
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
            f"the weights in {folder} are stored in {others[0]}, but MLX reads only safetensors",
            "convert the model with `mlx_lm.convert`, or choose a model with safetensors files",
        )
    raise ModelFileError(f"{folder} has no weights (model*.safetensors)", "download the model again")


def _tensor_bytes(file: Path) -> Counter[str]:
    """Return the size of the tensors in a safetensors file, in bytes, keyed by data type.

    Only the header is read. The file starts with the length of the header (8 bytes), followed by the header
    in JSON format, which contains the byte range of every tensor.
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
