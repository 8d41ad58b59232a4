"""Read TOML settings files, and edit individual values without changing the rest of the text.

Comments and layout are preserved. Each edit is parsed and compared with the intended result, and rejected if
they differ, so an edit can never damage the file.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from edgespec.errors import ConfigurationError, OptionError
from edgespec.system.files import (
    config_folder,
    error_reason,
    parse_toml,
    read_regular_file,
    write_advice,
    write_private_file,
)

__all__ = [
    "KeyPath",
    "NotEditableError",
    "changed",
    "encoded",
    "error_at",
    "line_number",
    "quoted",
    "read_text",
    "settings_path",
    "write_value",
]

KeyPath: TypeAlias = tuple[str, ...]
"""The keys of a value, outermost first, such as `("temperature",)` or `("chat", "temperature")`."""
_LOCK_SECONDS = 10
_MAX_BYTES, _MAX_VALUE_LINES = 64 << 10, 500
# Matches the position at the end of `tomllib`'s messages. Before Python 3.14, its errors have no fields for
# it.
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


class NotEditableError(Exception):
    """Raised when a setting is written in a form that edgespec cannot edit."""


class _Statement(NamedTuple):
    """One statement in a TOML file.

    Attributes:
        first: Zero-based index of the statement's first line.
        after: Index of the line after the statement.
        path: The key that is set, or the table that is started.
        opens: Whether the statement starts a table.
    """

    first: int
    after: int
    path: KeyPath
    opens: bool


def settings_path() -> Path:
    """Return the path of the user's settings file, which may not exist."""
    return config_folder() / "config.toml"


def read_text(path: Path) -> str | None:
    """Return the text of a TOML file, or None if the file does not exist.

    Raises:
        ConfigurationError: The file cannot be read, or is not valid TOML.
    """
    try:
        text = read_regular_file(path, _MAX_BYTES).decode("utf-8-sig")
        parse_toml(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigurationError(
            f"{path}, line {line}: the text is not UTF-8", "save the file as UTF-8", code="invalid_encoding"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the settings file {path} cannot be read: {error_reason(error)}",
            "fix its permissions or delete it",
            code="file_not_read",
        ) from error
    except ValueError as error:
        reason = str(error)
        where = str(path)
        if place := _PLACE.search(reason):
            reason = reason[: place.start()]
            where += f", line {place[1] or text.rstrip().count(chr(10)) + 1}"
            where += f", column {place[2]}" if place[2] else ""
        raise ConfigurationError(
            f"{where}: {reason[:1].lower()}{reason[1:]}",
            'write each setting as in target = "8b-q4", or move the file to another folder if edgespec should'
            " not read it",
        ) from error
    return text


def encoded(path: Path, text: str) -> bytes:
    """Encode a TOML file's text as UTF-8. Raises ConfigurationError if it is too large."""
    data = text.encode()
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(
            f"{path} would have {len(data):,} bytes, which exceeds the limit of {_MAX_BYTES:,} bytes",
            "shorten the longest value, such as the system prompt",
            code="input_too_large",
        )
    return data


def write_value(file: Path, path: KeyPath, literal: str | None) -> bool:
    """Set a value in a TOML file to a TOML literal, or remove the value if `literal` is None.

    Args:
        file: The TOML file. Created if it does not exist.
        path: The keys of the value, outermost first.
        literal: The new value as a TOML literal, or None.

    Returns:
        False if there is nothing to remove.

    Raises:
        ConfigurationError: The file cannot be read or written.
    """
    from filelock import FileLock, Timeout

    try:
        if literal is None and not file.exists():
            return False
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=_LOCK_SECONDS, mode=0o600):
            before = read_text(file) or ""
            after = changed(before, path, literal)
            if after == before:
                return literal is not None
            # If the file is a symbolic link, keep the link and write to the file that it points to.
            write_private_file(file.resolve(), encoded(file, after))
    except NotEditableError:
        raise ConfigurationError(
            f"{'.'.join(path)} cannot be changed in {file} automatically",
            "change it in a text editor",
        ) from None
    except Timeout as error:
        raise ConfigurationError(
            f"another program is writing to {file}", "try again when it has finished", code="file_in_use"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to {file}: {error_reason(error)}",
            write_advice(error, file.parent, "EDGESPEC_CONFIG_DIR"),
            code="file_not_written",
        ) from error
    return True


def quoted(text: str) -> str:
    """Return a string as a TOML literal. Raises OptionError if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{text!r} cannot be encoded as UTF-8", "remove the invalid characters", code="invalid_encoding"
        ) from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def error_at(file: Path, text: str, path: KeyPath, problem: str, next_step: str) -> ConfigurationError:
    """Return the error for an invalid value in a settings file, with the file and line number.

    Args:
        file: The settings file.
        text: The file's contents, which are valid TOML.
        path: The keys of the value.
        problem: What is wrong with the value.
        next_step: What the user can do about it.
    """
    line = line_number(text, path)
    where = f"{file}, line {line}" if line else str(file)
    return ConfigurationError(f"{where}: {problem}", next_step)


def line_number(text: str, path: KeyPath) -> int | None:
    """Return the one-based line where a value or table starts in valid TOML, or None if it is missing."""
    for statement in _statements(text.replace("\r\n", "\n").split("\n")):
        if statement.path[: len(path)] == path:
            return statement.first + 1
    return None


def changed(text: str, path: KeyPath, literal: str | None) -> str:
    """Return valid TOML text with the value at `path` set to `literal`, or removed if `literal` is None.

    Raises:
        NotEditableError: The edit would change more than this value.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    statements = list(_statements(lines))
    here = next((each for each in statements if each.path == path and not each.opens), None)
    if here is not None:
        lines[here.first : here.after] = [] if literal is None else [_replaced(lines, here, literal)]
    elif literal is not None:
        _insert(lines, statements, path, literal)
    result = "\n".join(lines)
    found = _read(result)
    if found is not None and len(path) > 1:
        # If removing the last key also removed the table, treat the table as empty.
        found.setdefault(path[0], {})
    if found != _wanted(tomllib.loads(text), path, literal):
        raise NotEditableError
    return result.replace("\n", "\r\n") if "\r\n" in text else result


def _statements(lines: list[str]) -> Iterator[_Statement]:
    table: KeyPath = ()
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        after = at + 1
        if line.startswith("["):
            table = _path(tomllib.loads(line))
            yield _Statement(at, after, table, opens=True)
        elif line and not line.startswith("#"):
            while (found := _read("\n".join(lines[at:after]))) is None and after < len(lines):
                after += 1
                if after - at > _MAX_VALUE_LINES:
                    return
            yield _Statement(at, after, table + _path(found or {}), opens=False)
        at = after


def _read(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None


def _path(table: Any) -> KeyPath:
    names = []
    while isinstance(table, dict) and len(table) == 1:
        ((name, table),) = table.items()
        names.append(name)
    return tuple(names)


def _replaced(lines: list[str], here: _Statement, literal: str) -> str:
    """Return a statement with its value replaced, preserving any comment after the value."""
    old = "\n".join(lines[here.first : here.after])
    name, _, _ = old.partition("=")
    value = _read(old)
    comment = ""
    for at, character in enumerate(old):
        if character == "#" and _read(old[:at]) == value:
            comment = f"  {old[at:]}"
            break
    return f"{name.rstrip()} = {literal}{comment}"


def _insert(lines: list[str], statements: list[_Statement], path: KeyPath, literal: str) -> None:
    *table, name = path
    new = f"{_spelled(name)} = {literal}"
    of_table = [each for each in statements if each.path[:-1] == tuple(table) and not each.opens]
    headers = [each for each in statements if each.opens]
    opened = [each for each in headers if each.path == tuple(table)]
    if inside := [*opened, *of_table]:
        lines.insert(max(each.after for each in inside), new)
    elif table:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += [*([""] if lines else []), f"[{'.'.join(table)}]", new, ""]
    elif headers:
        at = headers[0].first
        while at and lines[at - 1].lstrip().startswith("#"):
            at -= 1
        lines[at:at] = [new, ""]
    else:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += [new, ""]


def _spelled(name: str) -> str:
    """Return a TOML key, quoted if it contains characters such as dots or colons."""
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else quoted(name)


def _wanted(table: dict[str, Any], path: KeyPath, literal: str | None) -> dict[str, Any]:
    wanted = copy.deepcopy(table)
    *inside, name = path
    part: Any = wanted
    for each in inside:
        part = part.setdefault(each, {})
        if not isinstance(part, dict):
            raise NotEditableError
    if literal is None:
        part.pop(name, None)
    else:
        part[name] = tomllib.loads(f"value = {literal}")["value"]
    return wanted
