"""Read text from stdin without hanging on a pipe that nobody writes to."""

from __future__ import annotations

import io
import os
import select
import stat
import sys

import click

from edgespec.errors import OptionError
from edgespec.system.files import format_bytes
from edgespec.system.stdio import decode_input

__all__ = ["read_piped_text", "read_stdin"]

# Seconds to wait for the first byte from a pipe. Editors and schedulers often start programs with an open
# pipe to which they never write.
_WAIT_SECONDS = 10.0
# Seconds to wait for piped text before printing that edgespec is waiting.
_NOTICE_SECONDS = 2.0
# Maximum size of the text read from stdin, far larger than any context.
_MAX_BYTES = 64 << 20


def read_stdin() -> str:
    """Read all text from stdin, without the trailing line break. Waits until the writer closes the pipe.

    Raises:
        OptionError: The text is not UTF-8, is larger than 64 MiB, or cannot be read.
    """
    if sys.stdin is None:
        return ""
    try:
        data = sys.stdin.buffer.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OptionError(
            f"stdin cannot be read: {(error.strerror or str(error)).lower()}",
            "use a pipe or a text file",
            code="file_not_read",
        ) from error
    if len(data) > _MAX_BYTES:
        raise OptionError(
            f"stdin contains more than {format_bytes(_MAX_BYTES)} of text",
            "shorten it to fit the model's context",
            code="input_too_large",
        )
    return decode_input(data).removesuffix("\n").removesuffix("\r")


def read_piped_text() -> str:
    """Read the text that a pipe or a file supplies on stdin, or return an empty string.

    Returns an empty string immediately for terminals, devices such as /dev/null, and a closed stdin. If a
    pipe stays silent for 10 seconds, prints a note to stderr and returns an empty string.

    Raises:
        OptionError: As for `read_stdin`.
    """
    if sys.stdin is None:
        return ""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except io.UnsupportedOperation:
        return read_stdin()
    except (OSError, ValueError):
        return ""
    if stat.S_ISREG(mode):
        return read_stdin()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return ""
    if _has_data(number):
        return read_stdin()
    click.echo(
        f"stdin is an open pipe that delivered nothing for {_WAIT_SECONDS:.0f} seconds, so only the prompt"
        " is used; to wait for the pipe, add - after the prompt; to ignore it, add </dev/null",
        err=True,
    )
    return ""


def _has_data(number: int) -> bool:
    """Wait until a pipe has data or is closed by its writer. Return False after 10 seconds."""
    if _is_ready(number, _NOTICE_SECONDS):
        return True
    click.echo(f"waiting up to {_WAIT_SECONDS:.0f} seconds for input on stdin", err=True)
    return _is_ready(number, _WAIT_SECONDS - _NOTICE_SECONDS)


def _is_ready(number: int, seconds: float) -> bool:
    try:
        return bool(select.select([number], [], [], seconds)[0])
    except (OSError, ValueError):
        return True  # `select` does not support pipes on Windows.
