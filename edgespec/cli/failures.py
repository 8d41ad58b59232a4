"""Convert exceptions to one-line error messages, JSON and exit statuses."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import click

from edgespec.errors import CancelledError, EdgespecError, OptionError
from edgespec.system.files import error_reason, write_advice
from edgespec.system.spelling import nearest

__all__ = [
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "WRONG_USAGE",
    "describe",
    "error_json",
    "exit_status",
    "usage_error",
]

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
_DEBUG = "EDGESPEC_DEBUG"


def exit_status(error: Exception) -> int:
    """Return the exit status for an error: 1 for failures, 2 for usage errors, 130 for interrupts."""
    if isinstance(error, click.ClickException):
        return error.exit_code
    if isinstance(error, CancelledError):
        return INTERRUPTED
    return WRONG_USAGE if isinstance(error, OptionError) else FAILED


def usage_error(what: str, next_step: str, ctx: click.Context) -> click.UsageError:
    """Return a usage error whose cause holds its two parts separately, as `error_json` requires."""
    cause = OptionError(what, next_step)
    error = click.UsageError(str(cause), ctx)
    error.__cause__ = cause
    return error


def describe(error: Exception) -> str:
    """Return the error message to print. For usage errors, append the usage."""
    if isinstance(error, click.UsageError):
        return _wrong_usage(error)
    trace = "".join(traceback.format_exception(error)) if os.environ.get(_DEBUG) else ""
    return trace + _line(error)


def error_json(error: BaseException) -> dict[str, Any]:
    """Return the JSON object that `--json` prints for an error."""
    if isinstance(error, click.UsageError) and isinstance(error.__cause__, EdgespecError):
        error = error.__cause__
    if isinstance(error, EdgespecError):
        fields = (error.code, error.what, error.next_step, error.option)
    elif isinstance(error, click.NoSuchOption):
        fields = ("option_unknown", *_unknown_option(error), error.option_name)
    elif isinstance(error, click.UsageError):
        fields = (OptionError.code, _plain(error.format_message()), "", "")
    elif isinstance(error, click.Abort | KeyboardInterrupt):
        fields = (CancelledError.code, "interrupted", "", "")
    else:
        assert isinstance(error, Exception)
        expected = isinstance(error, click.ClickException | OSError)
        fields = (EdgespecError.code if expected else "internal_error", *_parts(error), "")
    return {"error": dict(zip(("code", "message", "next_step", "option"), fields, strict=True))}


def _line(error: Exception) -> str:
    if isinstance(error, CancelledError):
        return f"interrupted: {error}"
    if isinstance(error, EdgespecError):
        return f"error: {error}"
    return f"error: {'; '.join(filter(None, _parts(error)))}"


def _parts(error: Exception) -> tuple[str, str]:
    """Return what failed and what to do, for an error that is not an EdgespecError."""
    if isinstance(error, click.ClickException):
        return _plain(error.format_message()), ""
    if isinstance(error, MemoryError):
        return "out of memory", "close other programs, or use a smaller model or a smaller --context"
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return error_reason(error), "check disk space and permissions"
        return f"{error_reason(error)} ({error.filename})", write_advice(error, Path(error.filename))
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return what, f"this is a bug: please report it with the traceback that {_DEBUG}=1 shows"


def _wrong_usage(error: click.UsageError) -> str:
    if isinstance(error, click.NoSuchOption):
        line = "; ".join(_unknown_option(error))
    else:
        line = _plain(error.format_message())
    if error.ctx is None:
        return f"error: {line}"
    usage = " ".join(error.ctx.get_usage().split())
    usage = usage[0].lower() + usage[1:]
    return f"error: {line}\n{usage} (see `{error.ctx.command_path} --help`)"


def _unknown_option(error: click.NoSuchOption) -> tuple[str, str]:
    near = nearest(error.option_name, _options(error.ctx))
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all options"
    return f"no such option {error.option_name}", hint


def _options(context: click.Context | None) -> list[str]:
    if context is None:
        return []
    options = (each for each in context.command.get_params(context) if isinstance(each, click.Option))
    return [name for each in options for name in (*each.opts, *each.secondary_opts) if name.startswith("--")]


def _plain(message: str) -> str:
    """Convert a click message to edgespec's style: one line, lower-case, without a full stop."""
    line = " ".join(message.split()).rstrip(".")
    return line[:1].lower() + line[1:]
