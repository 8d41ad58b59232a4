"""Edit the file with the user's aliases and draft pairs, one line at a time."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from typing import Literal

from edgespec.catalog.catalogue import user_aliases, user_aliases_path, user_pairs
from edgespec.cli.settings_file import NotEditableError, changed
from edgespec.errors import ModelNotFoundError
from edgespec.files import error_reason, write_private_file

__all__ = ["Table", "is_named", "write_name"]

Table = Literal["aliases", "pairs"]

_LOCK_SECONDS = 10


def is_named(table: Table, name: str) -> bool:
    """Return whether the user's alias file contains a name, ignoring case."""
    return name.lower() in _names(table)


def write_name(table: Table, name: str, reference: str | None) -> None:
    """Set the reference for a name, or remove the name if `reference` is None.

    Raises:
        ModelNotFoundError: The name to remove does not exist, or the file cannot be changed.
    """
    from filelock import FileLock, Timeout

    names = _names(table)
    if reference is None and name.lower() not in names:
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        raise ModelNotFoundError(
            f"there is no {'alias' if table == 'aliases' else 'pair for'} {name}",
            f"did you mean {near[0]}?" if near else "`edgespec models list` shows all",
        )
    path = user_aliases_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_SECONDS, mode=0o600):
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            spelled = next(
                (one for one in tomllib.loads(text).get(table, {}) if one.lower() == name.lower()), name
            )
            literal = None if reference is None else json.dumps(reference, ensure_ascii=False)
            # If the file is a symbolic link, write to its target, because some users keep settings in another
            # folder.
            write_private_file(path.resolve(), changed(text, (table, spelled), literal).encode())
    except Timeout as error:
        raise ModelNotFoundError(f"another program is writing {path}", "try again when it is done") from error
    except (NotEditableError, ValueError) as error:
        raise ModelNotFoundError(
            f"{name} cannot be changed in {path}, because of how the name is written there",
            f"change it under [{table}] in an editor",
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} cannot be written: {error_reason(error)}", "make it writable"
        ) from error


def _names(table: Table) -> Mapping[str, str]:
    return user_aliases() if table == "aliases" else user_pairs()
