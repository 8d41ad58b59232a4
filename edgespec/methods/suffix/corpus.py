"""Create a suffix drafter that drafts from earlier chats' replies and from the user's files.

The files are tokenized and indexed, because a reply that edits a file mostly repeats it.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from edgespec.errors import CancelledError, OptionError
from edgespec.methods.suffix.drafter import SuffixConfig, SuffixCorpus, SuffixDrafter
from edgespec.methods.suffix.indexes import SuffixArray, TokenArray
from edgespec.methods.suffix.saved_replies import SavedReplies
from edgespec.model.base import Progress, Vocabulary
from edgespec.system.files import (
    cache_folder,
    error_reason,
    make_private_folder,
    read_regular_file,
    write_private_file,
)

__all__ = ["UserFiles", "read_user_files", "suffix_drafter", "vocabulary_fingerprint"]

VERSION = 1
# Maximum file size in bytes. People rarely edit larger text files by hand.
_MAX_FILE_BYTES = 2 * 1024 * 1024
_MAX_FILES = 20_000
# Maximum number of folder entries to read. A larger folder is probably a whole disk.
_MAX_ENTRIES = 100_000
_MAX_CACHES = 16
_SUFFIX = ".corpus"


@dataclass(frozen=True, slots=True)
class UserFiles:
    """The tokens of one text file, or of all text files in a folder.

    Attributes:
        texts: Tokens of each file, starting with the most recently modified file.
        notice: User-facing summary of how many files and tokens are used and why other files were skipped.
    """

    texts: tuple[TokenArray, ...]
    notice: str


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
        max_tokens: Reading stops after this many tokens.
        progress: Called with the fraction of files read so far.
        cache: Cache folder. Defaults to one in the user's cache folder.

    Raises:
        OptionError: `path` does not exist or cannot be read.
        CancelledError: `progress` returned False.
    """
    root = Path(path).expanduser().absolute()
    files, skipped = _list_files(root)
    cache_name = sha256(f"{vocabulary_fingerprint} {root}".encode("utf-8", "surrogateescape")).hexdigest()[
        :32
    ]
    cache_path = (cache or cache_folder() / "corpus") / f"{cache_name}{_SUFFIX}"
    saved = _load_cache(cache_path, vocabulary_fingerprint, vocabulary.size)
    texts: list[TokenArray] = []
    used: dict[str, TokenArray] = {}
    total = 0
    for number, (file, key) in enumerate(files):
        if progress is not None and not progress(f"reading {root.name}", number / len(files)):
            raise CancelledError(f"cancelled while reading {root}")
        if total >= max_tokens:
            skipped[f"beyond the limit of {max_tokens:,} tokens"] = len(files) - number
            break
        tokens = saved[key] if key in saved else _tokenize_file(file, vocabulary)
        if tokens is None:
            skipped["not readable as text"] += 1
            continue
        used[key] = tokens
        if len(tokens):
            texts.append(tokens[: max_tokens - total])
            total += len(texts[-1])
    if used.keys() != saved.keys():
        _save_cache(cache_path, vocabulary_fingerprint, used)
    notice = f"corpus {root}: {_plural(len(texts), 'file')}, {_plural(total, 'token')}"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items() if count)
    return UserFiles(tuple(texts), f"{notice}; skipped: {reasons}" if reasons else notice)


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _list_files(root: Path) -> tuple[list[tuple[Path, str]], Counter[str]]:
    try:
        if root.is_dir():
            os.scandir(root).close()
        elif stat.S_ISREG(root.stat().st_mode):
            root.open("rb").close()
        else:
            # Reject pipes and other special files, because reading a pipe could block forever.
            raise OptionError(
                f"--corpus {root} is neither a file nor a folder",
                "specify a text file or a folder",
                option="corpus",
                code="file_not_read",
            )
    except FileNotFoundError:
        raise OptionError(
            f"--corpus {root} does not exist",
            "specify a text file or a folder of text files",
            option="corpus",
            code="file_not_read",
        ) from None
    except (OSError, ValueError) as error:
        raise OptionError(
            f"--corpus {root} cannot be read: {error_reason(error)}",
            "check its permissions",
            option="corpus",
            code="file_not_read",
        ) from error
    files: list[tuple[int, Path, str]] = []
    skipped = Counter({"too large": 0})
    for number, path in enumerate(_walk(root) if root.is_dir() else (root,)):
        if len(files) == _MAX_FILES or number == _MAX_ENTRIES:
            skipped[f"or more beyond the limit of {number:,} files"] = 1
            break
        with suppress(OSError):
            status = path.stat()
            if status.st_size > _MAX_FILE_BYTES:
                skipped["too large"] += 1
            # Skip empty files. Files in /proc and /sys also report size 0, and reading them may block.
            elif status.st_size and stat.S_ISREG(status.st_mode):
                key = json.dumps([str(path), status.st_mtime_ns, status.st_size])
                files.append((-status.st_mtime_ns, path, key))
    return [(path, key) for _, path, key in sorted(files)], skipped


def _walk(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(folder, name) for name in (*sorted(names), *inner) if not name.startswith("."))


def _tokenize_file(path: Path, vocabulary: Vocabulary) -> TokenArray | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text:
        return None
    return np.array(vocabulary.tokenize(text, special=False, start=False), np.int32)


def _load_cache(path: Path, vocabulary_fingerprint: str, vocab_size: int) -> dict[str, TokenArray]:
    try:
        head, _, payload = read_regular_file(path).partition(b"\n")
        data = json.loads(head)
        expected = (VERSION, vocabulary_fingerprint, crc32(payload))
        if (data["version"], data["vocabulary"], data["checksum"]) != expected:
            return {}
        tokens = np.frombuffer(payload, "<i4").astype(np.int32)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
            return {}
        ends = np.cumsum([int(count) for _, count in data["files"]], dtype=np.int64)
        parts = np.split(tokens, ends[:-1])
        return {str(key): part for (key, _), part in zip(data["files"], parts, strict=True)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _save_cache(path: Path, vocabulary_fingerprint: str, texts: dict[str, TokenArray]) -> None:
    payload = b"".join(tokens.astype("<i4").tobytes() for tokens in texts.values())
    head = {
        "version": VERSION,
        "vocabulary": vocabulary_fingerprint,
        "checksum": crc32(payload),
        "files": [(key, len(tokens)) for key, tokens in texts.items()],
    }
    with suppress(OSError):
        make_private_folder(path.parent)
        write_private_file(path, json.dumps(head).encode() + b"\n" + payload)
        caches = sorted(path.parent.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime_ns)
        for old in caches[_MAX_CACHES:]:
            old.unlink()


def suffix_drafter(
    vocabulary: Vocabulary,
    *,
    corpus: str | Path | None = None,
    remember: bool = False,
    can_branch: bool = True,
    progress: Progress | None = None,
) -> tuple[SuffixDrafter, str]:
    """Create a suffix drafter for a target model with this vocabulary.

    Args:
        vocabulary: The target's vocabulary.
        corpus: A text file or a folder of text files, read and tokenized before this function returns.
        remember: Whether to draft from replies in earlier chats and save new replies in the user's data
            folder. Saved replies are loaded when the first reply begins. If False, saved replies are neither
            read nor written.
        can_branch: Whether to draft trees of tokens instead of single chains.
        progress: Called to report progress while the corpus is being read. Returns False to cancel.

    Returns:
        The drafter, and a notice about the corpus for the user (empty if there is no corpus).

    Raises:
        OptionError: The corpus cannot be read.
        CancelledError: `progress` returned False.
    """
    fingerprint = cache(lambda: vocabulary_fingerprint(vocabulary))
    user_files = None
    if corpus is not None:
        user_files = read_user_files(corpus, vocabulary, fingerprint(), progress=progress)

    def load_corpus() -> SuffixCorpus:
        replies = SavedReplies(fingerprint(), vocabulary.size) if remember else None
        texts = [*(user_files.texts if user_files else ()), *(replies.load() if replies else ())]
        return SuffixCorpus(SuffixArray(texts) if texts else None, replies)

    config = SuffixConfig(can_branch=can_branch, is_end=cache(vocabulary.is_end))
    return SuffixDrafter(load_corpus, config=config), user_files.notice if user_files else ""


def vocabulary_fingerprint(vocabulary: Vocabulary) -> str:
    """Return the SHA-256 hash of all tokens in id order, as 64 hexadecimal digits."""
    digest = sha256()
    for token in range(vocabulary.size):
        piece = vocabulary.raw_piece(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()
