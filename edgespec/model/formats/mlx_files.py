"""Determine which files an MLX model needs and which are missing, without importing MLX."""

from __future__ import annotations

import codecs
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgespec.errors import BackendMissingError, ModelFileError, OptionError, shorten
from edgespec.model.heads.residual_layout import residual_head_method
from edgespec.model.heads.tensor_files import read_tensors
from edgespec.model.model_facts import Adapter
from edgespec.system.files import read_regular_file, reading_model_files
from edgespec.system.installation import setup_command

# Maximum size of a model's JSON file in bytes. The largest tokenizer files are about 35 MB.
MAX_JSON_BYTES = 1 << 28
# File name pattern of the weights that mlx-lm loads.
WEIGHTS = "model*.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# File name patterns of head weights, in order of preference. The first pattern that matches any file is used.
# All but the first are PyTorch formats.
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
# Matches the layer number in a tensor name. `_LAYER_COUNTS` lists the settings that specify the number of
# layers.
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Suffixes of text files that mlx-lm and transformers read.
_TEXT_SUFFIXES = (".json", ".jinja", ".txt")


def mlx_installed() -> bool:
    """Return whether mlx and mlx-lm are installed, without importing them."""
    return all(importlib.util.find_spec(library) is not None for library in ("mlx", "mlx_lm"))


def require_mlx(model: str) -> None:
    """Raise BackendMissingError if mlx or mlx-lm is not installed. The message mentions `model`."""
    if not mlx_installed():
        raise BackendMissingError(
            f"{model} is an MLX model, but mlx and mlx-lm are not installed",
            f"install them with `{setup_command('mlx')}`, or choose a GGUF model",
        )


def check_mlx_adapters(adapters: Sequence[Adapter], model: Path) -> None:
    """Check that there is only one adapter, that it has no scale, and that its folder exists.

    Raises:
        OptionError: There are several adapters, or the adapter has a scale.
        ModelFileError: The folder does not exist.
    """
    if len(adapters) > 1 or adapters[0].scale != 1:
        raise OptionError(
            f"{model.name} is an MLX model, which can have only one adapter, without a scale",
            "pass a single adapter, or merge the adapters with mlx-lm",
            code="option_not_supported",
        )
    if not Path(adapters[0].path).is_dir():
        raise ModelFileError(
            f"the adapter folder {adapters[0].path} does not exist",
            "pass the folder in which `mlx_lm.lora --adapter-path` saved the adapter",
            code="adapter_unusable",
        )


def missing_files(folder: Path) -> list[str]:
    """Return the names of files missing from an MLX model folder.

    Weight files listed in the index or implied by part numbers do not count as missing if the other files
    contain the whole model. mlx-lm ignores the index, which is often left over from another version of the
    model.

    Raises:
        ModelFileError: The weight index is invalid.
    """
    # `is_file` is False for a dangling symbolic link, so unfinished downloads count as missing.
    names = {path.name for path in folder.iterdir() if path.is_file()}
    index = _index(folder / WEIGHTS_INDEX) if WEIGHTS_INDEX in names else {}
    missing = [*missing_among(names), *sorted(set(index.values()) - names)]
    absent = {name for name in missing if name.endswith(".safetensors")}
    if absent and _has_all_weights(folder, names, index):
        missing = [name for name in missing if name not in absent]
    return list(dict.fromkeys(missing))


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of an MLX model, including those whose names mlx-lm does not expect.

    A safetensors file with an unexpected name is included if it contains weights that the index lists and
    that the files with expected names lack, or if the folder has no file with an expected name.

    Raises:
        ModelFileError: A file is damaged.
    """
    files = sorted(folder.glob(WEIGHTS))
    others = sorted(set(folder.glob("*.safetensors")) - set(files))
    if not others:
        return files
    if not files:
        return others if _has_all_layers(folder, _names_in(others)) else []
    index = folder / WEIGHTS_INDEX
    wanted = set(_index(index)) - _names_in(files) if index.is_file() else set()
    return files + [file for file in others if wanted and wanted & _names_in([file])]


def _has_all_weights(folder: Path, names: set[str], index: Mapping[str, str]) -> bool:
    """Return whether the weight files in a folder contain the whole model.

    Args:
        folder: The model's folder.
        names: Names of the files in the folder.
        index: Maps each tensor name to its file, as listed in the weight index. Empty if there is no index.
    """
    try:
        files = weight_files(folder)
        tensors = _names_in(files)
        absent = {tensor for tensor, file in index.items() if file not in names}
        if absent and absent <= tensors:
            return True
        if any(file in names for file in index.values()):
            return False  # The index belongs to these files, so the other files that it lists are missing.
        parts = [int(part[1]) for file in files if (part := _PART.search(file.name))]
        return len(files) >= max(parts, default=1) and _has_all_layers(folder, tensors)
    except ModelFileError:
        return False


def _has_all_layers(folder: Path, tensors: Iterable[str]) -> bool:
    config = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    inner = config.get("text_config")
    settings = inner if isinstance(inner, dict) else config
    count = next((settings[key] for key in _LAYER_COUNTS if isinstance(settings.get(key), int)), 0)
    layers = {int(found[1]) for name in tensors if (found := _LAYER.search(name))}
    return (
        0 < count <= len(layers)
        and layers >= set(range(count))
        and any("embed" in name or "wte" in name for name in tensors)
    )


def _names_in(files: Iterable[Path]) -> set[str]:
    return {name for file in files for name in read_tensors(file)}


def is_weights(name: str) -> bool:
    """Return whether `name` is a weight file name."""
    return fnmatchcase(name, WEIGHTS)


def missing_among(names: Iterable[str]) -> list[str]:
    """Return the files that an MLX model lacks, given the names of its existing files."""
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
    """Return the names of the files that a head in the Hugging Face layout lacks."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    weights = head_weights(names)
    missing = [] if "config.json" in names or is_complete_without_config(weights) else ["config.json"]
    return missing if weights else [*missing, "model.safetensors"]


def is_complete_without_config(weights: Iterable[str]) -> bool:
    """Return whether these are Medusa or Hydra weight files, whose shapes determine all sizes."""
    return any(residual_head_method(Path(name)) for name in weights)


def head_weights(names: Iterable[str]) -> list[str]:
    """Return the names of a head's weight files, given the names of all its files."""
    names = sorted(names)
    matches = ([name for name in names if fnmatchcase(name, pattern)] for pattern in HEAD_WEIGHTS)
    return next(filter(None, matches), [])


def _index(path: Path) -> dict[str, str]:
    """Map each tensor name to its file, as listed in an index of weight files."""
    weights = read_json_object(path).get("weight_map")
    if not isinstance(weights, dict):
        raise ModelFileError(
            f"{path}, which lists the model's weight files, is damaged", "download the model again"
        )
    return {str(tensor): str(file) for tensor, file in weights.items()}


@contextmanager
def readable_folder(folder: Path) -> Iterator[Path]:
    """Provide a model folder that mlx-lm and transformers can read.

    Yields the folder itself, unless a text file in it starts with a byte order mark or mlx-lm would not
    recognise the names of its weight files. In that case, yields a temporary folder with links to the files.

    Raises:
        ModelFileError: A weight file is damaged.
    """
    texts = [file for file in folder.iterdir() if file.suffix in _TEXT_SUFFIXES and file.is_file()]
    marked = [file for file in texts if _begins_with_mark(file)]
    renamed = [file for file in weight_files(folder) if not is_weights(file.name)]
    if not marked and not renamed:
        yield folder
        return
    with TemporaryDirectory(prefix="edgespec-") as temporary:
        readable = Path(temporary)
        for file in folder.iterdir():
            if file in marked:
                text = read_regular_file(file, MAX_JSON_BYTES).removeprefix(codecs.BOM_UTF8)
                (readable / file.name).write_bytes(text)
            else:
                name = f"model-{file.name}" if file in renamed else file.name
                (readable / name).symlink_to(file.absolute())
        yield readable


def _begins_with_mark(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ModelFileError if the file cannot be read or is invalid."""
    try:
        with reading_model_files(path):
            value = json.loads(read_regular_file(path, MAX_JSON_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {shorten(error)}", "download it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not contain a JSON object", "download it again")
    return value
