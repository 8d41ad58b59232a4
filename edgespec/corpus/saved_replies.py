"""Earlier chats as tokens, one private file for each vocabulary, so that later chats can guess from them.

Kept are the replies, and of their prompts what no text before had: not the same system prompt, nor all of a
chat, again and again.

A file is a header and records appended under a lock. Every record says where it begins and what it must sum
to, so one that was cut short or damaged is skipped and the others stay.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from edgespec.corpus.novelty import NoveltyFilter
from edgespec.drafters.token_buffer import TokenArray
from edgespec.files import (
    data_folder,
    delete_files,
    error_reason,
    make_private_folder,
    read_regular_file,
    regular_file_bytes,
    touch_private,
    write_private_file,
)

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["SavedReplies", "delete_saved_replies"]

VERSION = 1
_MAGIC = b"\xe5RPL"
_RECORD = struct.Struct("<4sII")  # magic, tokens, crc32 of the tokens
_LOCK_SECONDS = 1.0
_SUFFIX = ".replies"
# Its time says when chats were forgotten last.
_FORGOTTEN = "forgotten"


class SavedReplies:
    """The chats of one vocabulary on disk. It never raises for what is wrong there: see `notice`.

    most_tokens: what is kept; the oldest texts go first. notice: what could not be read or written.
    """

    def __init__(
        self,
        vocabulary_fingerprint: str,
        vocab_size: int,
        folder: Path | None = None,
        most_tokens: int = 1 << 20,
    ) -> None:
        self.path = (folder or _default_folder()) / f"{vocabulary_fingerprint[:32]}{_SUFFIX}"
        self.notice = ""
        self._header = f"edgespec replies {VERSION} {vocabulary_fingerprint} {vocab_size}\n".encode()
        self._vocab_size = vocab_size
        self._most_tokens = most_tokens
        self._mending = self._off = False
        self._waiting: list[TokenArray] = []
        self._seen = NoveltyFilter(most_tokens)
        self._forgotten_ns = self._last_forgotten_ns()

    def load(self) -> list[TokenArray]:
        """The texts kept so far, the oldest first."""
        try:
            if not self.path.exists():
                return []
            with self._lock():
                data = read_regular_file(self.path)
        except (OSError, NotImplementedError):
            # Where nothing can be locked nothing is written either.
            try:
                data = read_regular_file(self.path)
            except OSError as error:
                self.notice = f"earlier chats cannot be read from {self.path}: {error_reason(error)}"
                return []
        replies, damaged_bytes = self._parsed(data)
        if damaged_bytes:
            self._mending = True
            self.notice = (
                f"{damaged_bytes:,} of {len(data):,} bytes of earlier chats in {self.path} are not"
                " readable; they are left out, and dropped when the next reply is kept"
            )
        kept = self._newest(replies)
        if kept:
            # Joined: a chat is kept turn by turn, and comes back as one.
            self._seen.add(np.concatenate(kept))
        return kept

    def add(self, reply: Sequence[int], prompt: Sequence[int] = ()) -> list[list[int]]:
        """Append a reply after what is new of its prompt: the texts that gives.

        While another process holds the file they wait for the next ones. A turn that chats were forgotten
        after is not kept, with any of its prompt: it may have been meant.
        """
        if not reply:
            return []
        said = np.array([*prompt, *reply], np.int32)
        new = self._seen.new(said[: len(prompt)])
        self._seen.add(said)
        if (forgotten_ns := self._last_forgotten_ns()) != self._forgotten_ns:
            self._forgotten_ns, self._waiting = forgotten_ns, []
            return []
        # A prompt may be long; it is not to displace everything else.
        *others, last = (text[-(self._most_tokens // 4) :] for text in new)
        texts = [*others, np.concatenate([last, said[len(prompt) :]])]
        self._keep(texts)
        return [text.tolist() for text in texts]

    def _keep(self, texts: list[TokenArray]) -> None:
        from filelock import Timeout

        if self._off:
            return
        self._waiting.extend(texts)
        try:
            make_private_folder(self.path.parent)
            with self._lock():
                self._write(self._waiting)
            self._waiting = []
        except Timeout:
            self._waiting = self._newest(self._waiting)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            self._off = True
            self._waiting = []
            self.notice = f"chats are not remembered in {self.path}: {error_reason(error)}"

    def _write(self, replies: list[TokenArray]) -> None:
        """Append, or write anew what is damaged, of another kind or grown by a quarter too much."""
        try:
            size_bytes = regular_file_bytes(self.path)
            with self.path.open("rb") as file:
                header = file.read(len(self._header))
        except FileNotFoundError:
            header, size_bytes = b"", 0
        if self._mending or header != self._header or size_bytes > 5 * self._most_tokens:
            known = self._parsed(read_regular_file(self.path))[0] if size_bytes else []
            kept = self._newest([*known, *replies])
            write_private_file(self.path, self._header + b"".join(map(_record, kept)))
            self._mending = False
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        try:
            payload = b"".join(map(_record, replies))
            if os.write(handle, payload) < len(payload):
                raise OSError(ENOSPC, "there is no space left")
        finally:
            os.close(handle)

    def _parsed(self, data: bytes) -> tuple[list[TokenArray], int]:
        """The whole records of a file, and how many bytes are none."""
        if not data.startswith(self._header):
            return [], len(data)
        replies: list[TokenArray] = []
        at, damaged_bytes = len(self._header), 0
        while at < len(data):
            reply = self._reply_at(data, at)
            if reply is not None:
                replies.append(reply)
                at += _RECORD.size + reply.nbytes
                continue
            following = data.find(_MAGIC, at + 1)
            following = following if following >= 0 else len(data)
            damaged_bytes += following - at
            at = following
        return replies, damaged_bytes

    def _reply_at(self, data: bytes, at: int) -> TokenArray | None:
        start = at + _RECORD.size
        if start > len(data):
            return None
        magic, count, checksum = _RECORD.unpack_from(data, at)
        payload = data[start : start + 4 * count]
        if magic != _MAGIC or not count or len(payload) < 4 * count or crc32(payload) != checksum:
            return None
        tokens = np.frombuffer(payload, "<i4").astype(np.int32)
        return tokens if tokens.min() >= 0 and tokens.max() < self._vocab_size else None

    def _last_forgotten_ns(self) -> int:
        try:
            return (self.path.parent / _FORGOTTEN).stat().st_mtime_ns
        except OSError:
            return 0

    def _newest(self, replies: list[TokenArray]) -> list[TokenArray]:
        """The last replies that fit the bound."""
        total = 0
        for i in range(len(replies) - 1, -1, -1):
            total += len(replies[i]) + _RECORD.size // 4
            if total > self._most_tokens:
                return replies[i + 1 :]
        return replies

    def _lock(self) -> BaseFileLock:
        from filelock import FileLock

        return FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS, mode=0o600)


def delete_saved_replies(folder: Path | None = None) -> int:
    """Delete all remembered chats, of every vocabulary, and the turns running ones are about to add.

    Gives the bytes that were freed. Raises OSError.
    """
    folder = folder or _default_folder()
    touch_private(folder / _FORGOTTEN)
    return delete_files(folder.glob(f"*{_SUFFIX}"))


def _record(tokens: TokenArray) -> bytes:
    payload = tokens.astype("<i4").tobytes()
    return _RECORD.pack(_MAGIC, len(tokens), crc32(payload)) + payload


def _default_folder() -> Path:
    return data_folder() / "replies"
