"""The names and pairs a user made: what may be one, and which draft the user wants for a target."""

from __future__ import annotations

import re

from edgespec.catalog import catalogue
from edgespec.catalog.installed import read_model_info
from edgespec.catalog.metadata_cache import MetadataCache
from edgespec.catalog.reference import NameReference, Resolved, parse, resolve
from edgespec.errors import EdgespecError, ModelFileError, ModelNotFoundError, OptionError

__all__ = ["check_alias", "check_pair", "preferred_draft"]

_RESERVED = ("auto", "none")


def check_alias(name: str, reference: str) -> str:
    """Whether `name` may stand for a reference. Gives a remark, empty where the model is on this machine.

    Raises OptionError for a name that cannot be one, ModelNotFoundError for a reference that leads nowhere.
    """
    try:
        is_name = isinstance(parse(name), NameReference)
    except ModelNotFoundError:
        is_name = False
    # One that begins with a dash would be taken for an option.
    if not is_name or name.lower() in _RESERVED or not re.match(r"[^\W_]", name):
        raise OptionError(
            f"{name!r} cannot be a name of a model",
            "take letters and digits, with dots and dashes between",
        )
    aliases = catalogue.user_aliases() | {name.lower(): reference}
    seen, text = [name.lower()], reference
    while text.lower() in aliases:
        if text.lower() in seen:
            raise OptionError(f"{name} would lead back to itself by {reference}", "name another model")
        seen.append(text.lower())
        text = aliases[text.lower()].strip()
    return _remark(text)


def check_pair(target: str, draft: str) -> str:
    """Whether a draft may be chosen for a target.

    Gives a remark, empty where both are on this machine and have the same tokens.
    Raises OptionError for a target that is none, ModelNotFoundError for a reference that leads nowhere.
    """
    if target.lower() in _RESERVED or draft.lower() == "auto":
        raise OptionError(f"{target} and {draft} are no pair", "give a target, and a draft or none")
    names = (target,) if draft.lower() == "none" else (target, draft)
    if remarks := list(filter(None, map(_remark, names))):
        return "; ".join(remarks)
    return _about_tokens(*names) if len(names) == 2 else ""


def _about_tokens(target: str, draft: str) -> str:
    """What to know of a draft with other tokens."""
    known = MetadataCache()
    pair = []
    try:
        for reference in (target, draft):
            found = resolve(reference, allow_download=False)
            pair.append((found.path, found.format, read_model_info(found, known).vocabulary))
    except ModelFileError as error:
        return str(error)
    share = 1.0 if known.same_ids(*pair) else known.shared_token_fraction(*pair)
    known.keep()
    if share == 1.0:
        return ""
    if not share:
        return f"{draft} has no token of {target} and cannot draft for it"
    percent = min(99.9, 100 * share)
    return f"{draft} has other tokens, {percent:.3g} % of those of {target}: expect less of it"


def preferred_draft(target: Resolved) -> str | None:
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
        if "is not on this machine" not in error.what:
            raise
        return error.what
    return ""
