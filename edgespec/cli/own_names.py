"""Edit the file of the user's aliases and draft pairs."""

from __future__ import annotations

import difflib
import tomllib
from typing import Literal

from edgespec.catalog.catalogue import user_aliases, user_aliases_path, user_pairs
from edgespec.errors import ModelNotFoundError
from edgespec.settings_file import quoted, read_text, write_value

__all__ = ["write_name"]


def write_name(table: Literal["aliases", "pairs"], name: str, reference: str | None) -> None:
    """Set the reference for a name, or remove the name if `reference` is None. Ignores case.

    Raises:
        ModelNotFoundError: The name to remove does not exist.
        ConfigurationError: The file cannot be changed.
    """
    names = user_aliases() if table == "aliases" else user_pairs()
    if reference is None and name.lower() not in names:
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        raise ModelNotFoundError(
            f"there is no {'alias' if table == 'aliases' else 'draft model saved for'} {name}",
            f"did you mean {near[0]}?" if near else "`edgespec models list` shows all",
        )
    path = user_aliases_path()
    written = tomllib.loads(read_text(path) or "").get(table, {})
    spelled = next((each for each in written if each.lower() == name.lower()), name)
    write_value(path, (table, spelled), None if reference is None else quoted(reference))
