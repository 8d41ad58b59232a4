"""Create `Method` records for the methods that draft with a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import HeadKind, Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter

__all__ = ["head_method"]


def head_method(
    name: str,
    *,
    label: str,
    help_text: str,
    docs: MethodDocs,
    order: int,
    head: HeadKind,
    works_on_workers: bool = True,
) -> Method:
    """Create a `Method` record for drafting with a head. The arguments are fields of `Method`."""

    def make(context: DrafterContext) -> Drafter | MissingDrafter:
        # Import lazily, because `edgespec --help` loads all method records.
        from edgespec.methods.model.making import make_head_drafter

        return make_head_drafter(context, name)

    return Method(
        name=name,
        label=label,
        help=help_text,
        docs=docs,
        order=order,
        make=make,
        needs="head",
        head=head,
        reads=frozenset({"draft_confidence", "draft_branches", "head"}),
        works_on_workers=works_on_workers,
        experimental=True,
        auto="always",
    )
