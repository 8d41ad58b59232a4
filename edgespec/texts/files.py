"""Files that are nobody else's business: written in one step, readable by their owner only."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from edgespec.backends.base import Vocabulary

__all__ = ["cache_folder", "fingerprint", "private_folder", "reason_of", "write_private"]


def cache_folder() -> Path:
    """Where edgespec keeps what it can make again: `$EDGESPEC_CACHE_DIR`, or the platform's cache folder."""
    if chosen := os.environ.get("EDGESPEC_CACHE_DIR"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("edgespec", appauthor=False))


def fingerprint(vocabulary: Vocabulary) -> str:
    """A hash of all tokens in their order, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for token in range(vocabulary.size):
        piece = vocabulary.raw_piece(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def write_private(path: Path, payload: bytes) -> None:
    """Put `payload` where older content may be, in one step. Raises OSError."""
    private_folder(path.parent)
    # mkstemp makes the file readable by its owner only, and os.replace keeps that.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def reason_of(error: Exception) -> str:
    """What the system said, in its words."""
    said = error.strerror if isinstance(error, OSError) else str(error)
    return (said or type(error).__name__).lower()
