"""Create drafters for the methods that draft with a head."""

from __future__ import annotations

from typing import cast

from edgespec.errors import EdgespecError, about_option
from edgespec.methods.base import Drafter
from edgespec.methods.context import DrafterContext, LoadedHead, MissingDrafter, why_no_view
from edgespec.methods.head_cache import HeadCache
from edgespec.methods.model.making import draft_with
from edgespec.model.optional_features import HeadModel
from edgespec.model.registry import all_files
from edgespec.system.files import file_state

__all__ = ["make_head_drafter"]


def make_head_drafter(context: DrafterContext, name: str) -> Drafter | MissingDrafter:
    """Create the drafter that runs the target's head for a method, or explain why there is none.

    Args:
        context: The target and its heads.
        name: The name of the method.

    Raises:
        EdgespecError: The user named the head or its method, and the head cannot be loaded.
    """
    heads = {option.method: option for option in context.heads}
    option = heads.get(name)
    if option is None or option.head is None:
        if heads and (other := next(iter(heads.values()))).source == "named":
            return MissingDrafter(
                f"{other.name} is a head for method {other.method}", f"use --method {other.method}"
            )
        reason = f"it needs a head that was trained for {context.target.facts.name}"
        advice = f"choose one with --head HEAD (see `edgespec models show {context.reference}`)"
        return MissingDrafter(f"{reason}, but {context.why_no_head}", context.head_advice or advice)
    if name not in context.target.facts.capabilities.self_draft_methods:
        missing = why_no_view(context.target, option.head)
        context.dropped_heads.append(f"not drafting with the head {option.name}: {missing.reason}")
        return missing
    try:
        with about_option("head"):
            view = cast(HeadModel, context.target.self_draft(option.head))
    except EdgespecError as error:
        if option.source == "named" or name in context.named:
            raise
        context.dropped_heads.append(f"not drafting with the head {option.name}: {error.what}")
        return MissingDrafter(error.what, error.next_step)
    files = all_files(option.head.path) if option.head.path else ()
    cache = HeadCache(view, " ".join((name, *map(file_state, files))))
    path = str(option.head.path) if option.head.path else ""
    context.loaded_heads.append(LoadedHead(option.name, path, cache))
    return draft_with(context, view, name, cache)
