"""Create the drafter that runs the target at lower precision."""

from __future__ import annotations

from edgespec.methods.base import Drafter
from edgespec.methods.context import DrafterContext, MissingDrafter, why_no_view
from edgespec.methods.lowbit.copies import check_lowbit, find_lowbit, lowbit_file
from edgespec.methods.model.making import draft_with
from edgespec.model.base import LowBit

__all__ = ["make", "preparation"]


def preparation(context: DrafterContext) -> str:
    """Return the command that creates the low-bit copy, or an empty string if none is needed."""
    if context.file_format.low_bit_copy_format and find_lowbit(context.files.path) is None:
        return f"edgespec prepare lowbit {context.reference}"
    return ""


def make(context: DrafterContext) -> Drafter | MissingDrafter:
    """Create the drafter, or explain why the target cannot draft at lower precision.

    Raises:
        ModelFileError: The low-bit copy is damaged or outdated.
    """
    facts, uses_copy = context.target.facts, bool(context.file_format.low_bit_copy_format)
    if "lowbit" not in facts.capabilities.self_draft_methods:
        return why_no_view(context.target, LowBit(facts.path if uses_copy else None))
    copy = None
    if uses_copy:
        prepared = find_lowbit(context.files.path)
        if prepared is None:
            return MissingDrafter(
                f"there is no low-bit copy of {facts.name}", f"run `{preparation(context)}` once"
            )
        check_lowbit(prepared, context.files.path)
        copy = str(lowbit_file(prepared))
    view = context.target.self_draft(
        LowBit(copy, context.arguments["draft_sinks"], context.window_tokens or None)
    )
    return draft_with(context, view, "lowbit")
