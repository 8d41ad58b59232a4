"""Convert published EAGLE-3, DFlash and DSpark heads to GGUF, for the methods `eagle` and `dflash`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from edgespec.backends.registry import format_at
from edgespec.errors import EdgespecError, OptionError
from edgespec.files import error_reason

__all__ = ["prepare_head"]


def prepare_head(folder: Path, target: Path, output: Path) -> int:
    """Convert a head to a GGUF file.

    Args:
        folder: Folder of the head, in the layout in which it was published on Hugging Face.
        target: The GGUF model that the head was trained for.
        output: The file to write. An existing file is replaced once the new one is complete.

    Returns:
        The size of the new file in bytes.

    Raises:
        ModelFileError: The folder contains no EAGLE-3, DFlash or DSpark head that can be converted.
        OptionError: The target is not a GGUF model.
        EdgespecError: The file cannot be written.
    """
    from edgespec.backends.gguf_files import gguf_files
    from edgespec.backends.gguf_header import read_header
    from edgespec.backends.llamacpp.dflash_conversion import convert_dflash_head
    from edgespec.backends.llamacpp.eagle_conversion import convert_eagle_head
    from edgespec.heads.dflash_config import is_dflash
    from edgespec.heads.eagle_config import read_config

    form = format_at(target)
    if form.estimate_head is None:
        raise OptionError(
            f"{target} is not a GGUF model", "pass the GGUF model that the head was trained for"
        )
    layers = int(read_header(gguf_files(target)[0]).architecture_value("block_count", 0))
    try:
        with TemporaryDirectory(prefix=".edgespec-", dir=output.parent) as unfinished:
            path = Path(unfinished) / "head.gguf"
            convert = convert_dflash_head if is_dflash(read_config(folder)) else convert_eagle_head
            convert(folder, layers, path)
            size_bytes = path.stat().st_size
            path.replace(output)
    except OSError as error:
        raise EdgespecError(
            f"the head {folder} cannot be converted to {output}: {error_reason(error)}",
            "check that the folder exists, and that there is room for the new file",
        ) from error
    return size_bytes
