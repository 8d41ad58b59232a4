"""Edit individual settings in a TOML file without changing the rest of its text.

Comments and layout are preserved. The new text is parsed and compared with the intended result. If they
differ, the edit is rejected, so that an edit never damages the file.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["KeyPath", "NotEditableError", "changed", "line_number"]

KeyPath: TypeAlias = tuple[str, ...]
"""The names that lead to a value: `("temperature",)`, `("chat", "temperature")`."""


class NotEditableError(Exception):
    """The setting is written in a form that edgespec cannot edit."""


@dataclass(frozen=True, slots=True)
class _Statement:
    """Describes one statement in a TOML file.

    Attributes:
        first: Index of its first line, from 0.
        after: Index of the line after its last line.
        path: The key that it sets, or the table that it starts.
        opens: Whether it starts a table.
    """

    first: int
    after: int
    path: KeyPath
    opens: bool


def line_number(text: str, path: KeyPath) -> int | None:
    """Return the line number (from 1) where a value or table begins in a valid file, or None."""
    for statement in _statements(text.replace("\r\n", "\n").split("\n")):
        if statement.path[: len(path)] == path:
            return statement.first + 1
    return None


def changed(text: str, path: KeyPath, literal: str | None) -> str:
    """Return the text of a valid file with `path` set to a TOML literal, or removed if it is None.

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
    _compare(result, _wanted(tomllib.loads(text), path, literal), path)
    return result.replace("\n", "\r\n") if "\r\n" in text else result


def _statements(lines: list[str]) -> Iterator[_Statement]:
    """Yield the statements in a valid file. A multi-line value ends at the first line where it parses."""
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
            yield _Statement(at, after, table + _path(found or {}), opens=False)
        at = after


def _read(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None


def _path(table: Any) -> KeyPath:
    """Return the keys of nested tables that have one entry each, from the outside in."""
    names = []
    while isinstance(table, dict) and len(table) == 1:
        ((name, table),) = table.items()
        names.append(name)
    return tuple(names)


def _replaced(lines: list[str], here: _Statement, literal: str) -> str:
    """Return a statement with a new value. Preserve a comment after the old value."""
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
    """Append a line to its table. Add the table if it does not exist."""
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
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False)


def _wanted(table: dict[str, Any], path: KeyPath, literal: str | None) -> dict[str, Any]:
    """Return the parsed contents that the edited file must have. Raises NotEditableError."""
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


def _compare(text: str, wanted: dict[str, Any], path: KeyPath) -> None:
    found = _read(text)
    if found is not None and len(path) > 1 and path[0] not in found:
        # Removing the only key of a dotted table also removes the table.
        found = {**found, path[0]: {}}
    if found != wanted:
        raise NotEditableError
