"""Read tensors from safetensors and PyTorch files, and dequantise FP8 weights such as DeepSeek's.

Files written by `torch.save` (.bin, .pt and .pth) are zip archives that contain a pickle. A pickle is a
program: Python's unpickler calls any function that the pickle names, and allocates as much memory as the
pickle requests. This module interprets only the instructions needed to describe tensors, never calls
anything by name, and rejects everything else.
"""

from __future__ import annotations

import json
import math
import pickletools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError, shorten
from edgespec.system.files import error_reason, reading_model_files, regular_file_bytes

# File name patterns of weights. Only the first pattern that matches any file is used, because some publishers
# upload the same weights in both formats.
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# Maximum size of a safetensors header in bytes. The safetensors library has the same limit.
_MAX_HEADER_BYTES = 100 * 2**20
# Suffixes that turn the name of a weight into the name of its scales. The dequantised weight is the product
# of the two.
_SUFFIXES = ("_scale_inv", "_scale")
# Number of rows and columns that share a scale. All published models with per-block scales use this size,
# which mlx-lm also assumes.
_BLOCK = 128
_STORAGES = {
    "torch DoubleStorage": "F64", "torch FloatStorage": "F32", "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16", "torch LongStorage": "I64", "torch IntStorage": "I32",
    "torch ShortStorage": "I16", "torch CharStorage": "I8", "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}  # fmt: skip
# Maximum size in bytes of the pickle, which does not include the tensor data. The pickles of published heads
# take a few kilobytes.
_MAX_PICKLE_BYTES = 2**20
_MAX_DIMENSIONS = 8
_DAMAGE = (
    BadZipFile, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, EOFError,
)  # fmt: skip
_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
# Bytes per element for each data type, by safetensors name.
_ITEM_BYTES = {**{name: np.dtype(kind).itemsize for name, kind in _DTYPES.items()}, "BF16": 2, "F8_E4M3": 1}


def read_folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a folder, keyed by name. They can be split across multiple files.

    Raises:
        ModelFileError: The folder contains no weights, or a file is missing, damaged or truncated.
    """
    for pattern in _PATTERNS:
        if tensors := read_tensor_files(*sorted(folder.glob(pattern))):
            return tensors
    raise ModelFileError(
        f"{folder} contains no weights (*.safetensors or pytorch_model*.bin)",
        "download the draft head again",
        code="model_file_incomplete",
    )


def read_tensor_files(*paths: Path) -> dict[str, StoredTensor]:
    """Return the tensors in safetensors or PyTorch files, keyed by name, with FP8 weights dequantised.

    Raises:
        ModelFileError: A file is missing, damaged or truncated.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        tensors |= _read_file(path)
    return dequantise_fp8(tensors)


def _read_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix != ".safetensors":
        return read_pickled_tensors(path)
    return {name: _stored(path, header) for name, header in read_tensors(path).items()}


def _stored(path: Path, header: TensorHeader) -> StoredTensor:
    if header.dtype not in _ITEM_BYTES:
        raise ModelFileError(
            f"{path} contains tensors of type {shorten(header.dtype)}, which edgespec cannot read",
            "use a version of the draft head with 16-bit weights",
            code="model_file_not_supported",
        )
    if header.size_bytes != math.prod(header.shape) * _ITEM_BYTES[header.dtype]:
        raise ModelFileError(
            f"{path} is damaged: the data of a tensor of shape {list(header.shape)} is incomplete",
            "download it again",
        )
    return StoredTensor(header.dtype, header.shape, partial(_read, path, header))


def _read(path: Path, header: TensorHeader) -> NDArray[Any]:
    try:
        data = np.memmap(path, np.uint8, "c", header.start, (header.size_bytes,))
        return _decode_elements(data, header.dtype).reshape(header.shape)
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{path} cannot be read: {error_reason(error)}", "download it again", code="model_file_unreadable"
        ) from error


class TensorHeader(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        shape: Size of each dimension.
        dtype: Safetensors data type, such as `BF16`.
        size_bytes: Size of the data.
        start: Offset of the data in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    start: int


def read_tensors(file: Path) -> dict[str, TensorHeader]:
    """Return the tensors in a safetensors file, keyed by name.

    Only the header is read. The file starts with the length of the header (8 bytes), followed by the header
    itself in JSON format, which contains the byte range of every tensor.

    Raises:
        ModelFileError: The file cannot be read, or it is damaged or truncated.
    """
    with reading_model_files(file):
        size_bytes = regular_file_bytes(file)
        with file.open("rb") as stream:
            begin = stream.read(8)
            length = int.from_bytes(begin, "little")
            data = stream.read(min(length, _MAX_HEADER_BYTES))
    if begin.startswith(b"version "):
        raise ModelFileError(
            f"{file} is a Git LFS pointer, not the weights",
            "run `git lfs pull`",
            code="model_file_incomplete",
        )
    if len(begin) < 8 or len(data) < length:
        raise ModelFileError(
            f"{file} is truncated or not a safetensors file ({size_bytes:,} bytes)", "download it again"
        )
    try:
        header = json.loads(data)
        tensors, needed_bytes = {}, 0
        for name, entry in header.items():
            if name != "__metadata__":
                (begin_offset, end_offset), shape = entry["data_offsets"], tuple(entry["shape"])
                tensor_bytes, data_start = end_offset - begin_offset, 8 + length + begin_offset
                if not all(
                    type(number) is int and number >= 0 for number in (data_start, tensor_bytes, *shape)
                ):
                    raise ValueError("the shape or position of a tensor does not consist of whole numbers")
                needed_bytes = max(needed_bytes, data_start + tensor_bytes)
                tensors[name] = TensorHeader(shape, str(entry["dtype"]), tensor_bytes, data_start)
    except (ValueError, ArithmeticError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"the header of {file} is damaged: {shorten(error)}", "download it again"
        ) from error
    if needed_bytes > size_bytes:
        raise ModelFileError(
            f"{file} is truncated: it has {size_bytes:,} of {needed_bytes:,} bytes", "download it again"
        )
    return tensors


def dequantise_fp8(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return `stored` with FP8 weights dequantised and their scales removed.

    A weight [..., rows, columns] has one scale overall, one per row, or one per block of 128 x 128 elements.
    The products are rounded to BF16, as in mlx-lm. FP8 weights without scales, or with scales of another
    shape, are left unchanged.
    """
    tensors = dict(stored)
    for name, weight in stored.items():
        if weight.dtype != "F8_E4M3":
            continue
        for suffix in _SUFFIXES:
            scales = stored.get(name + suffix)
            if scales is not None and (_is_broadcast(weight, scales) or _is_per_block(weight, scales)):
                tensors[name] = StoredTensor("BF16", weight.shape, partial(_product, weight, scales))
                del tensors[name + suffix]
                break
    return tensors


def _is_broadcast(weight: StoredTensor, scales: StoredTensor) -> bool:
    """Return whether a weight has a single scale or one scale per row."""
    return scales.shape in ((), (1,), (*weight.shape[:-1], 1))


def _is_per_block(weight: StoredTensor, scales: StoredTensor) -> bool:
    blocks = tuple(-(-size // _BLOCK) for size in weight.shape[-2:])
    return len(blocks) == 2 and scales.shape == (*weight.shape[:-2], *blocks)


def _product(weight: StoredTensor, scales: StoredTensor) -> NDArray[Any]:
    elements, factors = weight.read(), scales.read().astype(np.float32)
    if not _is_broadcast(weight, scales):
        rows, columns = weight.shape[-2:]
        factors = factors.repeat(_BLOCK, axis=-2)[..., :rows, :].repeat(_BLOCK, axis=-1)[..., :columns]
    return _rounded_to_bf16(elements * factors)


def _rounded_to_bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round float32 values to the nearest BF16 values. BF16 is the upper half of a float32."""
    bits = values.view(np.uint32)
    last = (bits >> 16) & 1  # Ties round to even.
    return ((bits + 0x7FFF + last) & np.uint32(0xFFFF0000)).view(np.float32)


class _Global(NamedTuple):
    """A function or class named in the pickle, as `module name`. It is never imported."""

    name: str


class _Storage(NamedTuple):
    """The data of one or more tensors.

    Attributes:
        entry: Name of the zip entry that holds the data.
        dtype: Name of the data type, as in `StoredTensor`.
        elements: Number of elements.
    """

    entry: str
    dtype: str
    elements: int


def read_pickled_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a file written by `torch.save`, keyed by name.

    The file must contain a dictionary. Dictionary values that are not tensors are ignored.

    Raises:
        ModelFileError: The file is missing or damaged, or contains anything other than tensors and plain
            values.
    """
    try:
        with reading_model_files(path):
            regular_file_bytes(path)
        with reading_model_files(path), ZipFile(path) as archive:
            stored = _stored_entries(archive, path)
            pickles = [name for name in stored if name.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1 or stored[pickles[0]].file_size > _MAX_PICKLE_BYTES:
                raise ValueError(
                    "the archive does not contain exactly one data.pkl, or data.pkl is too large"
                )
            root = pickles[0].removesuffix("data.pkl")
            order = stored.get(f"{root}byteorder")
            if order and (order.file_size != len("little") or _read_entry(archive, order) != b"little"):
                raise ValueError("the byte order is not little-endian")
            sizes = {name: entry.file_size for name, entry in stored.items()}
            value = _Interpreter(path, root, sizes).run(_read_entry(archive, stored[pickles[0]]))
        if not isinstance(value, dict):
            raise ValueError("the file does not contain a dictionary of tensors")
        return {name: one for name, one in value.items() if isinstance(one, StoredTensor)}
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _stored_entries(archive: ZipFile, path: Path) -> dict[str, ZipInfo]:
    """Return the uncompressed entries of an archive, keyed by name.

    Compressed entries are ignored, because decompressing them could exhaust memory. PyTorch never compresses
    entries.

    Raises:
        ValueError: Two entries have the same name, or the entries are larger than the file.
    """
    entries = archive.infolist()
    if len({entry.filename for entry in entries}) < len(entries):
        raise ValueError("two entries of the archive have the same name")
    stored = {entry.filename: entry for entry in entries if entry.compress_type == ZIP_STORED}
    if sum(entry.file_size for entry in stored.values()) > regular_file_bytes(path):
        raise ValueError("the entries of the archive are larger than the file")
    return stored


def _read_entry(archive: ZipFile, entry: ZipInfo) -> bytes:
    """Return an uncompressed entry's data. Raises ValueError if its size is not as declared."""
    with archive.open(entry) as file:
        content = file.read(entry.file_size)
    if len(content) != entry.file_size:
        raise ValueError(f"the archive gives the wrong size for {entry.filename}")
    return content


def _damaged(path: Path, error: Exception) -> ModelFileError:
    # Any other exception means that an instruction is missing its operands.
    reason = shorten(error) if isinstance(error, ValueError | BadZipFile) else "its pickle is malformed"
    return ModelFileError(
        f"{path} is damaged, or was not written by PyTorch 1.6 or later: {reason}",
        "download it again, or use a version in safetensors format",
    )


class _Interpreter:
    """Interprets the instructions of a pickle that contains tensors.

    Args:
        path: Path of the zip archive, used to read data and in error messages.
        root: Common prefix of the archive's entry names.
        sizes: Size in bytes of each uncompressed entry, by name.
    """

    def __init__(self, path: Path, root: str, sizes: dict[str, int]) -> None:
        self._path, self._root, self._sizes = path, root, sizes
        self._stack: list[Any] = []
        # Length of the stack at each MARK instruction that is still open.
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        argument: Any
        for opcode, argument, _ in pickletools.genops(program):
            match opcode.name:
                case "PROTO" | "FRAME" | "STOP":
                    pass
                case "MARK":
                    self._marks.append(len(self._stack))
                case "EMPTY_DICT":
                    self._stack.append({})
                case "EMPTY_LIST":
                    self._stack.append([])
                case "EMPTY_TUPLE":
                    self._stack.append(())
                case "NONE":
                    self._stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    self._stack.append(opcode.name == "NEWTRUE")
                case (
                    "BININT"
                    | "BININT1"
                    | "BININT2"
                    | "LONG1"
                    | "BINFLOAT"
                    | "BINUNICODE"
                    | "SHORT_BINUNICODE"
                ):
                    self._stack.append(argument)
                case "BINPUT" | "LONG_BINPUT":
                    self._memo[argument] = self._stack[-1]
                case "MEMOIZE":
                    self._memo[len(self._memo)] = self._stack[-1]
                case "BINGET" | "LONG_BINGET":
                    self._stack.append(self._memo[argument])
                case "TUPLE":
                    self._stack.append(tuple(self._since_mark()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    self._stack.append(tuple(self._pop_many(int(opcode.name[-1]))))
                case "APPEND":
                    self._append(self._pop_many(1))
                case "APPENDS":
                    self._append(self._since_mark())
                case "SETITEM":
                    self._set_items(self._pop_many(2))
                case "SETITEMS":
                    self._set_items(self._since_mark())
                case "GLOBAL":
                    self._stack.append(_Global(argument))
                case "STACK_GLOBAL":
                    self._stack.append(_Global(" ".join(self._pop_many(2))))
                case "BINPERSID":
                    self._stack.append(self._storage(self._stack.pop()))
                case "REDUCE":
                    function, arguments = self._pop_many(2)
                    self._stack.append(self._call(function, arguments))
                case "BUILD":
                    # Drop a state dictionary's attributes, such as module versions, which are not needed.
                    self._stack.pop()
                case _:
                    raise self._refused(f"the pickle uses the instruction {opcode.name}")
        if len(self._stack) != 1:
            raise ValueError("the pickle does not contain exactly one object")
        return self._stack[0]

    def _pop_many(self, count: int) -> list[Any]:
        values = self._stack[len(self._stack) - count :]
        if len(values) != count:
            raise ValueError("a pickle instruction has too few operands")
        del self._stack[len(self._stack) - count :]
        return values

    def _since_mark(self) -> list[Any]:
        return self._pop_many(len(self._stack) - self._marks.pop())

    def _append(self, values: list[Any]) -> None:
        if type(container := self._stack[-1]) is not list:
            raise ValueError("the pickle appends values to an object that is not a list")
        container.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        if type(container := self._stack[-1]) is not dict:
            raise ValueError("the pickle sets items of an object that is not a dictionary")
        # Hashing other keys, such as tuples that repeatedly nest the same tuple, could take forever.
        if not all(isinstance(key, str) for key in values[::2]):
            raise ValueError("a dictionary in the pickle has a key that is not a string")
        container.update(zip(values[::2], values[1::2], strict=True))

    def _storage(self, identity: Any) -> _Storage:
        kind, storage, key, _, count = identity
        if kind != "storage" or not isinstance(storage, _Global) or not isinstance(key, str):
            raise self._refused("the pickle refers to something other than the data of a tensor")
        if storage.name not in _STORAGES:
            raise self._refused(f"the pickle refers to the type {shorten(storage.name.replace(' ', '.'))}")
        dtype, entry = _STORAGES[storage.name], f"{self._root}data/{key}"
        if self._sizes[entry] != count * _ITEM_BYTES[dtype]:
            raise ValueError(
                f"the tensor data {entry} has {self._sizes[entry]:,} bytes, which does not match {count:,}"
                " elements"
            )
        return _Storage(entry, dtype, count)

    def _call(self, function: Any, arguments: Any) -> Any:
        """Evaluate a call in the pickle. Raises ModelFileError for unsupported functions."""
        match function:
            case _Global("collections OrderedDict") if arguments == ():
                return {}
            case _Global("torch._utils _rebuild_parameter"):
                return arguments[0]
            case _Global("torch._utils _rebuild_tensor_v2"):
                storage, offset, shape, strides, *_ = arguments
                return self._tensor(storage, offset, tuple(shape), tuple(strides))
            case _Global(name):
                raise self._refused(f"the pickle calls {shorten(name.replace(' ', '.'))}")
        raise self._refused("the pickle calls an object that is not a function")

    def _tensor(
        self, storage: Any, offset: Any, shape: tuple[Any, ...], strides: tuple[Any, ...]
    ) -> StoredTensor:
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or not all(type(number) is int for number in numbers):
            raise ValueError("a tensor has no data or shape")
        if len(shape) > _MAX_DIMENSIONS or min(numbers) < 0 or math.prod(shape) > storage.elements:
            raise ValueError("a tensor has more elements than its data provides")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 not in shape and last >= storage.elements:
            raise ValueError("a tensor has more elements than its data provides")
        read = partial(self._read, storage, offset, shape, strides)
        return StoredTensor(storage.dtype, shape, read)

    def _read(
        self, storage: _Storage, offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> NDArray[Any]:
        try:
            with reading_model_files(self._path), ZipFile(self._path) as archive:
                entry = _stored_entries(archive, self._path)[storage.entry]
                elements = _decode_elements(_read_entry(archive, entry), storage.dtype)
            if elements.size != storage.elements:
                raise ValueError(f"{storage.entry} has changed since the file was opened")
            size = elements.itemsize
            return np.lib.stride_tricks.as_strided(
                elements[offset:], shape, [stride * size for stride in strides], writeable=False
            )
        except _DAMAGE as error:
            raise _damaged(self._path, error) from error

    def _refused(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self._path} contains more than just tensors: {what}",
            "use a version in safetensors format, because edgespec never runs code from model files",
            code="model_file_not_supported",
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The data type and shape of a tensor in a file, and a function that reads its data.

    Attributes:
        dtype: Safetensors name of the data type, such as `BF16`.
        shape: Size of each dimension.
        read: Reads the tensor. BF16 and FP8 are converted to float32. Raises ModelFileError if the file is
            damaged.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]] = field(repr=False, compare=False)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return "F" in self.dtype


def _decode_elements(data: bytes | memoryview | NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Decode little-endian `data` into an array [n]. BF16 and FP8 are converted to float32."""
    if dtype == "BF16":
        # NumPy has no BF16, which is the upper half of a float32.
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _fp8_values()[np.frombuffer(data, np.uint8)]
    return np.frombuffer(data, np.dtype(_DTYPES[dtype]).newbyteorder("<"))


@lru_cache(maxsize=1)
def _fp8_values() -> NDArray[np.float32]:
    """Return the value of each byte in the FP8 format E4M3 (arXiv 2209.05433), float32 [256]."""
    magnitudes = np.arange(128)
    exponents, mantissas = magnitudes >> 3, magnitudes & 7
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    values = np.where(exponents, normal, np.ldexp(mantissas / 8, -6)).astype(np.float32)
    values[127] = np.nan
    return np.concatenate([values, -values])
