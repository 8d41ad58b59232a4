"""The syntax of typed messages and commands: file references and quotes.

`@src/main.py` and `@"my notes.md"` refer to files. Triple quotes enclose a multi-line message.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

QUOTES = '"""'
"""Starts and ends a multi-line message."""
_REFERENCE = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|([^\s"]\S*))')
_OPEN = re.compile(r'(?:^|(?<=\s))@("[^"\n]*|[^\s"]*)$')
_PUNCTUATION = ".,;:!?)]}'"
# Matches paths, but not code such as `@app.get("/")`.
_LIKELY_PATH = re.compile(r"(?:[\w.~-]*/[\w./~ *-]*|[\w-][\w. -]*\.[a-z]\w{0,4})", re.IGNORECASE)
# Maximum length in characters of pasted text that is checked for paths.
_MAX_DROPPED_CHARACTERS = 10_000


def reference(path: str) -> str:
    """Return a reference to a path, in quotes if it contains spaces."""
    return f'@"{path}"' if re.search(r"\s", path) else f"@{path}"


def find_references(text: str) -> list[str]:
    """Return the paths that a message refers to, without duplicates. They may not exist."""
    paths = (match[1] or match[2] for match in _REFERENCE.finditer(text))
    return list(dict.fromkeys(paths))


def without_punctuation(path: str) -> str:
    """Return a path without trailing punctuation, such as the full stop in `Compare @a.py and @b.py.`"""
    return path.rstrip(_PUNCTUATION)


def missing_files(references: Sequence[str]) -> list[str]:
    """Return the references that look like paths rather than code or a person's name.

    Does not check whether the files exist.
    """
    return [path for path in map(without_punctuation, references) if _LIKELY_PATH.fullmatch(path)]


def open_reference(line: str) -> tuple[str, int] | None:
    """Return the path being typed at the end of a line, and the column of its `@`."""
    match = _OPEN.search(line)
    return (match[1].removeprefix('"'), match.start()) if match else None


def ending_reference(line: str) -> tuple[str, int] | None:
    """Return the path of a reference at the end of the line, and the length of the reference.

    The reference must be followed by a single space, which counts towards the length.
    """
    matches = [*_REFERENCE.finditer(line)]
    if not matches or line[matches[-1].end() :] != " ":
        return None
    return matches[-1][1] or matches[-1][2], len(line) - matches[-1].start()


def dropped_paths(text: str) -> list[str]:
    """Return the paths that a terminal pastes when files are dropped on it, or an empty list.

    Terminals paste absolute paths, with special characters quoted or escaped, or `file:` URLs.
    """
    text = text.strip()
    if not text or len(text) > _MAX_DROPPED_CHARACTERS:
        return []
    if _exists(whole := _local_path(text)):
        # Some terminals do not escape spaces in pasted paths.
        return [whole]
    try:
        paths = [_local_path(word) for word in shlex.split(text)]
    except ValueError:
        return []
    return paths if all(map(_exists, paths)) else []


def _local_path(word: str) -> str:
    return unquote(urlsplit(word).path) if word.startswith("file://") else word


def _exists(path: str) -> bool:
    # References cannot contain quotes or line breaks.
    return os.path.isabs(path) and not re.search(r'["\n]', path) and os.path.exists(path)


def ends_block(lines: Sequence[str]) -> bool:
    """Return whether the last line ends a message that starts with triple quotes.

    A line containing only three quotes always ends it. If text follows the opening quotes, three quotes at
    the end of a line also end it, unless they close a nested string, such as a docstring in pasted Python.
    """
    first, last = lines[0].rstrip(), lines[-1].rstrip()
    if len(lines) > 1 and last == QUOTES:
        return True
    inner = "\n".join(lines).rstrip().removeprefix(QUOTES)
    return first != QUOTES and inner.endswith(QUOTES) and inner.count(QUOTES) % 2 == 1


def block_text(lines: Sequence[str]) -> str:
    """Return a complete triple-quoted message (see `ends_block`) without its quotes."""
    return "\n".join(lines).rstrip()[len(QUOTES) : -len(QUOTES)]


def unquoted(text: str) -> str:
    """Return the text without surrounding quotes, which some users put around values."""
    for quotes in (QUOTES, '"', "'"):
        if len(text) >= 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)].strip()
    return text
