"""Convert folders of heads and draft models to files, which get their final names only when complete."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.errors import EdgespecError, ModelNotFoundError
from edgespec.system.files import error_reason, write_advice

__all__ = ["delete_leftovers", "require_folder", "write_conversion"]

# Prefix of the names of temporary folders for conversions.
_UNFINISHED = ".edgespec-"
# Age in seconds from which a temporary folder counts as abandoned. No conversion takes this long.
_STALE_SECONDS = 24 * 3600.0


def require_folder(folder: Path) -> None:
    """Raise ModelNotFoundError if the folder to convert does not exist."""
    if not folder.exists():
        raise ModelNotFoundError(f"there is no folder {folder}", "check the path")


def write_conversion(
    output: Path, what: str, convert: Callable[[Path], None], *, setting: str = "--to"
) -> int:
    """Convert a model to a file, and return the file's size in bytes.

    Args:
        output: The file to write. An existing file is replaced once the new one is complete.
        what: Description of the model, for error messages.
        convert: Writes the file to the given path.
        setting: The option or environment variable that chose the output's folder, for error messages.

    Raises:
        EdgespecError: The file cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=_UNFINISHED, dir=output.parent) as unfinished:
            path = Path(unfinished) / "converted.gguf"
            convert(path)
            size_bytes = path.stat().st_size
            path.replace(output)
    except OSError as error:
        raise EdgespecError(
            f"{what} cannot be converted to {output}: {error_reason(error)}",
            write_advice(error, output.parent, setting),
            code="file_not_written",
        ) from error
    return size_bytes


def delete_leftovers(folder: Path) -> None:
    """Delete the temporary folders left by conversions that were killed."""
    with suppress(OSError):
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            if leftover.stat().st_mtime < time.time() - _STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
