"""Find all files of a GGUF model, which may be split into parts, and check its LoRA adapters."""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from edgespec.errors import ModelFileError
from edgespec.model.formats.gguf_header import GgufTensor, describe_start, read_header
from edgespec.model.model_facts import Adapter
from edgespec.system.files import reading_model_files, regular_file_bytes

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
# Suffixes that browsers and file managers add to the name of a duplicate file.
_COPY = re.compile(r"(?: ?\(\d+\)|[ _-]copy(?: \d+)?)(?=\.gguf$|$)", re.IGNORECASE)
# Number of leading bytes that an error message quotes from a file that is not a GGUF file.
_SHOWN_BYTES = 16
# The byte order of this machine, then the opposite one.
_BYTE_ORDERS: tuple[Literal["little", "big"], Literal["little", "big"]] = (
    ("little", "big") if sys.byteorder == "little" else ("big", "little")
)
# Versions of the GGUF format. llama.cpp no longer supports version 1.
_VERSIONS = (1, 2, 3)
# Part numbers in file names have five digits, which limits the number of parts.
_MAX_PARTS = 99_999
# Maximum number of files to check per folder when searching for a model's parts.
_MAX_SEARCHED = 1000
# Start of a layer's tensor name in a header, preceded by the last bytes of its length field.
_FIRST_LAYER_NAME = b"\0" * 6 + b"blk."
# Maximum number of bytes to search for keys if the header names no layer tensors.
_MAX_HEADER_BYTES = 1 << 26
# Maximum number of bytes between the end of the last tensor and the end of a file.
_MAX_PADDING_BYTES = 4096
_JOIN_HINT = "to get a single file, join the parts with `llama-gguf-split --merge`, not with cat"


class _Split(NamedTuple):
    """A file's position in a split model, according to its header.

    Attributes:
        number: Index of the part, starting at 0.
        total: Number of parts. 1 if the model is not split.
        tensors: Number of tensors in all parts.
        is_joined: Whether more parts follow in the same file.
    """

    number: int
    total: int
    tensors: int
    is_joined: bool


def check_is_gguf(path: Path, content: str = "model or head") -> None:
    """Check that a file starts with the header of a supported GGUF version.

    Args:
        path: The file to check.
        content: Expected content of the file, for the error message.

    Raises:
        ModelFileError: The file cannot be read, or is not a GGUF file.
    """
    with reading_model_files(path):
        regular_file_bytes(path)
        with path.open("rb") as stream:
            start = stream.read(_SHOWN_BYTES)
    if start.startswith(b"version https://"):
        raise ModelFileError(
            f"{path} is a Git LFS pointer, not the {content}",
            "run `git lfs pull`",
            code="model_file_incomplete",
        )
    if not start.startswith(b"GGUF"):
        raise ModelFileError(
            f"{path} is not a GGUF file: it {describe_start(start)}",
            f"select a .gguf file that contains a {content}",
            code="wrong_file",
        )
    version, swapped = (int.from_bytes(start[4:8], order) for order in _BYTE_ORDERS)
    if len(start) >= 8 and swapped in _VERSIONS:
        raise ModelFileError(
            f"{path} has the wrong byte order for this machine ({_BYTE_ORDERS[1]}-endian)",
            f"download a {_BYTE_ORDERS[0]}-endian version of the {content}, or convert this file with"
            " `gguf-convert-endian`",
            code="model_file_not_supported",
        )
    if len(start) >= 8 and version == _VERSIONS[0]:
        raise ModelFileError(
            f"{path} has version {version} of the GGUF format, which llama.cpp can no longer read",
            f"download the {content} in a newer version of the format",
            code="model_file_not_supported",
        )


def named_gguf_files(path: Path) -> list[Path]:
    """Return the files of the GGUF model at `path`, judging only by their names, which is fast.

    Raises:
        ModelFileError: The file is not a GGUF file.
    """
    check_is_gguf(path)
    return [part for part in _standard_names(path) if part.is_file()] or [path]


def gguf_files(path: Path) -> list[Path]:
    """Return the files of a GGUF model in order, identifying parts by their headers instead of their names.

    Args:
        path: The model file, or any part of a split model. The other parts can have unrelated names, and can
            be in the folder that `path` links to.

    Raises:
        ModelFileError: The file is not a GGUF file, or a part is missing.
    """
    check_is_gguf(path)
    try:
        split = _split_of(path)
    except (ModelFileError, OSError):
        # Ignore a bad header here, because loading the model will report the problem.
        standard = _standard_names(path)
        if missing := [part for part in standard if not part.is_file()]:
            raise _missing_parts(path, missing[0].name, len(missing), len(standard)) from None
        return standard or [path]
    if split.is_joined:
        raise ModelFileError(
            f"{path} consists of several parts of a split model that were joined without"
            " `llama-gguf-split`, so llama.cpp can read only the first part",
            _JOIN_HINT,
            code="model_file_incomplete",
        )
    return [path] if split.total == 1 else _find_parts(path, split)


def _find_parts(path: Path, split: _Split) -> list[Path]:
    found: dict[int, list[Path]] = {}
    standard = _standard_names(path)
    for part in standard:
        with suppress(ModelFileError, OSError):
            _add_part(found, part, split)
    if len(found) < split.total:
        for part in _files_near(path):
            with suppress(ModelFileError, OSError):
                _add_part(found, part, split)
    # The given file takes precedence over copies of it.
    found[split.number] = [path]
    for number, parts in found.items():
        found[number] = _same_model(parts, path)
        if len(found[number]) > 1:
            names = " and ".join(part.name for part in found[number][:2])
            raise ModelFileError(
                f"{path} is one of {split.total} parts of a split model, but {names} could each be part"
                f" {number + 1} of it",
                "move the parts of each model to a separate folder",
                code="model_file_incomplete",
            )
    missing = [number for number in range(split.total) if number not in found]
    if not missing:
        return [found[number][0] for number in range(split.total)]
    name = standard[missing[0]].name if len(standard) == split.total else f"part {missing[0] + 1}"
    wrong = standard[missing[0]] if len(standard) == split.total else None
    if wrong is not None and wrong.is_file():
        raise ModelFileError(
            f"{wrong} is not part {missing[0] + 1} of {split.total} of the model {path}",
            "download this part again",
            code="model_file_incomplete",
        )
    raise _missing_parts(path, name, len(missing), split.total, split.number)


def _missing_parts(
    path: Path, example: str, missing: int, count: int, number: int | None = None
) -> ModelFileError:
    part = f"one of {count} parts" if number is None else f"part {number + 1} of {count}"
    lacking = f"{example} is" if missing == 1 else f"{missing} parts, such as {example}, are"
    return ModelFileError(
        f"{path} is {part} of a split model, but {lacking} missing",
        f"copy all parts to {path.parent}; {_JOIN_HINT}",
        code="model_file_incomplete",
    )


def _add_part(found: dict[int, list[Path]], part: Path, wanted: _Split) -> None:
    check_is_gguf(part)
    split = _split_of(part)
    # Parts other than the first may lack the tensor count, which llama.cpp does not need in them.
    same_tensors = split.tensors == wanted.tensors or not (split.tensors and wanted.tensors)
    if split.total == wanted.total and same_tensors and not split.is_joined:
        parts = found.setdefault(split.number, [])
        if not any(part.samefile(other) for other in parts):
            parts.append(part)


def _same_model(parts: list[Path], path: Path) -> list[Path]:
    """Return the parts that belong to the same model as `path`, judging by their names, or all if none do.

    If all of these are copies of the same part, only the first is returned.
    """
    related = [part for part in parts if _model_name(part) == _model_name(path)] or parts
    sizes = {part.stat().st_size for part in related}
    return related[:1] if len(sizes) == 1 and len({_model_name(part) for part in related}) == 1 else related


def _model_name(path: Path) -> str:
    name = _COPY.sub("", path.name)
    match = _PART.fullmatch(name)
    return match[1] if match else name


def _standard_names(path: Path) -> list[Path]:
    """Return the paths of all parts if `path` follows `llama-gguf-split`'s naming scheme, or else []."""
    match = _PART.fullmatch(path.name)
    count = int(match[3]) if match else 0
    if match is None or not count:
        return []
    return [path.with_name(f"{match[1]}-{i:05}-of-{count:05}{match[4]}") for i in range(1, count + 1)]


def _files_near(path: Path) -> Iterator[Path]:
    """Yield the files in the same folder as `path`, and in the folder of the file that `path` links to."""
    folders = dict.fromkeys((path.parent, Path(os.path.realpath(path)).parent))
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, _MAX_SEARCHED))
            yield from (folder / name for name in names if (folder / name).is_file())


def _split_of(path: Path) -> _Split:
    """Return a file's position in a split model. Raises ModelFileError or OSError."""
    status = path.stat()
    return _read_split(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _read_split(path: Path, _size_bytes: int, _changed_ns: int) -> _Split:
    whole = _Split(0, 1, 0, False)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # Headers contain the vocabulary and take 0.1 seconds to parse, so first search the raw bytes for the
        # `split.count` key, which precedes the tensor names.
        end = data.find(_FIRST_LAYER_NAME)
        if data.find(b"split.count", 0, end if end >= 0 else _MAX_HEADER_BYTES) < 0:
            return whole
        header = read_header(path)
        number, count, tensors = (
            int(value) if isinstance(value := header.metadata.get(f"split.{key}"), int) else 0
            for key in ("no", "count", "tensors.count")
        )
        if not 0 <= number < count or not 1 < count <= _MAX_PARTS:
            return whole
        ends = (tensor.offset_bytes + tensor_size(tensor) for tensor in header.tensors)
        end = header.size_bytes + max(ends, default=0)
        return _Split(number, count, tensors, data.find(b"GGUF", end, end + _MAX_PADDING_BYTES) >= 0)


def tensor_size(tensor: GgufTensor) -> int:
    """Return the size of a tensor's data in bytes, or 0 if its type is unknown."""
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    try:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    except (KeyError, ValueError):
        return 0
    return tensor.elements // block_elements * block_bytes


def check_gguf_adapters(adapters: Sequence[Adapter], model: Path) -> None:
    """Check that files contain LoRA adapters for the architecture of a GGUF model.

    Raises:
        ModelFileError: A file is missing or damaged, or contains no adapter for this architecture.
    """
    architecture = read_header(gguf_files(model)[0]).architecture
    for adapter in adapters:
        path = Path(adapter.path)
        if path.is_dir():
            raise ModelFileError(
                f"the adapter {path} is a folder, but {model.name} needs an adapter in a .gguf file",
                "convert it with llama.cpp's convert_lora_to_gguf.py",
                code="adapter_unusable",
            )
        check_is_gguf(path, "LoRA adapter")
        header = read_header(path)
        kinds = header.metadata.get("general.type"), header.metadata.get("adapter.type")
        if kinds != ("adapter", "lora"):
            raise ModelFileError(
                f"{path} is not a LoRA adapter",
                "pass a GGUF file with a LoRA adapter",
                code="adapter_unusable",
            )
        if header.architecture != architecture:
            raise ModelFileError(
                f"the adapter {path} is for models with architecture {header.architecture[:40]!r}, but"
                f" {model.name} has architecture {architecture!r}",
                "use an adapter that was trained for this model",
                code="adapter_unusable",
            )
        if "adapter.alora.invocation_tokens" in header.metadata:
            raise ModelFileError(
                f"{path} is an activated LoRA adapter, which takes effect only after certain words and is"
                " not supported",
                "use an ordinary LoRA adapter",
                code="adapter_unusable",
            )
