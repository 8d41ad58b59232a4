"""The names and pairs a user made: the tables [aliases] and [pairs] of a TOML file whose comments stay."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Literal

from edgespec.catalog import catalogue
from edgespec.catalog.reference import NameReference, Resolved, parse, resolve
from edgespec.errors import EdgespecError, ModelNotFoundError, OptionError
from edgespec.files import reason_of, write_private

__all__ = ["pair_of", "remove_alias", "remove_pair", "set_alias", "set_pair"]

_Table = Literal["aliases", "pairs"]
_HEADER = re.compile(r"^\s*\[")
_RESERVED = ("auto", "none", "embedded")


def set_alias(name: str, reference: str) -> str:
    """Let `name` stand for a reference. Gives a remark, empty where the model is on this machine.

    Raises OptionError for a name that cannot be one, ModelNotFoundError for a reference that leads nowhere.
    """
    name, reference = name.strip(), reference.strip()
    if not name or name.lower() in _RESERVED or not isinstance(parse(name), NameReference):
        raise OptionError(f"{name!r} cannot be a name of a model", "take letters, digits, dots and dashes")
    aliases = catalogue.user_aliases() | {name.lower(): reference}
    seen, text = [name.lower()], reference
    while (text := text.lower()) in aliases:
        if text in seen:
            raise OptionError(f"{name} would lead back to itself by {reference}", "name another model")
        seen.append(text)
        text = aliases[text].strip()
    remark = _remark(text)
    _write("aliases", name, reference)
    return remark


def remove_alias(name: str) -> None:
    """Forget an alias. Raises ModelNotFoundError, naming the nearest, where there is none."""
    _known("alias", name, catalogue.user_aliases())
    _write("aliases", name, None)


def set_pair(target: str, draft: str) -> str:
    """Let `--draft auto` take `draft` for `target`. Gives a remark, empty where both are on this machine.

    Raises ModelNotFoundError for a reference that leads nowhere.
    """
    remarks = [_remark(reference.strip()) for reference in (target, draft) if reference.lower() != "none"]
    _write("pairs", target.strip(), draft.strip())
    return "; ".join(filter(None, remarks))


def remove_pair(target: str) -> None:
    """Forget which draft a target has. Raises ModelNotFoundError, naming the nearest, where there is none."""
    _known("pair", target, catalogue.user_pairs())
    _write("pairs", target, None)


def pair_of(target: Resolved) -> str | None:
    """The draft the user wants for a target: by what was typed for it, or by the file that leads to.

    Raises ModelNotFoundError when the user's file cannot be understood.
    """
    pairs = catalogue.user_pairs()
    if target.name.lower() in pairs:
        return pairs[target.name.lower()]
    for reference, draft in pairs.items():
        try:
            if resolve(reference, allow_download=False).path == target.path:
                return draft
        except EdgespecError:
            continue
    return None


def _remark(reference: str) -> str:
    """What to know of a reference to what is not here. Raises ModelNotFoundError where it leads nowhere."""
    try:
        resolve(reference, allow_download=False)
    except ModelNotFoundError as error:
        if "is not on this machine" in error.what:
            return error.what
        raise
    return ""


def _known(what: str, name: str, names: Mapping[str, str]) -> None:
    if name.strip().lower() in names:
        return
    near = difflib.get_close_matches(name.strip().lower(), names, n=1, cutoff=0.4)
    raise ModelNotFoundError(
        f"there is no {what} {name}",
        f"did you mean {near[0]}?" if near else "`edgespec models list` shows all",
    )


def _write(table: _Table, name: str, reference: str | None) -> None:
    """Set one line of the user's file, or take it out. Raises ModelNotFoundError where that cannot be."""
    path = catalogue.user_aliases_path()
    names = catalogue.user_aliases() if table == "aliases" else catalogue.user_pairs()
    wanted = {key: value for key, value in names.items() if key != name.strip().lower()}
    if reference is not None:
        wanted[name.strip().lower()] = reference
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        changed = _edited(text, table, name.strip(), reference)
        found = tomllib.loads(changed).get(table, {})
        if {key.lower(): value for key, value in found.items()} != wanted:
            raise ValueError("it is written in a way that edgespec does not change")
        # A link stays one, and leads to the new text.
        write_private(path.resolve(), changed.encode())
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{path} was left as it is: {reason_of(error)}", f"change {name} under [{table}] there yourself"
        ) from error


def _edited(text: str, table: _Table, name: str, reference: str | None) -> str:
    """The text with that line changed, added, or (without a reference) taken out."""
    lines = text.splitlines()
    line = [] if reference is None else [f"{_quoted(name)} = {_quoted(reference)}"]
    header = next((i for i, one in enumerate(lines) if re.match(rf"^\s*\[{table}\]\s*(#.*)?$", one)), None)
    if header is None:
        return "\n".join([*lines, *([""] if lines else []), f"[{table}]", *line]) + "\n"
    end = next((i for i in range(header + 1, len(lines)) if _HEADER.match(lines[i])), len(lines))
    for i in range(header + 1, end):
        if _key(lines[i]) == name.lower():
            return "\n".join([*lines[:i], *line, *lines[i + 1 :]]) + "\n"
    while end > header + 1 and not lines[end - 1].strip():
        end -= 1
    return "\n".join([*lines[:end], *line, *lines[end:]]) + "\n"


def _key(line: str) -> str | None:
    """The name a line gives a value to, lower case; None where it gives none."""
    try:
        return next(iter(tomllib.loads(line)), "").lower() or None
    except ValueError:
        return None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
