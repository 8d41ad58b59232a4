"""Handle the encodings of standard streams and command-line arguments."""

from __future__ import annotations

import codecs
import locale
import os
import sys
from contextlib import suppress
from typing import TextIO

from edgespec.errors import OptionError

_MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def is_ascii(encoding: str | None) -> bool:
    """Return whether an encoding is ASCII, which is Python's default if the locale specifies none."""
    try:
        return codecs.lookup(encoding or "ascii").name == "ascii"
    except LookupError:
        return False


def ensure_utf8_locale() -> None:
    """Restart the program in Python's UTF-8 mode if the locale's encoding is ASCII.

    File names and terminal input are UTF-8 even with such a locale, but Python would treat every non-ASCII
    byte in a file name or argument as invalid. Python selects the encoding at startup, so it cannot be
    changed later.
    """
    if (
        sys.platform != "win32"
        and is_ascii(locale.getencoding())
        and not sys.flags.utf8_mode
        and sys.executable
        and os.environ.get("PYTHONUTF8") != "1"
    ):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)


def use_utf8(stream: TextIO) -> None:
    """Make a stream write UTF-8, unless it is a terminal with a non-ASCII encoding.

    Characters that the encoding lacks are written as question marks.
    """
    with suppress(AttributeError):
        keep = stream.isatty() and not is_ascii(stream.encoding)
        stream.reconfigure(encoding=None if keep else "utf-8", errors="replace")  # type: ignore[attr-defined]


def decode_input(data: bytes, line: int | None = None) -> str:
    """Decode text piped or redirected to stdin, which must be UTF-8 regardless of the locale.

    Args:
        data: The whole input or one line of it. Only the first line may start with a byte order mark.
        line: The line number, counted from 1, or None for the whole input.

    Raises:
        OptionError: The text is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig" if line in (None, 1) else "utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1}" if line is None else f"line {line}, byte {error.start + 1}"
        found = _MARKS.get(data[:2])
        raise OptionError(
            f"standard input is {found}, not UTF-8"
            if found
            else f"standard input is not valid UTF-8 at {place}",
            "convert the text to UTF-8, for example with iconv",
            code="invalid_encoding",
        ) from error


def check_utf8(name: str, text: str) -> str:
    """Return text from the command line if it is valid UTF-8.

    Python represents invalid bytes in an argument as lone surrogates, which are acceptable only in file
    names.

    Raises:
        OptionError: The text contains invalid bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = len(text[: error.start].encode()) + 1
        raise OptionError(
            f"{name} is not valid UTF-8 at byte {byte}",
            "set the terminal's encoding to UTF-8",
            code="invalid_encoding",
        ) from error
    return text
