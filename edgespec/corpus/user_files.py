"""Files a person works on, as tokens: what an edit of them will mostly repeat."""

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
from edgespec.drafters.token_buffer import TokenArray
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
_LARGEST_FILE_BYTES = 2 * 1024 * 1024
_MOST_FILES = 20_000
_MOST_CACHES = 16
_SUFFIX = ".corpus"


@dataclass(frozen=True, slots=True)
class UserFiles:
    """The texts of a folder. notice: how much there is, and what was left out and why."""

    texts: tuple[TokenArray, ...]
    notice: str


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    modified_ns: int
    size_bytes: int

    @property
    def key(self) -> str:
        """What its tokens are kept under: another key is another content."""
        return json.dumps([str(self.path), self.modified_ns, self.size_bytes])


def read_user_files(
    path: str | Path,
    vocabulary: Vocabulary,
    vocabulary_fingerprint: str,
    *,
    most_tokens: int = 1 << 20,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> UserFiles:
    """The text files at `path`, the latest modified first, until there are `most_tokens`.

    Left out: hidden files and folders, what is not UTF-8 text, files of more than 2 MiB. Tokens are kept in
    the cache folder by path, time and size of their file. Raises OptionError, CancelledError.
    """
    root = Path(path).expanduser().absolute()
    files, left_out = _found(root)
    store = _Cache((cache or cache_folder() / "corpus"), root, vocabulary_fingerprint, vocabulary.size)
    texts: list[TokenArray] = []
    kept: dict[str, TokenArray] = {}
    total = 0
    for number, file in enumerate(files):
        if progress is not None and not progress(f"reading {root.name}", number / len(files)):
            raise CancelledError(f"reading {root} was cancelled")
        if total >= most_tokens:
            left_out.append((f"beyond {most_tokens:,} tokens", len(files) - number))
            break
        tokens = store.known.get(file.key)
        if tokens is None:
            tokens = _tokens(file.path, vocabulary)
        if tokens is None:
            left_out.append(("not readable as text", 1))
            continue
        kept[file.key] = tokens
        if len(tokens):
            texts.append(tokens[: most_tokens - total])
            total += len(texts[-1])
    store.save(kept)
    return UserFiles(tuple(texts), _notice(root, len(texts), total, left_out))


def _notice(root: Path, files: int, tokens: int, left_out: list[tuple[str, int]]) -> str:
    counts: dict[str, int] = {}
    for why, count in left_out:
        counts[why] = counts.get(why, 0) + count
    missing = ", ".join(f"{count:,} {why}" for why, count in counts.items() if count)
    said = f"corpus {root}: {_counted(files, 'file')}, {_counted(tokens, 'token')}"
    return f"{said}; left out: {missing}" if missing else said


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _found(root: Path) -> tuple[list[_File], list[tuple[str, int]]]:
    """The files that may be text, the latest first, and what was left out."""
    try:
        paths: Iterator[Path] = _walk(root) if root.is_dir() else iter([root])
        if root.is_dir():
            os.scandir(root).close()
        elif stat.S_ISREG(root.stat().st_mode):
            root.open("rb").close()
        else:
            # A pipe would be waited for.
            raise OptionError(f"the corpus at {root} is neither a file nor a folder", "give one of these")
    except FileNotFoundError:
        raise OptionError(
            f"there is no corpus at {root}", "give a text file or a folder of text files"
        ) from None
    except (OSError, ValueError) as error:  # the latter: no path at all
        raise OptionError(
            f"the corpus at {root} cannot be read: {error_reason(error)}", "check its permissions"
        ) from error
    files: list[_File] = []
    too_large = 0
    for path in paths:
        if len(files) == _MOST_FILES:
            return _latest(files), [("too large", too_large), (f"or more beyond {_MOST_FILES:,} files", 1)]
        try:
            status = path.stat()
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        if status.st_size > _LARGEST_FILE_BYTES:
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


def _tokens(path: Path, vocabulary: Vocabulary) -> TokenArray | None:
    """The tokens of a file, None when it is no text that can be read."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text:
        return None
    return np.array(vocabulary.tokenize(text, special=False, start=False), np.int32)


class _Cache:
    """The tokens of a corpus as they were made last time; what is not right there is made again."""

    def __init__(self, folder: Path, root: Path, vocabulary_fingerprint: str, vocab_size: int) -> None:
        name = sha256(f"{vocabulary_fingerprint} {root}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._path = folder / f"{name}{_SUFFIX}"
        self._fingerprint = vocabulary_fingerprint
        self._vocab_size = vocab_size
        self.known = self._load()

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
        """Keep `texts` for next time, where that is possible."""
        if texts.keys() == self.known.keys():
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
            for path in caches[_MOST_CACHES:]:
                path.unlink()
        except OSError:
            # A cache that cannot be written costs time, and nothing else.
            return
