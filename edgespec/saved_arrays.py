"""What was learnt about a model, kept from one run to the next: private files, written in one step."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import ModelFacts
from edgespec.files import (
    data_folder,
    delete_files,
    error_reason,
    make_private_folder,
    read_regular_file,
    regular_file_bytes,
    sampled_sha256,
    write_private_file,
)

__all__ = ["SavedArrays", "delete_saved_arrays", "models_fingerprint"]

VERSION = 1
_MOST_BYTES = 512 * 2**20
_WEIGHTS = (".safetensors", ".gguf", ".npz")


class SavedArrays:
    """Arrays by name in one file, tied to what they were learnt about.

    kind: such as `swift`. identity: of the models, see `models_fingerprint`; files of others are never read.
    notice: what could not be read or written. Nothing is raised: what is lost is learnt again.
    """

    def __init__(self, kind: str, identity: str, folder: Path | None = None) -> None:
        digest = hashlib.sha256(f"{kind} {VERSION} {identity}".encode()).hexdigest()
        self.path = (folder or _default_folder()) / f"{kind}-{digest[:32]}.npz"
        self.notice = ""
        self._header = f"{kind} {VERSION} {digest}"

    def load(self) -> Mapping[str, NDArray[Any]]:
        """What was saved last; nothing where there is nothing or it cannot be read."""
        try:
            if regular_file_bytes(self.path) > _MOST_BYTES:
                raise ValueError("it is too large")
            # Read at once, so that the file is not held open.
            with np.load(io.BytesIO(read_regular_file(self.path)), allow_pickle=False) as file:
                values = {name: file[name] for name in file.files}
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.notice = f"what was learnt cannot be read from {self.path}: {error_reason(error)}"
            return {}
        except (ValueError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError, MemoryError):
            self.notice = f"what was learnt is not readable in {self.path}; it is learnt again"
            return {}
        header = values.pop("header", None)
        if header is None or header.dtype.kind != "U" or header.shape != () or str(header) != self._header:
            self.notice = f"{self.path} was written for something else; it is learnt again"
            return {}
        return values

    def save(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Keep these in the place of what was there."""
        payload = io.BytesIO()
        named: dict[str, Any] = {**values, "header": np.array(self._header)}
        np.savez(payload, **named)
        try:
            make_private_folder(self.path.parent)
            write_private_file(self.path, payload.getvalue())
            self.notice = ""
        except OSError as error:
            self.notice = f"what was learnt is not kept in {self.path}: {error_reason(error)}"


def delete_saved_arrays(folder: Path | None = None) -> int:
    """Delete what was learnt, about every model. Gives the bytes that were freed. Raises OSError."""
    folder = folder or _default_folder()
    return delete_files(path for kind in ("*.npz", "*.json") for path in folder.glob(kind))


def models_fingerprint(*models: ModelFacts) -> str:
    """A hash that other models, or other weights of the same shape, would not have; the order counts.

    A few blocks of every file of weights are read. A file that cannot be read counts by its name.
    """
    digest = hashlib.sha256()
    for facts in models:
        told = (facts.architecture, facts.quantisation, facts.parameters, facts.file_bytes, facts.vocab_size)
        digest.update(repr(told).encode())
        for path in _weight_files(Path(facts.path)):
            digest.update(path.name.encode())
            with suppress(OSError):
                digest.update(sampled_sha256(path).encode())
    return digest.hexdigest()


def _default_folder() -> Path:
    return data_folder() / "learnt"


def _weight_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(one for one in path.iterdir() if one.suffix in _WEIGHTS)
