"""Draft the tokens that a grammar requires."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext

__all__ = ["METHOD"]


def _make(_context: DrafterContext) -> Drafter:
    from edgespec.methods.grammar.drafter import GrammarDrafter

    return GrammarDrafter()


METHOD = Method(
    name="grammar",
    label="text fixed by the schema",
    help="text that is fixed by the reply's JSON schema or grammar",
    docs=MethodDocs(
        source="text that is fixed by the reply's schema, regular expression or grammar, such as names and"
        " punctuation in JSON",
        requires="a reply with a [constraint](constraints.md)",
        memory="none",
    ),
    order=110,
    make=_make,
    only_constrained=True,
    auto="always",
    always_loaded=True,
)
