"""The files of a GGUF model: itself, or all the parts it is split into."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import ModelFileError

__all__ = ["source_files"]

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)


def source_files(path: Path) -> list[Path]:
    """All parts of the model that `path` is, or is the first part of. Raises ModelFileError."""
    split = _PART.fullmatch(path.name)
    parts = [path]
    if split:
        count = int(split[2])
        parts = [path.with_name(f"{split[1]}-{i:05}-of-{split[2]}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelFileError(
            f"{path} cannot be read: {len(missing)} of {len(parts)} files are missing, first {missing[0]}",
            "check the path",
        )
    try:
        with parts[0].open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    if magic != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF file", "give the .gguf file of a model")
    return parts
