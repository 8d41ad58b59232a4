"""Find prepared low-bit copies of the blocks that are streamed when a model does not fit in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.store.prepared_files import (
    PreparedModel,
    check_prepared,
    find_all_prepared,
    find_prepared,
)
from edgespec.store.reference import Resolved

__all__ = ["KIND", "SUBSTITUTES_FILE", "Substitutes", "find_substitutes", "find_usable_substitutes"]

# Identifies this kind of prepared model in the store.
KIND = "substitutes"
SUBSTITUTES_FILE = "substitutes.gguf"


@dataclass(frozen=True, slots=True)
class Substitutes:
    """Low-bit copies of feed-forward blocks.

    Attributes:
        file: The GGUF file with the copies, or an empty path if they have not been created yet.
        layer_bytes: Size of each layer's copy in bytes, by layer number.
    """

    file: Path
    layer_bytes: Mapping[int, int]

    def bytes_of(self, layers: Sequence[int]) -> int:
        """Return the total size of the copies for `layers`, in bytes."""
        return sum(self.layer_bytes[layer] for layer in layers)


def find_substitutes(path: Path) -> PreparedModel | None:
    """Find the newest low-bit block copies for the model at `path`, without checking their file."""
    return find_prepared(KIND, path)


def find_usable_substitutes(target: Resolved, *, is_named: bool) -> list[Substitutes]:
    """Return the sets of low-bit copies of the target's blocks, newest first.

    Each set was prepared for a certain amount of memory.

    Args:
        target: The target whose copies to find.
        is_named: Whether the user named the method. If not, damaged or outdated copies are ignored.

    Raises:
        ModelFileError: The user named the method, but the newest copies are damaged or outdated.
    """
    found: list[Substitutes] = []
    if not target.file_format.low_bit_copy_format or target.path.is_dir():
        return found
    for prepared in find_all_prepared(KIND, target.path):
        try:
            check_prepared(prepared, target.path)
        except ModelFileError:
            if is_named and not found:
                raise
            continue
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            sizes = {int(layer): int(size) for layer, size in prepared.facts["layer_bytes"].items()}
            found.append(Substitutes(prepared.path(SUBSTITUTES_FILE), sizes))
    return found
