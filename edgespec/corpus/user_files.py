"""Tokenize the user's files for the suffix drafter. A reply that edits a file mostly repeats its text."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from edgespec.backends.base import Progress, Vocabulary
from edgespec.drafters.suffix.tokens import TokenArray
from edgespec.errors import CancelledError, OptionError
from edgespec.files import (
    cache_folder,
    error_reason,
    make_private_folder,
    read_regular_file,
    write_private_file,
)

__all__ = ["UserFiles", "read_user_files"]

VERSION = 1
# Skip larger files, because people rarely edit such large text files by hand.
_MAX_FILE_BYTES = 2 * 1024 * 1024
_MAX_FILES = 20_000
# Maximum number of token caches on disk. Each combination of corpus and vocabulary has one. The oldest caches
# are deleted first.
_MAX_CACHES = 16
_SUFFIX = ".corpus"


@dataclass(frozen=True, slots=True)
class UserFiles:
    """The tokens of one text file, or of all text files in a folder.

    Attributes:
        texts: Tokens of each file, starting with the most recently modified file.
        notice: User-facing summary of how many files and tokens are used, and why files were skipped.
    """

    texts: tuple[TokenArray, ...]
    notice: str


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    modified_ns: int
    size_bytes: int

    @property
    def key(self) -> str:
        """Key of the file's tokens in the cache. It changes whenever the file is modified."""
        return json.dumps([str(self.path), self.modified_ns, self.size_bytes])


def read_user_files(
    path: str | Path,
    vocabulary: Vocabulary,
    vocabulary_fingerprint: str,
    *,
    max_tokens: int = 1 << 20,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> UserFiles:
    """Read and tokenize the text files at `path`, most recently modified first.

    Hidden files and folders, files that are not UTF-8 text, and files of more than 2 MiB are skipped. The
    tokens are cached, keyed by the file's path, modification time and size.

    Args:
        path: A text file or a folder.
        vocabulary: Vocabulary used to tokenize the files.
        vocabulary_fingerprint: Identifies the vocabulary in the cache.
        max_tokens: Stop reading after this many tokens.
        progress: Called with the fraction of files read so far.
        cache: Cache folder. Defaults to one in the user's cache folder.

    Raises:
        OptionError: `path` does not exist or cannot be read.
        CancelledError: `progress` returned False.
    """
    root = Path(path).expanduser().absolute()
    files, skipped = _list_files(root)
    token_cache = _TokenCache(
        (cache or cache_folder() / "corpus"), root, vocabulary_fingerprint, vocabulary.size
    )
    texts: list[TokenArray] = []
    used: dict[str, TokenArray] = {}
    total = 0
    for number, file in enumerate(files):
        if progress is not None and not progress(f"reading {root.name}", number / len(files)):
            raise CancelledError(f"reading {root} was cancelled")
        if total >= max_tokens:
            skipped.append((f"after {max_tokens:,} tokens", len(files) - number))
            break
        tokens = token_cache.saved.get(file.key)
        if tokens is None:
            tokens = _tokenize_file(file.path, vocabulary)
        if tokens is None:
            skipped.append(("not readable as text", 1))
            continue
        used[file.key] = tokens
        if len(tokens):
            texts.append(tokens[: max_tokens - total])
            total += len(texts[-1])
    token_cache.save(used)
    return UserFiles(tuple(texts), _notice(root, len(texts), total, skipped))


def _notice(root: Path, files: int, tokens: int, skipped: list[tuple[str, int]]) -> str:
    counts: dict[str, int] = {}
    for reason, count in skipped:
        counts[reason] = counts.get(reason, 0) + count
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
    size = f"corpus {root}: {_plural(files, 'file')}, {_plural(tokens, 'token')}"
    return f"{size}; skipped: {reasons}" if reasons else size


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _list_files(root: Path) -> tuple[list[_File], list[tuple[str, int]]]:
    """Return files that may be text, newest first, and the number of files skipped for each reason."""
    try:
        paths: Iterator[Path] = _walk(root) if root.is_dir() else iter([root])
        if root.is_dir():
            os.scandir(root).close()
        elif stat.S_ISREG(root.stat().st_mode):
            root.open("rb").close()
        else:
            # Reject other kinds of files, such as pipes, because reading from a pipe could block forever.
            raise OptionError(
                f"--corpus {root} is neither a file nor a folder", "specify a text file or a folder"
            )
    except FileNotFoundError:
        raise OptionError(
            f"--corpus {root} does not exist", "specify a text file or a folder of text files"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path is invalid
        raise OptionError(
            f"--corpus {root} cannot be read: {error_reason(error)}", "check its permissions"
        ) from error
    files: list[_File] = []
    too_large = 0
    for path in paths:
        if len(files) == _MAX_FILES:
            return _latest(files), [("too large", too_large), (f"or more after {_MAX_FILES:,} files", 1)]
        try:
            status = path.stat()
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        if status.st_size > _MAX_FILE_BYTES:
            too_large += 1
            continue
        files.append(_File(path, status.st_mtime_ns, status.st_size))
    return _latest(files), [("too large", too_large)]


def _walk(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)


def _latest(files: list[_File]) -> list[_File]:
    return sorted(files, key=lambda file: (-file.modified_ns, file.path))


def _tokenize_file(path: Path, vocabulary: Vocabulary) -> TokenArray | None:
    """Return the tokens of a file, or None if it cannot be read as text."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text:
        return None
    return np.array(vocabulary.tokenize(text, special=False, start=False), np.int32)


class _TokenCache:
    """Caches the tokens of a corpus's files on disk. Damaged or outdated entries are ignored."""

    def __init__(self, folder: Path, root: Path, vocabulary_fingerprint: str, vocab_size: int) -> None:
        name = sha256(f"{vocabulary_fingerprint} {root}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._path = folder / f"{name}{_SUFFIX}"
        self._fingerprint = vocabulary_fingerprint
        self._vocab_size = vocab_size
        self.saved = self._load()

    def _load(self) -> dict[str, TokenArray]:
        try:
            head, _, payload = read_regular_file(self._path).partition(b"\n")
            data = json.loads(head)
            if (data["version"], data["vocabulary"]) != (VERSION, self._fingerprint):
                return {}
            if crc32(payload) != data["checksum"]:
                return {}
            tokens = np.frombuffer(payload, "<i4").astype(np.int32)
            if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
                return {}
            ends = np.cumsum([int(count) for _, count in data["files"]], dtype=np.int64)
            parts = np.split(tokens, ends[:-1])
            return {str(key): part for (key, _), part in zip(data["files"], parts, strict=True)}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def save(self, texts: dict[str, TokenArray]) -> None:
        """Replace the content of the cache with `texts`, a mapping from file keys to tokens."""
        if texts.keys() == self.saved.keys():
            return
        payload = b"".join(tokens.astype("<i4").tobytes() for tokens in texts.values())
        head = {
            "version": VERSION,
            "vocabulary": self._fingerprint,
            "checksum": crc32(payload),
            "files": [(key, len(tokens)) for key, tokens in texts.items()],
        }
        try:
            make_private_folder(self._path.parent)
            write_private_file(self._path, json.dumps(head).encode() + b"\n" + payload)
            caches = sorted(self._path.parent.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime_ns)
            for path in caches[_MAX_CACHES:]:
                path.unlink()
        except OSError:
            # If the cache cannot be written, the files are simply tokenized again next time.
            return
