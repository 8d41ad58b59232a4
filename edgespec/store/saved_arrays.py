"""Save named arrays, such as trained weights, in private files for later runs."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.model.model_facts import ModelFacts
from edgespec.system.files import (
    data_folder,
    delete_files,
    error_reason,
    make_private_folder,
    read_regular_file,
    regular_file_bytes,
    sampled_sha256,
    write_private_file,
)

VERSION = 1
_MAX_BYTES = 512 * 2**20
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".npz")


class SavedArrays:
    """A file of named arrays that belong to particular models.

    Problems with the file are reported in `notice` rather than raised, and the data is recreated.

    Args:
        kind: Kind of data, such as `online`.
        identity: Fingerprint of the models, from `models_fingerprint`. Files for other models are
            ignored.
        folder: Folder for the file. Defaults to one in the user's data folder.

    Attributes:
        notice: Message for the user about data that could not be read or written. Empty if there was no
            problem.
    """

    def __init__(self, kind: str, identity: str, folder: Path | None = None) -> None:
        digest = hashlib.sha256(f"{kind} {VERSION} {identity}".encode()).hexdigest()
        self.path = (folder or _default_folder()) / f"{kind}-{digest[:32]}.npz"
        self.notice = ""
        self._header = f"{kind} {VERSION} {digest}"

    def load(self) -> Mapping[str, NDArray[Any]]:
        """Return the saved arrays, or an empty mapping if there are none or they cannot be read."""
        try:
            if regular_file_bytes(self.path) > _MAX_BYTES:
                raise ValueError(f"the file is larger than {_MAX_BYTES >> 20} MiB")
            with np.load(io.BytesIO(read_regular_file(self.path)), allow_pickle=False) as file:
                values = {name: file[name] for name in file.files}
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.notice = f"saved data cannot be read from {self.path}: {error_reason(error)}"
            return {}
        except (ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, MemoryError):
            self.notice = f"the saved data in {self.path} is damaged and will be replaced"
            return {}
        if str(values.pop("header", "")) != self._header:
            self.notice = f"the saved data in {self.path} belongs to another model and will be replaced"
            return {}
        return values

    def save(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Replace the saved arrays with `values`."""
        payload = io.BytesIO()
        arrays: dict[str, Any] = {**values, "header": np.array(self._header)}
        np.savez(payload, **arrays)
        try:
            make_private_folder(self.path.parent)
            write_private_file(self.path, payload.getvalue())
            self.notice = ""
        except OSError as error:
            self.notice = f"cannot save data to {self.path}: {error_reason(error)}"


def delete_saved_arrays(folder: Path | None = None) -> int:
    """Delete all files written by `SavedArrays` and return the number of bytes freed. Raises OSError."""
    folder = folder or _default_folder()
    # Earlier versions saved acceptance rates in this folder as JSON.
    return delete_files(path for kind in ("*.npz", "*.json") for path in folder.glob(kind))


def models_fingerprint(*models: ModelFacts) -> str:
    """Return an order-dependent hash of models that covers their weights and adapters.

    Only a few blocks of each weight file are read. For unreadable files, only the name is hashed.
    """
    digest = hashlib.sha256()
    for facts in models:
        sizes = facts.parameters, facts.file_bytes, facts.vocab_size
        digest.update(repr((facts.architecture, facts.quantisation, *sizes)).encode())
        model = Path(facts.path)
        files = (
            [path for path in model.iterdir() if path.suffix in _WEIGHT_SUFFIXES]
            if model.is_dir()
            else [model]
        )
        for path in sorted(files):
            digest.update(os.fsencode(path.name))
            with suppress(OSError):
                digest.update(sampled_sha256(path).encode())
        for adapter in facts.adapters:
            digest.update(repr((adapter.name, adapter.scale)).encode())
            folder = Path(adapter.path)
            for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
                with suppress(OSError):
                    digest.update(sampled_sha256(path).encode())
    return digest.hexdigest()


def _default_folder() -> Path:
    return data_folder() / "learnt"
