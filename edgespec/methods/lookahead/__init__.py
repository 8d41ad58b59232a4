"""Draft with n-grams from Jacobi iterations (lookahead decoding)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext

__all__ = ["METHOD"]


def _make(context: DrafterContext) -> Drafter:
    from edgespec.methods.lookahead.drafter import LookaheadDrafter

    return LookaheadDrafter(context.target.facts.capabilities, context.measured_curve())


METHOD = Method(
    name="lookahead",
    label="parallel guesses",
    help="the model itself, guessing tokens at several positions in parallel",
    docs=MethodDocs(
        source="the target itself, guessing tokens at several positions in one pass ([lookahead "
        "decoding](https://arxiv.org/abs/2402.02057))",
        requires="a machine that can check many tokens at once cheaply",
        memory="none",
    ),
    order=100,
    make=_make,
    works_on_workers=False,
    drafts_trees=True,
    experimental=True,
)
