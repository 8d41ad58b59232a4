"""Find all files of a GGUF model, which may be split into several parts."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.files import regular_file_bytes

__all__ = ["check_is_gguf", "describe_start", "gguf_files"]

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE)
# If a file is not a GGUF file, an error message quotes this many bytes from its start.
_SHOWN_BYTES = 16


def describe_start(data: bytes) -> str:
    """Return a phrase that describes the first bytes of a file, such as `begins with the text 'hi'`."""
    if not data:
        return "is empty"
    text = " ".join(data.decode("utf-8", "replace").split())
    if text and text.isprintable() and "\ufffd" not in text:
        return f"begins with the text {text!r}"
    return f"begins with the bytes {data[:4].hex(' ').upper()}"


def check_is_gguf(path: Path, content: str = "model or head") -> None:
    """Check that a file begins like a GGUF file.

    Args:
        path: The file.
        content: Expected content of the file, for the error message.

    Raises:
        ModelFileError: The file cannot be read, or is not a GGUF file.
    """
    try:
        regular_file_bytes(path)
        with path.open("rb") as stream:
            start = stream.read(_SHOWN_BYTES)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    if not start.startswith(b"GGUF"):
        raise ModelFileError(
            f"{path} is not a GGUF file: it {describe_start(start)}", f"select the .gguf file of a {content}"
        )


def gguf_files(path: Path) -> list[Path]:
    """Return the files of a GGUF model in order.

    Args:
        path: The model file, or any part of a split model.

    Raises:
        ModelFileError: The file is not a GGUF file, or a part is missing.
    """
    check_is_gguf(path)
    match = _PART.fullmatch(path.name)
    count = int(match[2]) if match else 0
    if match is None or not count:
        return [path]
    parts = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}{match[3]}") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelFileError(
            f"{len(missing)} of the {len(parts)} parts of {path} are missing, such as {missing[0]}",
            f"copy all parts to {path.parent}",
        )
    return parts
