"""Save reply tokens for later chats, in one private file per vocabulary.

A file consists of a header and records. A lock prevents two processes from appending at the same time. Each
record begins with a magic number, its length and a checksum, so that damaged records can be skipped without
losing the others.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.suffix.indexes import SEPARATOR, TokenArray
from edgespec.system.files import (
    data_folder,
    delete_files,
    error_reason,
    make_private_folder,
    read_regular_file,
    regular_file_bytes,
    touch_private,
    write_all,
    write_private_file,
)

__all__ = ["NoveltyFilter", "SavedReplies", "delete_saved_replies"]

# Sequences are compared by hashes of 32-token windows. A hash is stored for every eighth position.
_WINDOW, _STRIDE = 32, 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NoveltyFilter:
    """Finds the new parts of token sequences. Stores only hashes, about 1 byte per token.

    Args:
        max_tokens: Maximum number of tokens to store. If a new sequence would exceed the limit, all stored
            sequences are dropped first.
    """

    def __init__(self, max_tokens: int = 1 << 20) -> None:
        self._max_hashes = max_tokens // _STRIDE
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    def add(self, text: TokenArray) -> None:
        """Store hashes of a non-empty token sequence, so that `new_parts` recognises it later."""
        starts = np.append(np.arange(0, len(text), _STRIDE), len(text) - 1)
        new_hashes = np.unique(_hashes(_padded(text), starts))
        has_room = len(self._hashes) + len(new_hashes) <= self._max_hashes
        self._hashes = np.union1d(self._hashes, new_hashes) if has_room else new_hashes

    def new_parts(self, text: TokenArray) -> list[TokenArray]:
        """Return the parts of a token sequence that have not been added yet, in order.

        Parts of fewer than 8 tokens are left out, except for the last part, which always extends to the end
        of the sequence and may be shorter or empty.
        """
        known = np.zeros(len(text) + _WINDOW, np.int64)
        if len(self._hashes):
            hashes = _hashes(_padded(text), np.arange(len(text)))
            nearest = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            starts = np.flatnonzero(self._hashes[nearest] == hashes)
            known[starts] += 1
            known[starts + _WINDOW] -= 1
        is_new = np.cumsum(known)[_WINDOW - 1 :] == 0
        edges = [0, *(np.flatnonzero(np.diff(is_new)) + 1).tolist(), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if is_new[a] and (b == len(text) or b - a >= _STRIDE)]


def _padded(text: TokenArray) -> TokenArray:
    return np.concatenate([np.full(_WINDOW - 1, SEPARATOR, np.int32), text])


def _hashes(text: TokenArray, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    values = (text.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    values ^= values >> np.uint64(29)
    hashes = np.zeros(len(starts), np.uint64)
    for i in range(_WINDOW):
        hashes = hashes * _MULTIPLIER + values[starts + i]
    return hashes


if TYPE_CHECKING:
    from filelock import BaseFileLock

VERSION = 1
_MAGIC = b"\xe5RPL"
# Header of a record: magic number, number of tokens, and CRC-32 of the tokens.
_RECORD_HEADER = struct.Struct("<4sII")
_LOCK_SECONDS = 1.0
_SUFFIX = ".replies"
# Name of an empty file whose modification time records when saved replies were last deleted.
_DELETION_MARKER = "forgotten"


class SavedReplies:
    """Saves replies and prompts for models that share a vocabulary.

    Parts of a prompt that have already been saved are skipped. Methods report file errors in `notice`
    instead of raising them.

    Args:
        vocabulary_fingerprint: Hash of the vocabulary, as returned by `vocabulary_fingerprint()`.
        vocab_size: Size of the vocabulary. Records with token ids outside the vocabulary are treated as
            damaged.
        folder: Folder that contains the file. Defaults to a folder in the user's data folder.
        max_tokens: Maximum number of tokens in the file. If it is exceeded, the oldest records are dropped.

    Attributes:
        notice: User-facing message about a read or write failure. Empty if there is none.
    """

    def __init__(
        self,
        vocabulary_fingerprint: str,
        vocab_size: int,
        folder: Path | None = None,
        max_tokens: int = 1 << 20,
    ) -> None:
        self.path = (folder or _default_folder()) / f"{vocabulary_fingerprint[:32]}{_SUFFIX}"
        self.notice = ""
        self._header = f"edgespec replies {VERSION} {vocabulary_fingerprint} {vocab_size}\n".encode()
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._must_rewrite = self._disabled = False
        self._unwritten: list[TokenArray] = []
        self._seen = NoveltyFilter(max_tokens)
        self._deletion_ns = self._last_deletion_ns()

    def load(self) -> list[TokenArray]:
        """Return the saved token sequences, oldest first."""
        try:
            if not self.path.exists():
                return []
            with suppress(OSError, NotImplementedError), self._lock():
                return self._texts(read_regular_file(self.path))
            return self._texts(read_regular_file(self.path))
        except OSError as error:
            self.notice = f"saved replies cannot be read from {self.path}: {error_reason(error)}"
            return []

    def _texts(self, data: bytes) -> list[TokenArray]:
        texts, damaged_bytes = self._parse(data)
        if damaged_bytes:
            self._must_rewrite = True
            self.notice = (
                f"{damaged_bytes:,} of {len(data):,} bytes of saved replies in {self.path} are damaged. They"
                " are ignored, and will be deleted when the next reply is saved"
            )
        texts = self._newest(texts)
        if texts:
            # Join the turns of a chat, so that a later prompt that contains the whole chat is not saved
            # again.
            self._seen.add(np.concatenate(texts))
        return texts

    def add(self, reply: Sequence[int], prompt: Sequence[int] = ()) -> list[list[int]]:
        """Save a reply and the parts of its prompt that have not been saved yet.

        If another process has locked the file, the reply is written together with the next one. If the user
        has deleted saved replies since the last call, nothing is saved.

        Returns:
            The new parts of the prompt and the reply. The last sequence ends with the reply.
        """
        if not reply:
            return []
        turn = np.array([*prompt, *reply], np.int32)
        new_parts = self._seen.new_parts(turn[: len(prompt)])
        self._seen.add(turn)
        if (deletion_ns := self._last_deletion_ns()) != self._deletion_ns:
            self._deletion_ns, self._unwritten = deletion_ns, []
            return []
        # Truncate long prompts, so that they do not displace all other saved texts.
        *others, last = (part[-(self._max_tokens // 4) :] for part in new_parts)
        texts = [*others, np.concatenate([last, turn[len(prompt) :]])]
        self._save(texts)
        return [text.tolist() for text in texts]

    def _save(self, texts: list[TokenArray]) -> None:
        from filelock import Timeout

        if self._disabled:
            return
        self._unwritten.extend(texts)
        try:
            make_private_folder(self.path.parent)
            with self._lock():
                self._write(self._unwritten)
            self._unwritten = []
        except Timeout:
            self._unwritten = self._newest(self._unwritten)
        except (OSError, NotImplementedError) as error:
            self._disabled = True
            self._unwritten = []
            self.notice = f"replies cannot be saved in {self.path}: {error_reason(error)}"

    def _write(self, texts: list[TokenArray]) -> None:
        try:
            size_bytes = regular_file_bytes(self.path)
            with self.path.open("rb") as file:
                header = file.read(len(self._header))
        except FileNotFoundError:
            header, size_bytes = b"", 0
        if self._must_rewrite or header != self._header or size_bytes > 5 * self._max_tokens:
            saved = self._parse(read_regular_file(self.path))[0] if size_bytes else []
            records = map(_record, self._newest([*saved, *texts]))
            write_private_file(self.path, self._header + b"".join(records))
            self._must_rewrite = False
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        try:
            write_all(handle, b"".join(map(_record, texts)))
        finally:
            os.close(handle)

    def _parse(self, data: bytes) -> tuple[list[TokenArray], int]:
        if not data.startswith(self._header):
            return [], len(data)
        texts: list[TokenArray] = []
        offset, damaged_bytes = len(self._header), 0
        while offset < len(data):
            text = self._parse_record(data, offset)
            if text is not None:
                texts.append(text)
                offset += _RECORD_HEADER.size + text.nbytes
                continue
            start, offset = offset, data.find(_MAGIC, offset + 1)
            if offset < 0:
                offset = len(data)
            damaged_bytes += offset - start
        return texts, damaged_bytes

    def _parse_record(self, data: bytes, offset: int) -> TokenArray | None:
        start = offset + _RECORD_HEADER.size
        if start > len(data):
            return None
        magic, count, checksum = _RECORD_HEADER.unpack_from(data, offset)
        payload = data[start : start + 4 * count]
        if magic != _MAGIC or not count or len(payload) < 4 * count or crc32(payload) != checksum:
            return None
        tokens = np.frombuffer(payload, "<i4").astype(np.int32)
        return tokens if tokens.min() >= 0 and tokens.max() < self._vocab_size else None

    def _last_deletion_ns(self) -> int:
        with suppress(OSError):
            return (self.path.parent / _DELETION_MARKER).stat().st_mtime_ns
        return 0

    def _newest(self, texts: list[TokenArray]) -> list[TokenArray]:
        total = 0
        for i in range(len(texts) - 1, -1, -1):
            total += len(texts[i]) + _RECORD_HEADER.size // 4
            if total > self._max_tokens:
                return texts[i + 1 :]
        return texts

    def _lock(self) -> BaseFileLock:
        from filelock import FileLock

        return FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS, mode=0o600)


def delete_saved_replies(folder: Path | None = None) -> int:
    """Delete the saved replies for all vocabularies, and return the number of bytes freed.

    If a chat is running, its current turn will not be saved.

    Raises:
        OSError: A file cannot be deleted, or the deletion cannot be recorded.
    """
    folder = folder or _default_folder()
    touch_private(folder / _DELETION_MARKER)
    return delete_files(folder.glob(f"*{_SUFFIX}"))


def _record(tokens: TokenArray) -> bytes:
    payload = tokens.astype("<i4").tobytes()
    return _RECORD_HEADER.pack(_MAGIC, len(tokens), crc32(payload)) + payload


def _default_folder() -> Path:
    return data_folder() / "replies"
