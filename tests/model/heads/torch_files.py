"""Write files as `torch.save` does, without PyTorch."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
from numpy.typing import NDArray

# The names of PyTorch's storage classes. BF16 is given as uint16.
_STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
    "uint16": "BFloat16Storage",
}


class Named:
    """Pickled as the name of a function or class that cannot be imported here."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """Pickled as a call of a named function."""

    def __init__(self, function: Named, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class Storage:
    def __init__(self, key: str, array: NDArray[Any], claimed_size: int | None = None) -> None:
        self.key, self.array = key, array
        self.size = array.size if claimed_size is None else claimed_size


class Pickler(pickle._Pickler):
    """Python's own pickler, extended to write names that do not exist."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Storage):
            kind = Named("torch", _STORAGES[str(value.array.dtype)])
            return "storage", kind, value.key, "cpu", value.size
        return None

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, Named):
            self.write(f"c{value.module}\n{value.name}\n".encode())  # type: ignore[attr-defined]
        elif isinstance(value, Call):
            self.save(value.function)
            self.save(value.arguments)
            self.write(pickle.REDUCE)  # type: ignore[attr-defined]
        else:
            super().save(value, save_persistent_id)  # type: ignore[misc]


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(value)
    return buffer.getvalue()


def write_torch_file(path: Path, arrays: Mapping[str, NDArray[Any]], **others: Any) -> Path:
    """Write tensors and other values. Transposed matrices share their original's data."""
    values: OrderedDict[str, Any] = OrderedDict()
    storages: list[Storage] = []
    for name, array in arrays.items():
        base = array if array.base is None else array.base
        storages.append(Storage(str(len(storages)), np.asarray(base)))
        strides = tuple(step // array.itemsize for step in array.strides)
        values[name] = Call(
            Named("torch._utils", "_rebuild_tensor_v2"),
            storages[-1],
            0,
            array.shape,
            strides,
            False,
            OrderedDict(),
        )
    return write_archive(
        path, pickled(OrderedDict(values, **others)), {s.key: s.array.tobytes() for s in storages}
    )


def write_archive(
    path: Path, program: bytes, data: Mapping[str, bytes] | None = None, *, compression: int = ZIP_STORED
) -> Path:
    with ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/byteorder", b"little")
        for key, content in (data or {}).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", b"3\n")
    return path
