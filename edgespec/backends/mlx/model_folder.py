"""The folder of a checkpoint or an adapter: is it whole, and how large, before anything is loaded."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.checkpoint_names import TOKENIZERS, WEIGHTS, WEIGHTS_INDEX
from edgespec.errors import ModelFileError

__all__ = ["StoredWeights", "check_adapter", "check_tokenizer", "check_weights", "read_config", "read_json"]

_MOST_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights on disk. by_dtype: bytes of tensors by the name of their type in safetensors, such as BF16."""

    file_bytes: int
    by_dtype: Counter[str]

    @property
    def tensor_bytes(self) -> int:
        return self.by_dtype.total()

    def __add__(self, other: StoredWeights) -> StoredWeights:
        return StoredWeights(self.file_bytes + other.file_bytes, self.by_dtype + other.by_dtype)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json. Raises ModelFileError where there is none that mlx-lm could load by itself."""
    if folder.is_file():
        with folder.open("rb") as stream:
            gguf = stream.read(4) == b"GGUF"
        if gguf:
            raise ModelFileError(
                f"{folder} is a GGUF file, and mlx reads some of those wrongly without a word",
                "GGUF models run on llama.cpp; MLX takes the folder of a checkpoint",
            )
        raise ModelFileError(f"{folder} is a file", "give the folder that holds config.json")
    config = read_json(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelFileError(
            f"{folder / 'config.json'} names no model_type", "choose a folder that holds a language model"
        )
    if config.get("model_file") is not None:
        raise ModelFileError(
            f"{folder} wants to run its own program, {str(config['model_file'])!r}, and edgespec runs none",
            "choose a model that mlx-lm knows by itself",
        )
    return config


def read_json(folder: Path, file: str, hint: str = "download the model again") -> dict[str, Any]:
    """The object in a file. Raises ModelFileError; `hint` is what to do when it is not there."""
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
    """Raises ModelFileError where no file holds a tokenizer."""
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise ModelFileError(f"{folder} has no tokenizer.json", "download the tokenizer's files as well")


def check_weights(folder: Path) -> StoredWeights:
    """What the weights of a checkpoint take. Raises ModelFileError where they are not whole."""
    return _stored(_weight_files(folder))


def check_adapter(folder: Path) -> StoredWeights:
    """What the weights of an adapter take. Raises ModelFileError where it is not mlx-lm's, or not whole."""
    if (folder / "adapter_model.safetensors").exists() and not (folder / "adapters.safetensors").exists():
        raise ModelFileError(
            f"{folder} is an adapter of PEFT, not of mlx-lm", "train or convert it with mlx-lm"
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
    """The files mlx-lm reads. Raises ModelFileError when there are none, or fewer than the index names."""
    found = sorted(folder.glob(WEIGHTS))
    index = folder / WEIGHTS_INDEX
    if index.exists():
        shards = read_json(folder, index.name).get("weight_map")
        named = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else []
        missing = [shard for shard in named if not (folder / shard).exists()]
        if missing:
            raise ModelFileError(
                f"{len(missing)} of {len(named)} weight files of {folder} are missing, first {missing[0]}",
                "download them again",
            )
    if found:
        return found
    if any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"{folder} has safetensors, but none named model*.safetensors",
            "rename the weights or convert the model with `mlx_lm.convert`",
        )
    others = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.npz") for file in folder.glob(kind))
    if others:
        raise ModelFileError(
            f"{folder} has its weights in {others[0]}, and MLX reads safetensors",
            "convert the model with `mlx_lm.convert`, or choose one with safetensors",
        )
    raise ModelFileError(f"{folder} has no weights (model*.safetensors)", "download the model again")


def _tensor_bytes(file: Path) -> Counter[str]:
    """Bytes by dtype, from the header: its length in 8 bytes, then JSON with every tensor's place."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(8)
        if begin.startswith(b"version "):
            raise ModelFileError(f"{file} is a Git LFS pointer, not the weights", "run `git lfs pull`")
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
            raise ModelFileError(
                f"{file} is cut short or no safetensors ({size:,} bytes)", "download it again"
            )
        header = stream.read(length)
    found: Counter[str] = Counter()
    needed = 8 + length
    try:
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                found[str(tensor["dtype"])] += last - first
                needed = max(needed, 8 + length + last)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"the header of {file} is damaged", "download it again") from error
    if needed > size:
        raise ModelFileError(f"{file} is cut short: {size:,} of {needed:,} bytes", "download it again")
    return found
