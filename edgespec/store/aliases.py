"""Validate aliases and draft pairs, and look up the draft model that the user paired with a target."""

from __future__ import annotations

import re

from edgespec.errors import EdgespecError, ModelFileError, ModelNotFoundError, NotDownloadedError, OptionError
from edgespec.store import catalogue
from edgespec.store.installed import (
    ModelVocabulary,
    read_model_info,
    same_token_ids,
    shared_token_fraction,
)
from edgespec.store.reference import NameReference, Resolved, parse_reference, resolve

# Special values for `--draft`, which cannot be used as aliases.
_RESERVED = ("auto", "none")


def check_alias(name: str, reference: str) -> str:
    """Check that `name` can be an alias for a model reference.

    Returns:
        A notice for the user if the model is not on this machine, otherwise an empty string.

    Raises:
        OptionError: The name is invalid, or the alias would refer to itself.
        ModelNotFoundError: No model matches the reference.
    """
    try:
        is_name = isinstance(parse_reference(name), NameReference)
    except ModelNotFoundError:
        is_name = False
    # Require a letter or digit first, because a name with a leading dash would be parsed as an option.
    if not is_name or name.lower() in _RESERVED or not re.match(r"[^\W_]", name):
        raise OptionError(
            f"{name!r} is not a valid alias",
            "use only letters and digits, with dots and hyphens between them",
            code="alias_invalid",
        )
    aliases = catalogue.user_aliases() | {name.lower(): reference}
    seen, text = [name.lower()], reference
    while text.lower() in aliases:
        if text.lower() in seen:
            raise OptionError(
                f"the alias {name} would refer to itself via {reference}",
                "choose another model for the alias",
                code="alias_invalid",
            )
        seen.append(text.lower())
        text = aliases[text.lower()].strip()
    return _not_installed_notice(text)


def check_pair(target: str, draft: str) -> str:
    """Check that a draft model can be paired with a target.

    Returns:
        A notice for the user if a model is not on this machine or the draft model lacks some of the target's
        tokens, otherwise an empty string.

    Raises:
        OptionError: One of the names is invalid.
        ModelNotFoundError: No model matches one of the references.
    """
    if target.lower() in _RESERVED or draft.lower() == "auto":
        raise OptionError(
            f"cannot pair {target} with {draft}",
            "name a model first, then its draft model or `none`",
        )
    names = (target,) if draft.lower() == "none" else (target, draft)
    if notices := list(filter(None, map(_not_installed_notice, names))):
        return "; ".join(notices)
    return _token_notice(*names) if len(names) == 2 else ""


def _token_notice(target: str, draft: str) -> str:
    """Return a notice if the draft model's vocabulary lacks any of the target's tokens."""
    pair = []
    try:
        for reference in (target, draft):
            resolved = resolve(reference, allow_download=False)
            pair.append(ModelVocabulary(resolved.path, resolved.format, read_model_info(resolved).vocabulary))
    except ModelFileError as error:
        return str(error)
    fraction = 1.0 if same_token_ids(*pair) else shared_token_fraction(*pair)
    if fraction == 1.0:
        return ""
    if not fraction:
        return f"{draft} has no tokens in common with {target}, so it cannot be its draft model"
    percent = min(99.9, 100 * fraction)
    return f"{draft} has only {percent:.3g}% of {target}'s tokens, so the speed-up will be smaller"


def preferred_draft(target: Resolved) -> str | None:
    """Return the draft model that the user has paired with a target, or None.

    A pair applies to every reference that resolves to the same target file.

    Raises:
        ModelNotFoundError: The user's alias file is invalid.
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


def _not_installed_notice(reference: str) -> str:
    """Return a notice if the model is not on this machine. Raises ModelNotFoundError if it does not exist."""
    try:
        resolve(reference, allow_download=False)
    except NotDownloadedError as error:
        return error.what
    return ""
