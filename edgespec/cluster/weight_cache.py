"""A worker's size-limited cache of received weights, which makes loading the same model again faster.

llama.cpp reads and writes the cache files itself, and does not notice if a file is incomplete, for example
because the disk was full. It would then compute with wrong weights. New files therefore stay in the subfolder
`unverified` until edgespec has checked that their hash matches their name.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.cluster.layer_child import Buffer
from edgespec.errors import WorkerError
from edgespec.system.disks import free_bytes
from edgespec.system.files import (
    error_reason,
    file_state,
    format_bytes,
    make_private_folder,
    read_regular_file,
    sync_to_disk,
    write_advice,
    write_private_file,
)

__all__ = ["WeightCache", "fnv1a", "hide_unverified", "read_weight", "weight_digest", "write_weight"]

_DIGEST = re.compile(r"[0-9a-f]{64}")
# llama.cpp names its files after the FNV-1a hash of their contents.
_LLAMA_CPP_NAME = re.compile(r"[0-9a-f]{16}")
_UNVERIFIED, _STATES = "unverified", ".verified.json"
# Warn the user if the disk has less free space than this, because some weights may then not be cached. Very
# few tensors are larger than this.
_LOW_DISK_BYTES = 1 << 30
# Parameters of the 64-bit FNV-1a hash.
_START, _PRIME = 0xCBF29CE484222325, 0x100000001B3
_MODULUS = 1 << 64
# Lowest byte of the prime, which is all that is needed to compute the lowest byte of each hash.
_LOW_PRIME = np.uint8(_PRIME & 0xFF)
# A block is split into `_LANES` lanes of `_STEPS` consecutive bytes. NumPy processes one byte of every lane
# at once.
_STEPS, _LANES = 64, 8192
_BLOCK_BYTES = _STEPS * _LANES

# Held while verifying, so that no two threads verify the same file or write `_STATES` at the same time.
_verifying = threading.Lock()

_Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WeightCache:
    """A folder of received weights. It can exceed `max_bytes` until the next call to `prepare`."""

    folder: Path
    max_bytes: int

    def prepare(self) -> Path:
        """Create the folder, evict the least recently used files beyond `max_bytes`, and return the folder.

        Files that llama.cpp wrote but `verify` has not checked yet are moved away, so that llama.cpp cannot
        use them.

        Raises:
            WorkerError: The folder cannot be written to.
        """
        unverified = self.folder / _UNVERIFIED
        try:
            make_private_folder(unverified)
            make_private_folder(self.folder)
            known = self._states()
            files = []
            for path in (*self.folder.iterdir(), *unverified.iterdir()):
                # `verify` runs in another thread and may move or delete files in the meantime.
                with suppress(FileNotFoundError):
                    if not path.is_file() or path.name == _STATES:
                        continue
                    if path.parent == self.folder and _LLAMA_CPP_NAME.fullmatch(path.name):
                        path = path if file_state(path) == known.get(path.name) else hide_unverified(path)
                    files.append((path, path.stat()))
            # llama.cpp reads these files itself, so use the access time, or the modification time on file
            # systems that do not record accesses.
            files.sort(key=lambda file: max(file[1].st_atime, file[1].st_mtime))
            total = sum(state.st_size for _, state in files)
            for path, state in files:
                if total <= self.max_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= state.st_size
        except OSError as error:
            raise WorkerError(
                f"the weight cache {self.folder} cannot be used: {error_reason(error)}",
                write_advice(error, self.folder),
                code="file_not_written",
            ) from error
        return self.folder

    def disk_warning(self) -> str:
        """Return a warning if the disk is nearly full, or an empty string."""
        with suppress(OSError):
            if (free := free_bytes(self.folder)) < _LOW_DISK_BYTES:
                return (
                    f"the disk with the weight cache {self.folder} has only {format_bytes(free)} free, which"
                    " may not be enough for all weights; free some space on it, or omit --cache"
                )
        return ""

    def verify(self, goes_on: Callable[[], bool]) -> None:
        """Check all hidden files. Release those whose hash matches their name, and delete the others.

        Stops early if `goes_on` returns False, or if a file cannot be read or moved.
        """
        with _verifying, suppress(OSError):
            for path in (self.folder / _UNVERIFIED).iterdir():
                sync_to_disk(path)
                with path.open("rb") as file:
                    value = fnv1a(file, goes_on)
                if value is None:
                    return
                if f"{value:016x}" != path.name:
                    path.unlink()
                    continue
                place = self.folder / path.name
                path.rename(place)
                states = {name: state for name, state in self._states().items() if self._has(name)}
                data = json.dumps({**states, path.name: file_state(place)}).encode()
                write_private_file(self.folder / _STATES, data)

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _states(self) -> Mapping[str, object]:
        """Return the state of each verified file at the time of verification, keyed by file name."""
        with suppress(OSError, ValueError, RecursionError):
            states = json.loads(read_regular_file(self.folder / _STATES))
            if isinstance(states, dict):
                return states
        return {}


def hide_unverified(path: Path) -> Path:
    """Hide a file written by llama.cpp until `WeightCache.verify` checks it, and return its new path.

    Raises:
        OSError: The file cannot be moved.
    """
    return path.replace(path.parent / _UNVERIFIED / path.name)


def weight_digest(data: Buffer) -> str:
    """Return the digest under which a weight is cached."""
    return hashlib.sha256(data).hexdigest()


def read_weight(folder: Path, digest: str) -> bytes | None:
    """Return an MLX model's weight from the cache folder, or None if it is not there.

    Raises:
        ValueError: `digest` is not a valid digest.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a valid weight digest")
    path = _path(folder, digest)
    with suppress(OSError):
        data = path.read_bytes()
        if weight_digest(data) == digest:
            # Mark the file as used, because `WeightCache.prepare` evicts the least recently used files.
            path.touch()
            return data
    return None


def write_weight(folder: Path, data: Buffer) -> None:
    """Add a weight to the cache folder. Does nothing if the file cannot be written."""
    with suppress(OSError):
        write_private_file(_path(folder, weight_digest(data)), bytes(data))


def _path(folder: Path, digest: str) -> Path:
    return folder / f"mlx-{digest}"


def fnv1a(file: BinaryIO, goes_on: Callable[[], bool]) -> int | None:
    """Return the FNV-1a hash of a file, or None if `goes_on` returns False.

    Processes about 60 MB per second. FNV-1a updates the hash h to (h ^ byte) * prime. The XOR changes only
    the lowest byte of h, so the lowest bytes of all intermediate hashes are computed first. The final hash is
    then a sum of products.

    Args:
        file: The file, which is read from its current position.
        goes_on: Called before each block is hashed. Returning False cancels the computation.

    Raises:
        OSError: The file cannot be read.
    """
    value = _START
    while block := file.read(_BLOCK_BYTES):
        if not goes_on():
            return None
        if len(block) < _BLOCK_BYTES:
            for byte in block:
                value = (value ^ byte) * _PRIME % _MODULUS
        else:
            value = _next(value, np.frombuffer(block, dtype=np.uint8))
    return value


def _next(value: int, block: _Bytes) -> int:
    """Return the hash `value` updated with another block."""
    # Row i holds byte i of each lane.
    given = np.ascontiguousarray(block.reshape(_LANES, _STEPS).T)
    mixed = _mixed_low_bytes(value & 0xFF, given)
    # `mixed` holds the lowest byte of the hash after the XOR with each byte, and `mixed ^ given` the lowest
    # byte before it.
    added = mixed.astype(np.int64) - (mixed ^ given)
    total = int(np.einsum("ij,ij->", added.view(np.uint64), _powers()))
    return (total + value * pow(_PRIME, _BLOCK_BYTES, _MODULUS)) % _MODULUS


def _mixed_low_bytes(low: int, given: _Bytes) -> _Bytes:
    """Return the lowest byte of the hash after the XOR with each byte, computed one bit at a time.

    Multiplying by the prime either keeps or flips each bit, depending only on lower bits. Each bit of the
    hash is therefore the XOR of all flips so far.
    """
    mixed = np.zeros_like(given)
    for place in range(8):
        bit = np.uint8(1 << place)
        own = given & bit
        changes = (mixed * _LOW_PRIME & bit) ^ own
        for step in range(1, _STEPS):
            changes[step] ^= changes[step - 1]
        first = np.uint8(low) & bit
        lanes = np.bitwise_xor.accumulate(np.concatenate(([first], changes[-1, :-1])))
        mixed[0] |= lanes ^ own[0]
        mixed[1:] |= changes[:-1] ^ lanes ^ own[1:]
    return mixed


@cache
def _powers() -> NDArray[np.uint64]:
    """Return the power of the prime that multiplies each byte's contribution to the hash."""
    powers = [_PRIME]
    for _ in range(_BLOCK_BYTES - 1):
        powers.append(powers[-1] * _PRIME % _MODULUS)
    return np.ascontiguousarray(np.array(powers[::-1], dtype=np.uint64).reshape(_LANES, _STEPS).T)
